/* The state of attention of runs, and what a tile of keys does to it; runs.c says how. */
#pragma once

#include "attention.h"
#include "words.h"

#define MAX_BLOCKS (128 / QUERY_LANES)
#define ROW_WORDS (MAX_HEAD_SIZE + 16) /* not a power of two: rows that are would evict each other from the cache */

/* Neighbouring positions of a row whose queries are computed. */
struct run {
  int32_t row, start, end; /* positions start … end - 1 */
  int32_t token;           /* index of the token at `start` in q and out */
  int32_t states;          /* where the run is computed split by split: number of queries before it in run_job.states;
                              otherwise -1 */
};

/* The arguments of `attend_runs`. */
struct run_job {
  const char *q;        /* [T, heads, size], tokens q_stride apart */
  char *out;            /* [T, heads, size] */
  long q_stride, heads; /* heads: of queries */
  enum type type;       /* type of q and out */
  enum pairs pairs;     /* what a word is */
  struct kv_cache cache;
  const int32_t *table; /* [rows, positions]: slots; rows are table_stride apart */
  long table_stride;
  struct score_rule rule;
  char *states; /* for each run that is computed split by split: [splits, kv_heads, blocks], of state_bytes each */
};

/* The keys and values of TILE_KEYS positions, one key head. */
struct position_tile {
  float keys[TILE_KEYS][ROW_WORDS];   /* words; a pair is two numbers of a key */
  float values[TILE_KEYS][ROW_WORDS]; /* words; pairs: row i has the numbers of positions 2i and 2i + 1 */
  float key_scales[TILE_KEYS];        /* multiply the products of queries and keys */
  float value_scales[TILE_KEYS];      /* multiply the weights, where the cache has 8 bits */
} __attribute__((aligned(64)));

/* The state of a block's queries after some keys: their result so far is out / sums. */
struct lane_state {
  float peaks[QUERY_LANES]; /* the largest score so far; sums and out are in units of 2^peak */
  float sums[QUERY_LANES];  /* sums of the weights */
  float out[MAX_HEAD_SIZE][QUERY_LANES];
} __attribute__((aligned(64)));

/* The part of a lane_state that is used. */
INLINE long state_bytes(long size) { return (2 + size) * QUERY_LANES * (long)sizeof(float); }

/* Queries of one key head, numbered position by position: first all query heads of the key head at the run's first
   position, then those at the next. */
struct lane_block {
  float q[MAX_HEAD_SIZE][QUERY_LANES] __attribute__((aligned(64))); /* words */
  float scores[TILE_KEYS][QUERY_LANES];                             /* later the weights, as words */
  struct lane_state split, whole; /* after keys of the current split, and after all splits before it */
  int32_t positions[QUERY_LANES], seen[QUERY_LANES]; /* each query sees positions seen … its own */
  float slopes[QUERY_LANES], sinks[QUERY_LANES];
  float factors[QUERY_LANES], units[QUERY_LANES]; /* integers: of the scores; what 1 means in the weights of a tile */
  long count;                                     /* queries in the block; the other lanes repeat the last */
  int has_split;                                  /* whether `split` has any keys */
};

static inline void empty_state(struct lane_state *s, long size) {
  for (int v = 0; v < QUERY_LANES; v += LANES) store(s->peaks, v, splat(-INFINITY), F32);
  memset(s->sums, 0, sizeof s->sums);
  memset(s->out, 0, size * sizeof s->out[0]);
}

/* Merges the state after some keys into the state after keys before them. A query that has seen no key yet has the peak
   minus infinity. */
static void merge_states(struct lane_state *into, const struct lane_state *from, long size) {
  for (int v = 0; v < QUERY_LANES; v += LANES) {
    vf before = load(into->peaks, v, F32), after = load(from->peaks, v, F32), peaks = larger(before, after);
    vf base = blend(peaks == -INFINITY, (vf){}, peaks), x = exp2_of(before - base), y = exp2_of(after - base);
    store(into->sums, v, load(into->sums, v, F32) * x + load(from->sums, v, F32) * y, F32);
    for (long d = 0; d < size; d++)
      store(into->out[d], v, load(into->out[d], v, F32) * x + load(from->out[d], v, F32) * y, F32);
    store(into->peaks, v, peaks, F32);
  }
}

/* Merges the current split into the splits before it. */
static void merge_split(struct lane_block *b, long size) {
  if (b->has_split) merge_states(&b->whole, &b->split, size);
}

/* Begins the split that holds position `start`. Sinks are keys of a query's first split. */
static void begin_split(struct lane_block *b, const struct score_rule *r, long start, long size) {
  merge_split(b, size);
  empty_state(&b->split, size);
  b->has_split = 1;
  for (int i = 0; r->sinks && i < QUERY_LANES; i++)
    if (b->seen[i] / SPLIT_KEYS == start / SPLIT_KEYS) {
      b->split.peaks[i] = b->sinks[i];
      b->split.sums[i] = 1;
    }
}

/* The keys and values that are prefetched while other positions are computed. */
struct ahead {
  struct prefetch next;
  long heads; /* number of heads that are prefetched for COLUMNS_AT_ONCE keys of a block */
};

/* Scores of keys from … to - 1 of a tile. Meanwhile prefetches keys and values that are used later. peaks[i] becomes
   the largest score of each query in vector i. */
INLINE void score_positions(struct lane_block *b, const struct position_tile *t, int from, int to, long words,
                            int pairs, struct ahead *ahead, vf peaks[2]) {
  peaks[0] = peaks[1] = splat(-INFINITY);
  for (int i = from; i < to; i += COLUMNS_AT_ONCE) {
    vf sums[COLUMNS_AT_ONCE][2];
    prefetch_heads(&ahead->next, ahead->heads, ahead->next.cache->type, ahead->next.cache->size);
    multiply_keys(sums, b->q[0], t->keys[i], ROW_WORDS, words, pairs);
#pragma GCC unroll 8
    for (int j = 0; j < COLUMNS_AT_ONCE; j++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        vf scores = sums[j][v] * t->key_scales[i + j];
        if (pairs == INT_PAIRS)
          scores =
              __builtin_convertvector((vi)sums[j][v], vf) * (t->key_scales[i + j] * load(b->factors, v * LANES, F32));
        store(b->scores[i + j], v * LANES, scores, F32);
        peaks[v] = larger(peaks[v], scores);
      }
  }
}

/* Alters scores, if the rule does, and hides keys that a query does not see. `first`: position of the tile. peaks: as
   in score_positions. */
NOT_INLINED void alter_positions(struct lane_block *b, const struct score_rule *r, long first, int from, int to,
                                 vf peaks[2]) {
  for (int v = 0; v < 2; v++) {
    vi positions, seen;
    memcpy(&positions, b->positions + v * LANES, sizeof positions);
    memcpy(&seen, b->seen + v * LANES, sizeof seen);
    vf slopes = load(b->slopes, v * LANES, F32);
    peaks[v] = splat(-INFINITY);
    for (int i = from; i < to; i++) {
      vi distances = (int32_t)(first + i) - positions;
      vf scores = load(b->scores[i], v * LANES, F32);
      if (alters(r)) scores = altered(scores, r, slopes, __builtin_convertvector(distances, vf));
      scores = blend((distances <= 0) & (seen <= (int32_t)(first + i)), scores, splat(-INFINITY));
      store(b->scores[i], v * LANES, scores, F32);
      peaks[v] = larger(peaks[v], scores);
    }
  }
}

/* Raises the peaks of one vector of queries, v … v + LANES - 1, to the largest scores of a tile. */
INLINE vf raise_peaks(struct lane_block *b, int v, vf peaks, long size) {
  vf old = load(b->split.peaks, v, F32);
  vi raised = peaks > old;
  if (!any_lane(raised)) return old;
  vf sums = load(b->split.sums, v, F32);
  vf shrink = blend(raised, blend(sums > 0.0f, exp2_of(old - peaks), (vf){}), splat(1));
  store(b->split.sums, v, sums * shrink, F32);
  for (long d = 0; d < size; d++) store(b->split.out[d], v, load(b->split.out[d], v, F32) * shrink, F32);
  peaks = blend(raised, peaks, old);
  store(b->split.peaks, v, peaks, F32);
  return peaks;
}

/* Turns the scores of one vector of queries into weights 2^(score - peak). Except with pairs of bfloat16, the weights
   are summed in the order of attention.c: those of every LANES-th key one after the other, and then the LANES sums in
   the order of lane_sum. */
INLINE void weigh_positions(struct lane_block *b, const struct position_tile *t, int v, int from, int to, vf base,
                            int scaled, int pairs) {
  vf sums[LANES] = {};
  vi most = {};
  for (int i = from; i < to; i += 2) {
    vf w[2];
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      vf score = load(b->scores[i + j], v, F32) - base;
      w[j] = pairs == BF16_PAIRS ? exp2_for_bf16(score) : exp2_up_to_1(score);
      sums[pairs == BF16_PAIRS ? j : (i + j) % LANES] += w[j];
      if (scaled) w[j] *= t->value_scales[i + j];
      if (pairs == INT_PAIRS) most = larger_magnitude(most, w[j]);
      if (pairs != BF16_PAIRS) store(b->scores[i + j], v, w[j], F32);
    }
    if (pairs == BF16_PAIRS) store(b->scores[i / 2], v, paired_words(w[0], w[1]), F32);
  }
  for (int width = pairs == BF16_PAIRS ? 1 : LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) sums[i] += sums[i + width];
  store(b->split.sums, v, load(b->split.sums, v, F32) + sums[0], F32);
  if (pairs != INT_PAIRS) return;
  vf largest = count_as_number(most);
  store(b->units, v, largest * (1 / MAX_INT16), F32);
  for (int i = from; i < to; i += 2) {
    vi words = narrow_pair(load(b->scores[i], v, F32), load(b->scores[i + 1], v, F32), MAX_INT16 / largest);
    memcpy(b->scores[i / 2] + v, &words, sizeof words);
  }
}

/* out += weights * values of keys from … to - 1. */
INLINE void add_position_values(struct lane_block *b, const struct position_tile *t, int from, int to, long size,
                                int pairs) {
  if (pairs) from /= 2, to /= 2;
  for (long d = 0; d < size; d += COLUMNS_AT_ONCE) {
    vf sums[COLUMNS_AT_ONCE][2];
#pragma GCC unroll 8
    for (int j = 0; j < COLUMNS_AT_ONCE; j++) {
      sums[j][0] = pairs == INT_PAIRS ? (vf){} : load(b->split.out[d + j], 0, F32);
      sums[j][1] = pairs == INT_PAIRS ? (vf){} : load(b->split.out[d + j], LANES, F32);
    }
    add_products(sums, b->scores[from], QUERY_LANES, t->values[from] + d, ROW_WORDS, 1, to - from, pairs);
#pragma GCC unroll 8
    for (int j = 0; j < COLUMNS_AT_ONCE; j++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        float *out = b->split.out[d + j] + v * LANES;
        if (pairs == INT_PAIRS)
          sums[j][v] = add_integers(load(out, 0, F32), (vi)sums[j][v], load(b->units, v * LANES, F32));
        store(out, 0, sums[j][v], F32);
      }
  }
}

INLINE void attend_words(const struct run_job *job, const struct position_tile *t, long first, int from, int to,
                         int pairs, struct ahead *ahead, struct lane_block *b) {
  long size = job->cache.size;
  int scaled = is_scaled(job->cache.type);
  vf peaks[2];
  score_positions(b, t, from, to, pairs ? size / 2 : size, pairs, ahead, peaks);
  int all_seen = first >= b->seen[QUERY_LANES - 1] && first + to - 1 <= b->positions[0];
  if (!all_seen || alters(&job->rule)) alter_positions(b, &job->rule, first, from, to, peaks);
  for (int v = 0; v < 2; v++) {
    vf raised = raise_peaks(b, v * LANES, peaks[v], size), base = blend(raised == -INFINITY, (vf){}, raised);
    weigh_positions(b, t, v * LANES, from, to, base, scaled, pairs);
  }
  add_position_values(b, t, from, to, size, pairs);
}

/* Adds the tile of positions from `first` on to the state of a block. */
static void attend_positions(const struct run_job *job, const struct position_tile *t, long first, struct ahead *ahead,
                             struct lane_block *b) {
  long last = b->positions[QUERY_LANES - 1], seen = b->seen[0];
  if (first > last || first + TILE_KEYS <= seen) return;
  if (!b->has_split || first % SPLIT_KEYS == 0) begin_split(b, &job->rule, first, job->cache.size);
  int from = seen > first ? (int)(seen - first) / COLUMNS_AT_ONCE * COLUMNS_AT_ONCE : 0;
  int to = (int)min(TILE_KEYS, (last - first) / COLUMNS_AT_ONCE * COLUMNS_AT_ONCE + COLUMNS_AT_ONCE);
#if defined(__AVX512BF16__)
  if (job->pairs == BF16_PAIRS) {
    attend_words(job, t, first, from, to, BF16_PAIRS, ahead, b);
    return;
  }
#else
  if (job->pairs == INT_PAIRS) {
    attend_words(job, t, first, from, to, INT_PAIRS, ahead, b);
    return;
  }
#endif
  attend_words(job, t, first, from, to, NO_PAIRS, ahead, b);
}
