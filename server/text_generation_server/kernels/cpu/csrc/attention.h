/* Attention over slots: what there is to do, and what is fetched before it is needed. */
#pragma once

#include "team.h"
#include "vectors.h"

#define MAX_HEAD_SIZE 256 /* numbers in a head */

struct kv_cache {
  const void *heads;   /* [slots, 2 * kv_heads, size] */
  const float *scales; /* [slots, 2 * kv_heads], or null */
  long kv_heads, size;
  enum type type;
};

INLINE const void *head_at(const struct kv_cache *c, long slot, long head) {
  return (const char *)c->heads + (slot * 2 * c->kv_heads + head) * c->size * bytes_of(c->type);
}

/* What will be read next, fetched in the order of its addresses, a head at a time between all that is computed: many lines at
   once would hold up the loads of what it is computed from. */
struct prefetch {
  const struct kv_cache *cache;
  const int32_t *slots;
  long left;             /* slots */
  long first, count;     /* key/value heads that are of interest */
  int values;            /* whether the values of the first slot are next, not its keys */
  const char *at, *end;  /* heads that follow each other */
};

/* On to the keys of a slot, or its values, or both where nothing lies between them. */
static inline void prefetch_next_heads(struct prefetch *s) {
  const struct kv_cache *c = s->cache;
  int both = s->count == c->kv_heads;
  s->at = head_at(c, *s->slots, s->first + (s->values ? c->kv_heads : 0));
  s->end = s->at + (both ? 2 : 1) * s->count * c->size * bytes_of(c->type);
  s->values = !both && !s->values;
  if (!s->values) {
    s->slots++;
    s->left--;
  }
}

INLINE void prefetch_heads(struct prefetch *s, long heads, enum type type, long size) {
#pragma GCC unroll 2
  for (long i = 0; i < heads; i++) {
    if (__builtin_expect(s->at == s->end, 0)) {
      if (s->left <= 0) return;
      prefetch_next_heads(s);
    }
#pragma GCC unroll 4
    for (long line = 0; line < size * bytes_of(type); line += 64) __builtin_prefetch(s->at + line, 0, 2);
    s->at += size * bytes_of(type);
  }
}

/* One call's arguments. */
struct attention {
  const char *q;
  char *out;
  long q_stride, tokens, heads, together; /* together: key/value heads of an item of the work */
  enum type type;                         /* of q and out */
  struct kv_cache cache;
  const int32_t *table, *rows, *lengths;
  long table_stride;
  float scale; /* in base 2 */
};

/* Key/value heads `first` … of one token, and the query heads that belong to them. */
struct decode_item {
  const int32_t *slots;
  long token, length, first, count, group;
};

INLINE long min(long a, long b) { return a < b ? a : b; }

INLINE long count_items(const struct attention *job) { return job->tokens * job->cache.kv_heads / job->together; }

INLINE struct decode_item item_at(const struct attention *job, long item) {
  long kv_heads = job->cache.kv_heads, token = item * job->together / kv_heads;
  const int32_t *slots = job->table + job->rows[token] * job->table_stride;
  long first = item * job->together % kv_heads;
  return (struct decode_item){slots, token, job->lengths[token], first, job->together, job->heads / kv_heads};
}

/* What follows from position `start` of a share on: its next tile, or the first of the item that will be taken next. */
INLINE struct prefetch prefetch_after(const struct attention *job, const struct decode_item *s, long start, long tile, struct team *team) {
  struct prefetch next = {.cache = &job->cache, .slots = s->slots + start, .first = s->first, .count = s->count};
  next.left = min(s->length - start, tile);
  if (next.left > 0) return next;
  long item = atomic_load_explicit(&team->next, memory_order_relaxed);
  if (item >= count_items(job)) return next;
  struct decode_item n = item_at(job, item);
  next.slots = n.slots;
  next.left = min(n.length, tile);
  next.first = n.first;
  return next;
}

#if defined(__AMX_BF16__)
/* Queries, keys and values in bfloat16 on the matrix unit. */
void attend_on_matrix_unit(const struct attention *job, struct team *team);
#endif
