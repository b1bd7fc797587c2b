/* Attention of queries over the slots of their rows, in place: keys and values are read once for all query heads of a
   group, wherever their slots are.

   Keys are reduced in tiles of 64 from position 0, tiles in splits of 512, and splits are merged in order, whoever
   computed them: a query's result has the same bits in a decode step, in a prompt chunk, alone or among others. Softmax
   is in base 2, on float32 sums. */
#include <stdlib.h>

#include "vectors.h"

#define TILE 64
#define SPLIT 512
#define MAX_SIZE 256 /* numbers in a head */
#define GROUP 4      /* query heads at a time: their sums stay in registers */

struct cache {
  const void *heads;   /* [slots, 2 * kv_heads, size] */
  const float *scales; /* [slots, 2 * kv_heads], or null */
  long kv_heads, size;
  enum type type;
};

/* What a query knows after some of its keys: sum and out are relative to 2^peak. */
struct state {
  float peak, sum;
  float out[MAX_SIZE] __attribute__((aligned(64)));
};

INLINE const void *head_at(const struct cache *c, long slot, long head) {
  return (const char *)c->heads + (slot * 2 * c->kv_heads + head) * c->size * size_of(c->type);
}

INLINE void fetch(const void *p, long bytes) {
  for (long i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)p + i, 0, 2);
}

/* scores[q][key], in base 2, for `count` keys of a tile. Meanwhile the head's part of the `left` slots after the tile comes
   nearer. */
INLINE void score(const float *q, int queries, const struct cache *c, enum type type, long size, long kv_head,
                  const int32_t *slots, int count, long left, float scores[GROUP][TILE]) {
  for (int first = 0; first < TILE; first += LANES) {
    if (first >= count) {
#pragma GCC unroll 4
      for (int j = 0; j < queries; j++) store(scores[j], first, splat(-INFINITY), F32);
      continue;
    }
    vf sums[GROUP][LANES], scales = splat(1.0f);
#pragma GCC unroll 1
    for (int i = 0; i < LANES; i++) {
      long slot = slots[first + i < count ? first + i : first];
      const void *key = head_at(c, slot, kv_head);
      if (first + i < left) {
        long next = slots[TILE + first + i];
        fetch(head_at(c, next, kv_head), size * size_of(type));
        fetch(head_at(c, next, c->kv_heads + kv_head), size * size_of(type));
      }
#pragma GCC unroll 4
      for (int j = 0; j < queries; j++) sums[j][i] = (vf){};
#pragma GCC unroll 8
      for (long d = 0; d < size; d += LANES) {
        vf k = load(key, d, type);
#pragma GCC unroll 8
        for (int j = 0; j < queries; j++) sums[j][i] += k * load(q + j * size, d, F32);
      }
      if (type == I8 || type == F8) scales[i] = c->scales[slot * 2 * c->kv_heads + kv_head];
    }
#pragma GCC unroll 4
    for (int j = 0; j < queries; j++) {
      vf s = sums_of(sums[j]);
      store(scores[j], first, type == I8 || type == F8 ? s * scales : s, F32);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < queries; j++)
    for (int i = count; i < TILE; i++) scores[j][i] = -INFINITY;
}

/* Scores become weights relative to the new peak; what was summed up before shrinks accordingly. */
INLINE void weigh(float scores[TILE], struct state *s, long size) {
  vf peaks = load(scores, 0, F32);
  for (int i = LANES; i < TILE; i += LANES) peaks = max_of(peaks, load(scores, i, F32));
  float peak = largest_of(peaks);
  if (!(peak <= s->peak)) {
    float shrink = 0;
    if (s->sum > 0) {
      vf powers = exp2_of(splat(s->peak - peak));
      shrink = powers[0];
    }
    s->sum *= shrink;
    for (long d = 0; d < size; d += LANES) store(s->out, d, load(s->out, d, F32) * shrink, F32);
    s->peak = peak;
  }
  vf sum = {};
  for (int i = 0; i < TILE; i += LANES) {
    vf w = exp2_of(load(scores, i, F32) - s->peak);
    store(scores, i, w, F32);
    sum += w;
  }
  s->sum += sum_of(sum);
}

INLINE void add_values(const struct cache *c, enum type type, long size, long kv_head, const int32_t *slots, int count,
                       float weights[GROUP][TILE], int queries, struct state *states) {
  /* 64 numbers of each query at a time, so that the sums fit the registers. */
  for (long first = 0; first < size; first += 4 * LANES) {
    vf out[GROUP][4];
    int width = size - first < 4 * LANES ? (int)((size - first) / LANES) : 4;
#pragma GCC unroll 4
    for (int j = 0; j < queries; j++)
#pragma GCC unroll 4
      for (int d = 0; d < 4; d++) out[j][d] = d < width ? load(states[j].out, first + d * LANES, F32) : (vf){};
    if (width == 4) {
      for (int i = 0; i < count; i++) {
        const void *value = head_at(c, slots[i], c->kv_heads + kv_head);
        vf v[4];
#pragma GCC unroll 4
        for (int d = 0; d < 4; d++) v[d] = load(value, first + d * LANES, type);
#pragma GCC unroll 4
        for (int j = 0; j < queries; j++)
#pragma GCC unroll 4
          for (int d = 0; d < 4; d++) out[j][d] += v[d] * weights[j][i];
      }
    } else {
      for (int i = 0; i < count; i++) {
        const void *value = head_at(c, slots[i], c->kv_heads + kv_head);
#pragma GCC unroll 4
        for (int d = 0; d < width; d++) {
          vf v = load(value, first + d * LANES, type);
#pragma GCC unroll 4
          for (int j = 0; j < queries; j++) out[j][d] += v * weights[j][i];
        }
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < queries; j++)
#pragma GCC unroll 4
      for (int d = 0; d < width; d++) store(states[j].out, first + d * LANES, out[j][d], F32);
  }
}

/* One tile of keys for up to GROUP queries of one position. */
INLINE void attend_tile(const float *q, int queries, const struct cache *c, enum type type, long size, long kv_head,
                        const int32_t *slots, int count, long left, struct state *states) {
  float scores[GROUP][TILE] __attribute__((aligned(64)));
  score(q, queries, c, type, size, kv_head, slots, count, left, scores);
  for (int j = 0; j < queries; j++) weigh(scores[j], &states[j], size);
  if (type == I8 || type == F8)
    for (int i = 0; i < count; i++) {
      float scale = c->scales[slots[i] * 2 * c->kv_heads + c->kv_heads + kv_head];
      for (int j = 0; j < queries; j++) scores[j][i] *= scale;
    }
  add_values(c, type, size, kv_head, slots, count, scores, queries, states);
}

INLINE void attend_some(const float *q, int queries, const struct cache *c, enum type type, long size, long kv_head,
                        const int32_t *slots, int count, long left, struct state *states) {
  switch (queries) {
    case 1: attend_tile(q, 1, c, type, size, kv_head, slots, count, left, states); break;
    case 2: attend_tile(q, 2, c, type, size, kv_head, slots, count, left, states); break;
    case 3: attend_tile(q, 3, c, type, size, kv_head, slots, count, left, states); break;
    default: attend_tile(q, 4, c, type, size, kv_head, slots, count, left, states);
  }
}

#if defined(__AVX512F__)
#define BY_SIZE(TYPE)                                                                                      \
  switch (c->size) {                                                                                       \
    case 64: attend_some(q, queries, c, TYPE, 64, kv_head, slots, count, left, states); break;                   \
    case 128: attend_some(q, queries, c, TYPE, 128, kv_head, slots, count, left, states); break;                 \
    default: attend_some(q, queries, c, TYPE, c->size, kv_head, slots, count, left, states);                     \
  }                                                                                                        \
  break
#else
#define BY_SIZE(TYPE)                                                       \
  attend_some(q, queries, c, TYPE, c->size, kv_head, slots, count, left, states); \
  break
#endif

/* Copies of the above for each type and, where registers are many, the usual sizes. */
static void attend_keys(const float *q, int queries, const struct cache *c, long kv_head, const int32_t *slots,
                        int count, long left, struct state *states) {
  switch (c->type) {
    case F32: BY_SIZE(F32);
    case BF16: BY_SIZE(BF16);
    case I8: BY_SIZE(I8);
    case F8: BY_SIZE(F8);
  }
}

/* The later split's state joins the earlier ones'. */
static void merge(struct state *into, const struct state *from, long size) {
  float peak = into->peak > from->peak ? into->peak : from->peak;
  vf a = exp2_of(splat(into->peak - peak)), b = exp2_of(splat(from->peak - peak));
  into->sum = into->sum * a[0] + from->sum * b[0];
  for (long d = 0; d < size; d += LANES)
    store(into->out, d, load(into->out, d, F32) * a[0] + load(from->out, d, F32) * b[0], F32);
  into->peak = peak;
}

static void put(void *out, enum type type, const struct state *s, long size) {
  for (long d = 0; d < size; d += LANES) store(out, d, load(s->out, d, F32) / s->sum, type);
}

/* Key/value heads `first` … of one token, and the query heads that belong to them. */
struct share {
  long first, count, group;
};

static void attend_split(const float *q, const struct cache *c, const struct share *s, const int32_t *slots, long count,
                         long left, struct state *states) {
  for (long j = 0; j < s->count * s->group; j++) {
    states[j].peak = -INFINITY;
    states[j].sum = 0;
    memset(states[j].out, 0, c->size * sizeof(float));
  }
  for (long i = 0; i < count; i += TILE) {
    for (long head = 0; head < s->count; head++)
      for (long j = 0; j < s->group; j += GROUP) {
        long query = head * s->group + j;
        attend_keys(q + query * c->size, s->group - j < GROUP ? (int)(s->group - j) : GROUP, c, s->first + head,
                    slots + i, count - i < TILE ? (int)(count - i) : TILE, left - i - TILE, states + query);
      }
  }
}

/* q and out are those of the share's first query head. */
static void attend_share(const void *q, enum type type, const struct cache *c, const struct share *s, float scale,
                         const int32_t *slots, long length, void *out) {
  long queries = s->count * s->group, size = c->size;
  struct state states[queries], later[queries];
  float scaled[queries * size] __attribute__((aligned(64)));
  for (long i = 0; i < queries * size; i += LANES) store(scaled, i, load(q, i, type) * scale, F32);
  for (long start = 0; start < length; start += SPLIT) {
    long count = length - start < SPLIT ? length - start : SPLIT;
    attend_split(scaled, c, s, slots + start, count, length - start, start ? later : states);
    for (long j = 0; start && j < queries; j++) merge(&states[j], &later[j], size);
  }
  for (long j = 0; j < queries; j++) put((char *)out + j * size * size_of(type), type, &states[j], size);
}

/* q and out [tokens, heads, size]; token t is a query of row rows[t] over its first lengths[t] slots. q's tokens are
   q_stride numbers apart. */
EXPORT void attend(const void *q, long q_stride, int q_type, void *out, long tokens, long heads, const void *kv,
                   const float *scales, long kv_heads, long size, int kv_type, const int32_t *table, long table_stride,
                   const int32_t *rows, const int32_t *lengths, float scale, int threads) {
  struct cache c = {kv, scales, kv_heads, size, kv_type};
  /* A token's heads together, unless that would leave threads without work. */
  long together = tokens < 2 * threads ? 1 : kv_heads, group = heads / kv_heads, bytes = size_of(q_type);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (long item = 0; item < tokens * kv_heads / together; item++) {
    long t = item * together / kv_heads;
    struct share s = {item * together % kv_heads, together, group};
    long query = s.first * group * size;
    attend_share((const char *)q + (t * q_stride + query) * bytes, q_type, &c, &s, scale * LOG2E,
                 table + rows[t] * table_stride, lengths[t], (char *)out + (t * heads * size + query) * bytes);
  }
}
