/* Threads that work through the same calls together.

   Every kernel is a function of its words, called by each thread of a team. The threads take items of the work from one
   counter, because a core may be lent to somebody else in the middle, and meet when none are left. */
#pragma once

#include <stdatomic.h>

#define EXPORT __attribute__((visibility("default")))

struct team {
  int threads;
  atomic_long next;    /* item that nobody has taken */
  atomic_int arrived;  /* threads that have come to the meeting */
  atomic_int asleep;   /* threads that the system has to wake when it is over */
  atomic_uint meeting; /* how many meetings are over */
};

/* An argument of a kernel. */
union word {
  long i;
  double f;
  void *p;
};

/* `me` is the thread's index in its team. */
typedef void kernel(const union word *w, struct team *team, int me);

#define MOST_WORDS 16

struct call {
  kernel *kernel;
  union word words[MOST_WORDS];
};

/* The first of `count` items that are now this thread's; those past the end are nobody's. */
static inline long take_items(struct team *team, long count) {
  return atomic_fetch_add_explicit(&team->next, count, memory_order_relaxed);
}

/* Runs the statement for each of `count` items, of which a thread takes `grain` at a time. */
#define FOR_EACH_ITEM(item, count, grain, team)                                               \
  for (long first_ = take_items(team, grain); first_ < (count); first_ = take_items(team, grain)) \
    for (long item = first_; item < first_ + (grain) && item < (count); item++)

/* Returns when all threads have come here; items are counted from 0 again. Between two phases of a kernel; after the last,
   the threads meet by themselves. */
void wait_for_team(struct team *team);
