/* How threads meet, and work through a list of calls. */
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

/* Some tens of microseconds: most meetings are over by then. Who waits longer waits for a thread that has lost its core to
   another process, and makes room for it. */
#define SPINS_BEFORE_SLEEP 500

static void sleep_until_over(struct team *team, unsigned meeting) {
  for (int i = 0; i < SPINS_BEFORE_SLEEP; i++) {
    if (atomic_load_explicit(&team->meeting, memory_order_acquire) != meeting) return;
    PAUSE;
  }
  while (atomic_load_explicit(&team->meeting, memory_order_acquire) == meeting) {
#if defined(__linux__)
    atomic_fetch_add(&team->asleep, 1);
    syscall(SYS_futex, &team->meeting, FUTEX_WAIT_PRIVATE, meeting, NULL, NULL, 0);
    atomic_fetch_sub(&team->asleep, 1);
#else
    sched_yield();
#endif
  }
}

void wait_for_team(struct team *team) {
  unsigned meeting = atomic_load_explicit(&team->meeting, memory_order_relaxed);
  if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) < team->threads - 1) {
    sleep_until_over(team, meeting);
    return;
  }
  atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
  atomic_store_explicit(&team->next, 0, memory_order_relaxed);
  atomic_store(&team->meeting, meeting + 1);
#if defined(__linux__)
  /* Who falls asleep after this look finds that the meeting is over. */
  if (atomic_load(&team->asleep)) syscall(SYS_futex, &team->meeting, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#endif
}

static double monotonic_seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* All threads make these calls together, one after the other. `ends`, unless it is null, gets the time after each. */
EXPORT void run_calls(const struct call *calls, long count, int threads, double *ends) {
  struct team team = {.threads = threads};
#pragma omp parallel num_threads(threads)
  {
    int me = omp_get_thread_num();
#pragma omp single
    team.threads = omp_get_num_threads(); /* the system may have given fewer */
    for (long i = 0; i < count; i++) {
      calls[i].kernel(calls[i].words, &team, me);
      wait_for_team(&team);
      if (ends && me == 0) ends[i] = monotonic_seconds();
    }
  }
}
