/* Runs a list of kernels on a team of threads, with a barrier after each kernel.

   The threads are started once and kept. Between two lists they wait in two ways: for a short time they spin, and a
   list that comes meanwhile begins at once; then they sleep, so that other processes get their cores. Waking a thread
   may take 0.1 ms. `wake_team` lets this time pass while the caller prepares the next list. */
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE _mm_pause()
#else
#define PAUSE
#endif

#include "product.h"

#define MAX_THREADS 1023
/* How long a thread spins before it sleeps. At a barrier most waits end while it spins: a longer wait means that
   another thread has lost its core to another process, and sleeping gives it this core. */
#define BARRIER_SPIN_NS 30000
#define NEXT_LIST_SPIN_NS 50000 /* after a list of calls */
#define AWAKE_SPIN_NS 400000    /* after wake_team */

static long monotonic_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000L + t.tv_nsec;
}

#if !defined(__linux__)
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t woken = PTHREAD_COND_INITIALIZER;
#endif

/* Sleeps while *word is `value`, or shorter. `asleep` counts the sleepers. */
static void sleep_while(atomic_uint *word, unsigned value, atomic_int *asleep) {
  atomic_fetch_add(asleep, 1);
#if defined(__linux__)
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#else
  pthread_mutex_lock(&sleep_lock);
  if (atomic_load(word) == value) pthread_cond_wait(&woken, &sleep_lock);
  pthread_mutex_unlock(&sleep_lock);
#endif
  atomic_fetch_sub(asleep, 1);
}

/* Wakes all that sleep while *word has its old value. A thread may mark itself as asleep after this load of `asleep`.
   It still wakes up: before it sleeps, *word is compared once more, and has changed already. */
static void wake_sleepers(atomic_uint *word, atomic_int *asleep) {
  if (!atomic_load(asleep)) return;
#if defined(__linux__)
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#else
  (void)word;
  pthread_mutex_lock(&sleep_lock);
  pthread_cond_broadcast(&woken);
  pthread_mutex_unlock(&sleep_lock);
#endif
}

/* Waits until *word is no longer `value`. Returns the new value. */
static unsigned wait_for_change(atomic_uint *word, unsigned value, long spin_ns, atomic_int *asleep) {
  unsigned now = atomic_load_explicit(word, memory_order_acquire);
  for (long start = 0; now == value; now = atomic_load_explicit(word, memory_order_acquire)) {
    for (int i = 0; i < 64 && atomic_load_explicit(word, memory_order_relaxed) == value; i++) PAUSE;
    long time = monotonic_ns();
    if (!start) start = time;
    if (time - start > spin_ns && atomic_load_explicit(word, memory_order_acquire) == value)
      sleep_while(word, value, asleep);
  }
  return now;
}

void wait_for_team(struct team *team) {
  int others = team->threads - 1; /* read before the barrier: after it, the team may be the next list's */
  unsigned passed = atomic_load_explicit(&team->barriers, memory_order_relaxed);
  if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) < others) {
    wait_for_change(&team->barriers, passed, BARRIER_SPIN_NS, &team->asleep);
    return;
  }
  atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
  atomic_store_explicit(&team->next, 0, memory_order_relaxed);
  atomic_store(&team->barriers, passed + 1);
  wake_sleepers(&team->barriers, &team->asleep);
}

/* A list of calls, as run_calls gets it. */
struct list {
  const struct call *calls;
  long count;
  double *ends;
};

#if defined(__AVX512BF16__)
kernel gemm;

/* Prefetches weights of the first product after call `at`, unless this was done before: `product` is the last one for
   which it was done. Short calls come between products, and hardly read memory. */
static long prefetch_next_product(struct list list, long at, long product, int me) {
  if (product > at) return product;
  for (long i = at + 1; i < list.count; i++)
    if (list.calls[i].kernel == gemm) {
      prefetch_product((const struct gemm_arguments *)list.calls[i].arguments, me);
      return i;
    }
  return list.count;
}
#else
static long prefetch_next_product(struct list list, long at, long product, int me) {
  (void)at, (void)product, (void)me;
  return list.count;
}
#endif

static void run_list(struct list list, struct team *team, int me) {
  long product = -1;
  for (long i = 0; i < list.count; i++) {
    list.calls[i].kernel(list.calls[i].arguments, team, me);
    product = prefetch_next_product(list, i, product, me);
    wait_for_team(team);
    if (list.ends && me == 0) list.ends[i] = (double)monotonic_ns() * 1e-9;
  }
}

/* The threads, and the list that they run. `turn` changes when there is a list: its low bits are the number of threads
   that run it, of which thread 0 is the caller; or 0 if there is none, and the threads only have to be awake. A thread
   that does not run a list reads nothing but `turn`, because the next list may be written meanwhile. */
#define TURN (MAX_THREADS + 1)
static struct {
  pthread_mutex_t busy; /* held by the thread that runs a list or starts threads */
  int started;          /* number of threads that were started, without the caller */
  atomic_int are_ending;
  pthread_t threads[MAX_THREADS];
  atomic_uint turn __attribute__((aligned(64)));
  atomic_int asleep;
  struct list list __attribute__((aligned(64)));
  struct team team;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER};

static void *run_lists(void *number) {
  int me = (int)(long)number;
  unsigned turn = 0;
  long spin_ns = NEXT_LIST_SPIN_NS;
  for (;;) {
    turn = wait_for_change(&pool.turn, turn, spin_ns, &pool.asleep);
    spin_ns = turn % TURN ? NEXT_LIST_SPIN_NS : AWAKE_SPIN_NS;
    if (atomic_load(&pool.are_ending)) return NULL;
    if (me < (int)(turn % TURN)) run_list(pool.list, &pool.team, me);
  }
  return NULL;
}

/* A process that was forked has none of the threads, and may have been forked while they ran a list. */
static void forget_threads(void) {
  memset(&pool, 0, sizeof pool);
  pthread_mutex_init(&pool.busy, NULL);
}

static void forget_threads_in_forks(void) { pthread_atfork(NULL, NULL, forget_threads); }

/* Starts threads until there are `threads`, with the caller, or the system refuses. Returns their number. They end with
   the process, and leave its signals to other threads. */
static int start_threads(int threads) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  if (pool.started + 1 >= threads) return threads;
  pthread_once(&once, forget_threads_in_forks);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  while (pool.started + 1 < threads &&
         !pthread_create(&pool.threads[pool.started], NULL, run_lists, (void *)(long)(pool.started + 1)))
    pool.started++;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return pool.started + 1;
}

static void begin_turn(int threads) {
  unsigned turn = atomic_load_explicit(&pool.turn, memory_order_relaxed);
  atomic_store(&pool.turn, (turn / TURN + 1) * TURN + (unsigned)threads);
  wake_sleepers(&pool.turn, &pool.asleep);
}

/* Runs `count` calls one after the other, each on all threads. If `ends` is not null, stores the time after each
   call there, in seconds. Callers in several threads wait for each other. */
EXPORT void run_calls(const struct call *calls, long count, int threads, double *ends) {
  struct list list = {calls, count, ends};
  if (threads <= 1) {
    struct team alone = {.threads = 1};
    run_list(list, &alone, 0);
    return;
  }
  pthread_mutex_lock(&pool.busy);
  pool.list = list;
  pool.team.threads = start_threads(threads);
  begin_turn(pool.team.threads);
  run_list(list, &pool.team, 0);
  pthread_mutex_unlock(&pool.busy);
}

/* Wakes the threads of the team, which then wait awake for the next list for some tenths of a millisecond. */
EXPORT void wake_team(void) {
  if (pthread_mutex_trylock(&pool.busy)) return; /* the threads run a list now */
  begin_turn(0);
  pthread_mutex_unlock(&pool.busy);
}

/* Ends the threads of the team, so that a fork copies a process of one thread. The next list starts others. */
EXPORT void end_team(void) {
  pthread_mutex_lock(&pool.busy);
  atomic_store(&pool.are_ending, 1);
  begin_turn(0);
  while (pool.started) pthread_join(pool.threads[--pool.started], NULL);
  atomic_store(&pool.are_ending, 0);
  pthread_mutex_unlock(&pool.busy);
}
