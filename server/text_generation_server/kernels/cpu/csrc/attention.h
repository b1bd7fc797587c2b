/* Attention of single tokens over the slots of their rows: the arguments, how the work is divided into items, and
   the prefetch of keys and values. Used by attention.c, and by attention_tiles.c on the matrix unit. README.md
   explains how an item is computed. */
#pragma once

#include "heads.h"
#include "scores.h"
#include "team.h"

#define TILE_KEYS 64 /* keys that attention.c and runs.c take at a time */

/* Keys and values of all slots. */
struct kv_cache {
  const void *heads;   /* [slots, 2 * kv_heads, size]: the key heads of a slot, then its value heads */
  const float *scales; /* [slots, 2 * kv_heads] for I8 and F8, or null */
  long kv_heads, size; /* key heads (and as many value heads); numbers in a head */
  enum type type;
};

/* A key head for head 0 … kv_heads - 1, a value head for kv_heads … 2 * kv_heads - 1. */
INLINE const void *head_at(const struct kv_cache *c, long slot, long head) {
  return (const char *)c->heads + (slot * 2 * c->kv_heads + head) * c->size * bytes_of(c->type);
}

/* Whether the numbers of keys and values are multiplied by a scale for each head. */
INLINE int is_scaled(enum type type) { return type == I8 || type == F8; }

/* A cursor over the keys and values that will be read next, in the order of their addresses. They are prefetched one
   head at a time, between other instructions: many prefetches at once would delay the loads of the current keys and
   values. */
struct prefetch {
  const struct kv_cache *cache;
  const int32_t *slots; /* the slots to be prefetched */
  long left;            /* number of those slots */
  long first, count;    /* key heads first … first + count - 1, and the same value heads, are prefetched */
  int values;           /* 1: the next heads are the values of slots[0]; 0: the keys of slots[0] */
  const char *at, *end; /* addresses of the rest of the current run of neighbouring heads */
};

/* Begins the next run of neighbouring heads: the keys of a slot or its values, or both if all heads are prefetched. */
INLINE void prefetch_next_heads(struct prefetch *s, enum type type, long size) {
  const struct kv_cache *c = s->cache;
  const long bytes = size * bytes_of(type), slot = *s->slots * 2L * c->kv_heads + s->first;
  int both = s->count == c->kv_heads;
  s->at = (const char *)c->heads + (s->values ? slot + c->kv_heads : slot) * bytes;
  s->end = s->at + (both ? 2 : 1) * s->count * bytes;
  s->values = !both && !s->values;
  if (!s->values) {
    if (is_scaled(type)) __builtin_prefetch(c->scales + slot, 0, 2);
    s->slots++;
    s->left--;
  }
}

/* Prefetches the next `heads` heads. `type` and `size` are those of the cache; where they are constants, loops are
   unrolled. */
INLINE void prefetch_heads(struct prefetch *s, long heads, enum type type, long size) {
#pragma GCC unroll 2
  for (long i = 0; i < heads; i++) {
    if (__builtin_expect(s->at == s->end, 0)) {
      if (s->left <= 0) return;
      prefetch_next_heads(s, type, size);
    }
#pragma GCC unroll 4
    for (long line = 0; line < size * bytes_of(type); line += 64) __builtin_prefetch(s->at + line, 0, 2);
    s->at += size * bytes_of(type);
  }
}

/* The arguments of `attend`, and how its work is divided. */
struct attention {
  const char *q;                /* [tokens, heads, size], tokens q_stride apart */
  char *out;                    /* [tokens, heads, size] */
  long q_stride, tokens, heads; /* heads: of queries */
  long heads_per_item;          /* key heads that are one item of the work; divides kv_heads */
  enum type type;               /* type of q and out */
  struct kv_cache cache;
  const int32_t *table;          /* [rows, positions]: slots; rows are table_stride apart */
  const int32_t *rows, *lengths; /* [tokens] */
  long table_stride;
  struct score_rule rule;
};

/* An item of the work: one token, its key heads first … first + count - 1, and the `group` query heads of each of
   these key heads. */
struct decode_item {
  const int32_t *slots; /* slots of the token's row */
  long token;
  long seen, length; /* the token attends to positions seen … length - 1 */
  long first, count, group;
};

INLINE long min(long a, long b) { return a < b ? a : b; }

INLINE long count_items(const struct attention *job) { return job->tokens * job->cache.kv_heads / job->heads_per_item; }

INLINE struct decode_item item_at(const struct attention *job, long item) {
  long kv_heads = job->cache.kv_heads, token = item * job->heads_per_item / kv_heads;
  const int32_t *slots = job->table + job->rows[token] * job->table_stride;
  long first = item * job->heads_per_item % kv_heads;
  long length = job->lengths[token], seen = first_seen(&job->rule, length - 1);
  return (struct decode_item){slots, token, seen, length, first, job->heads_per_item, job->heads / kv_heads};
}

/* A cursor over the keys that are read after the current `tile` keys: the item's keys from position `start` on or,
   at the end of the item, the first keys of item number `item`. */
INLINE struct prefetch prefetch_after(const struct attention *job, const struct decode_item *s, long start, long tile,
                                      long item) {
  struct prefetch next = {.cache = &job->cache, .slots = s->slots + start, .first = s->first, .count = s->count};
  next.left = min(s->length - start, tile);
  if (next.left > 0) return next;
  if (item >= count_items(job)) return next;
  struct decode_item n = item_at(job, item);
  long begin = n.seen / tile * tile;
  next.slots = n.slots + begin;
  next.left = min(n.length - begin, tile);
  next.first = n.first;
  return next;
}

/* The next item, if no other thread takes it. */
INLINE long next_item(struct team *team) { return atomic_load_explicit(&team->next, memory_order_relaxed); }

/* Some keys of one head that follow each other, and the queries that attend to them. */
struct key_tile {
  const int32_t *slots;
  int hidden, count; /* the first `hidden` of `count` keys lie before the window */
  long kv_head;
  long query_head; /* the first of the query heads */
  long distance;   /* position of the first key - position of the query */
  const struct score_rule *rule;
};

/* Alters scores [queries, keys] as the layer's rule says; keys that are hidden or missing get minus infinity. `keys` is
   a multiple of LANES. */
void alter_scores(const struct key_tile *t, int queries, float *scores, int keys);

#if defined(__AVX512BF16__)
/* `attend` for queries in bfloat16, keys and values in bfloat16 or 8 bits, and head sizes that are multiples of 32. */
void attend_by_dot_products(const struct attention *job, struct team *team, int me);
#endif
#if defined(__AMX_BF16__)
/* `attend` on the matrix unit, for queries, keys and values in bfloat16 and head sizes that are multiples of 32. */
void attend_on_matrix_unit(const struct attention *job, struct team *team);
#endif
