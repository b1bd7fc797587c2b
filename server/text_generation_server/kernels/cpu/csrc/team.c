/* Runs a list of kernels on a team of threads, with a barrier after each kernel. */
#include "team.h"

#include <limits.h>
#include <sched.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#else
#define omp_get_thread_num() 0
#define omp_get_num_threads() 1
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE _mm_pause()
#else
#define PAUSE
#endif

/* Number of spins of a thread at a barrier, some tens of microseconds, before it sleeps. Most waits end while it
   spins. A longer wait means that another thread has lost its core to another process: sleeping gives it this core. */
#define SPINS_BEFORE_SLEEP 500

static void wait_for_barrier(struct team *team, unsigned passed) {
  for (int i = 0; i < SPINS_BEFORE_SLEEP; i++) {
    if (atomic_load_explicit(&team->barriers, memory_order_acquire) != passed) return;
    PAUSE;
  }
  while (atomic_load_explicit(&team->barriers, memory_order_acquire) == passed) {
#if defined(__linux__)
    atomic_fetch_add(&team->asleep, 1);
    syscall(SYS_futex, &team->barriers, FUTEX_WAIT_PRIVATE, passed, NULL, NULL, 0);
    atomic_fetch_sub(&team->asleep, 1);
#else
    sched_yield();
#endif
  }
}

void wait_for_team(struct team *team) {
  unsigned passed = atomic_load_explicit(&team->barriers, memory_order_relaxed);
  if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) < team->threads - 1) {
    wait_for_barrier(team, passed);
    return;
  }
  atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
  atomic_store_explicit(&team->next, 0, memory_order_relaxed);
  atomic_store(&team->barriers, passed + 1);
#if defined(__linux__)
  /* A thread may mark itself as asleep after this load of `asleep`. It still wakes up: before it sleeps, the futex
     call compares `barriers`, which has changed already, and returns at once. */
  if (atomic_load(&team->asleep)) syscall(SYS_futex, &team->barriers, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#endif
}

static double monotonic_seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Runs `count` calls one after the other, each on all threads. If `ends` is not null, stores the time after each
   call there, in seconds. */
EXPORT void run_calls(const struct call *calls, long count, int threads, double *ends) {
  struct team team = {.threads = threads};
#pragma omp parallel num_threads(threads)
  {
    int me = omp_get_thread_num();
#pragma omp single
    team.threads = omp_get_num_threads(); /* OpenMP may start fewer threads than asked for */
    for (long i = 0; i < count; i++) {
      calls[i].kernel(calls[i].arguments, &team, me);
      wait_for_team(&team);
      if (ends && me == 0) ends[i] = monotonic_seconds();
    }
  }
}
