/* Products of a tile of keys and the queries of a group, read by slot, while what will be read next is fetched. */
#pragma once

#include "vectors.h"
#if defined(__AMX_BF16__)
#include "tiles.h"
#endif

#define TILE 64
#define MAX_SIZE 256 /* numbers in a head */
#define GROUP 4      /* query heads at a time: their sums stay in registers */

struct cache {
  const void *heads;   /* [slots, 2 * kv_heads, size] */
  const float *scales; /* [slots, 2 * kv_heads], or null */
  long kv_heads, size;
  enum type type;
};

INLINE const void *head_at(const struct cache *c, long slot, long head) {
  return (const char *)c->heads + (slot * 2 * c->kv_heads + head) * c->size * size_of(c->type);
}

/* The heads that will be read next, fetched one at a time in the order of their addresses: memory is read in one stream
   while what came before is computed. (Many at a time would hold up the loads of what is computed.) */
struct ahead {
  const int32_t *slots;
  long left;         /* slots */
  long first, count; /* key/value heads that are of interest */
  long head;         /* of the first slot, the next to fetch: of 2 * count */
};

INLINE void fetch(const struct cache *c, enum type type, long size, struct ahead *a) {
  if (a->left <= 0) return;
  long head = a->head < a->count ? a->head : a->head - a->count + c->kv_heads;
  const char *p = (const char *)c->heads + (*a->slots * 2L * c->kv_heads + a->first + head) * size * size_of(type);
#pragma GCC unroll 4
  for (long i = 0; i < size * size_of(type); i += 64) __builtin_prefetch(p + i, 0, 2);
  if (++a->head == 2 * a->count) {
    a->head = 0;
    a->slots++;
    a->left--;
  }
}

/* The products of a key and the queries [queries, size], to be summed up over the lanes. */
INLINE void multiply(const float *q, int queries, const void *key, enum type type, long size, vf products[GROUP][LANES],
                     int i) {
  vf sums[GROUP] = {};
#pragma GCC unroll 8
  for (long d = 0; d < size; d += LANES) {
    vf k = load(key, d, type);
#pragma GCC unroll 4
    for (int j = 0; j < queries; j++) sums[j] += k * load(q + j * size, d, F32);
  }
#pragma GCC unroll 4
  for (int j = 0; j < queries; j++) products[j][i] = sums[j];
}

#if defined(__AMX_BF16__)
/* Tile 0: sums of 16 keys by GROUP queries; 1: 16 keys by 32 numbers; 2: the queries' pairs of these numbers. */
static void configure_score_tiles(void) {
  struct tile_config c = {.palette = 1, .rows = {16, 16, 16}, .bytes = {GROUP * 4, 64, GROUP * 4}};
  MEMORY_IS_WRITTEN;
  _tile_loadconfig(&c);
}

/* [size / 2][GROUP][2], with zeros for queries that are not there. */
static void lay_out(const bf16 *q, int queries, long size, uint32_t *to) {
  memset(to, 0, size / 2 * GROUP * sizeof *to);
  for (int j = 0; j < queries; j++)
    for (long d = 0; d < size / 2; d++) memcpy(to + d * GROUP + j, q + j * size + 2 * d, 4);
}

INLINE int follow_each_other(const int32_t *slots) {
  const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return _mm512_cmpeq_epi32_mask(_mm512_loadu_si512(slots), (__m512i)(lanes + slots[0])) == 0xffff;
}

/* scores[q][key], in base 2, for `count` keys of a tile; q as `lay_out` leaves it. */
INLINE void score_in_tiles(const bf16 *q, int queries, const struct cache *c, long size, long kv_head, float scale,
                           const int32_t *slots, int count, struct ahead *ahead, float scores[GROUP][TILE]) {
  const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  float sums[TILE][GROUP] __attribute__((aligned(64)));
  bf16 gathered[LANES * MAX_SIZE] __attribute__((aligned(64)));
  for (int first = 0; first < count; first += LANES) {
    const bf16 *keys = head_at(c, slots[first], kv_head);
    long stride = 2 * c->kv_heads * size;
    if (first + LANES > count || !follow_each_other(slots + first)) {
      for (int i = 0; i < LANES; i++)
        memcpy(gathered + i * size, head_at(c, slots[first + i < count ? first + i : first], kv_head), size * sizeof(bf16));
      keys = gathered;
      stride = size;
    }
    MEMORY_IS_WRITTEN;
    _tile_zero(0);
    for (long d = 0; d < size; d += 32) {
      _tile_loadd(1, keys + d, stride * sizeof(bf16));
      _tile_loadd(2, q + d * GROUP, GROUP * 4);
      _tile_dpbf16ps(0, 1, 2);
    }
    _tile_stored(0, sums[first], sizeof sums[0]);
    MEMORY_IS_WRITTEN;
    for (int i = 0; i < LANES; i++) fetch(c, BF16, size, ahead);
  }
  for (int first = 0; first < TILE; first += LANES)
#pragma GCC unroll 4
    for (int j = 0; j < queries; j++) {
      vf s = splat(-INFINITY);
      if (first < count)
        s = choose(lanes + first < count, (vf)_mm512_i32gather_ps((__m512i)(lanes * GROUP), sums[first] + j, 4) * scale, s);
      store(scores[j], first, s, F32);
    }
}
#endif

/* scores[q][key], in base 2, for `count` keys of a tile. */
INLINE void score(const float *q, int queries, const struct cache *c, enum type type, long size,
                  long kv_head, float scale, const int32_t *slots, int count, struct ahead *ahead,
                  float scores[GROUP][TILE]) {
  for (int first = 0; first < TILE; first += LANES) {
    if (first >= count) {
#pragma GCC unroll 4
      for (int j = 0; j < queries; j++) store(scores[j], first, splat(-INFINITY), F32);
      continue;
    }
    vf products[GROUP][LANES], scales = splat(scale);
#pragma GCC unroll 1
    for (int i = 0; i < LANES; i++) {
      long slot = slots[first + i < count ? first + i : first];
      fetch(c, type, size, ahead);
      multiply(q, queries, head_at(c, slot, kv_head), type, size, products, i);
      if (type == I8 || type == F8) scales[i] = scale * c->scales[slot * 2 * c->kv_heads + kv_head];
    }
#pragma GCC unroll 4
    for (int j = 0; j < queries; j++) store(scores[j], first, sums_of(products[j]) * scales, F32);
  }
#pragma GCC unroll 4
  for (int j = 0; j < queries; j++)
    for (int i = count; i < TILE; i++) scores[j][i] = -INFINITY;
}
