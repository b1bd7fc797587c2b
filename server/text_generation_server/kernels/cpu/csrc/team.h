/* A team of threads that runs one list of kernels together.

   Every thread of the team calls every kernel of the list, with the same arguments. Inside a kernel the threads take
   work items from a shared counter instead of fixed parts: the system may take a thread's core away at any time, and
   then the other threads do its part. When no items are left, the threads wait for each other and continue with the
   next kernel. */
#pragma once

#include <stdatomic.h>

#include "arguments.h"

#define EXPORT __attribute__((visibility("default")))

/* What threads write often, and what they read in loops, have cache lines of their own. */
struct team {
  int threads;
  atomic_long next __attribute__((aligned(64)));   /* index of the first item that no thread has taken */
  atomic_int arrived __attribute__((aligned(64))); /* number of threads that wait at the barrier */
  atomic_int asleep; /* number of threads that sleep in the system call, which another system call must wake */
  atomic_uint barriers __attribute__((aligned(64))); /* number of barriers that all threads have passed */
};

/* `arguments` points to the kernel's struct of arguments.h. `me` is the thread's index in its team. */
typedef void kernel(const void *arguments, struct team *team, int me);

struct call {
  kernel *kernel;
  char arguments[MAX_ARGUMENTS * 8]; /* the kernel's struct, and unused bytes */
};

/* Takes `count` items for this thread and returns the first. The caller skips items past the end of the work. */
static inline long take_items(struct team *team, long count) {
  return atomic_fetch_add_explicit(&team->next, count, memory_order_relaxed);
}

/* for (long item …): runs the following statement once for each item of 0 … count - 1, on whichever thread takes the
   item. A thread takes `grain` items at a time. */
#define FOR_EACH_ITEM(item, count, grain, team)                                                   \
  for (long first_ = take_items(team, grain); first_ < (count); first_ = take_items(team, grain)) \
    for (long item = first_; item < first_ + (grain) && item < (count); item++)

/* The barrier between two phases of a kernel: returns when all threads have called it, and starts the count of items
   again at 0. Not needed at the end of a kernel, where `run_calls` does it. */
void wait_for_team(struct team *team);
