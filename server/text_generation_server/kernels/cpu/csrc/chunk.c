/* Attention of a prompt chunk of one row in bfloat16 on the matrix unit.

   First, the row's keys and values are copied into the order of the tiles, once for all queries. Then, for each block
   of 32 queries of one key head, the scores, weights and weighted values of 128 keys at a time are computed, with a
   running softmax in base 2.

   A query's result does not depend on where the prompt was cut into chunks: blocks of keys that lie before its window
   change nothing. */
#include "scores.h"
#include "team.h"

#if defined(__AMX_BF16__)

#include "tiles.h"

#define BLOCK_QUERIES 32

/* The keys and values of one key head, copied into tiles of 1 KiB. They begin with position `base`, a multiple of
   CHUNK_KEYS; `length` is the number of positions from there to the end, rounded up to a multiple of CHUNK_KEYS.
   Positions past the end, and those that no query sees, are zeros. */
struct chunk_kv {
  bf16 *keys;   /* [length / 16][size / 2][16 positions][2]: pairs are neighbouring numbers of a head */
  bf16 *values; /* [length / 32][size / 16][16 pairs][16 columns][2]: pairs are neighbouring positions */
};

/* The arguments of `attend_chunk`, and the copied keys and values. */
struct chunk {
  const bf16 *q; /* [end - start, heads, size], tokens q_stride apart */
  long q_stride, heads, kv_heads, size, start, end;
  bf16 *out; /* [end - start, heads, size] */
  struct score_rule rule;
  const struct chunk_kv *kv; /* [kv_heads] */
  long base;
};

static long padded_length(long length) { return (length + CHUNK_KEYS - 1) / CHUNK_KEYS * CHUNK_KEYS; }

/* Copies head `at` of the cache, counted over all slots, as bfloat16. */
INLINE void read_head_as_bf16(const void *heads, const float *scales, enum type type, long at, long size, bf16 *to) {
  if (type == BF16) {
    memcpy(to, (const bf16 *)heads + at * size, size * sizeof(bf16));
  } else {
    for (long d = 0; d < size; d += LANES) store_bf16(to + d, load(heads, at * size + d, type) * scales[at]);
  }
}

/* 16 numbers of 16 bits, widened to 32 bits. */
INLINE vu widen_16_bits(const bf16 *p) {
  vu16 h;
  memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, vu);
}

/* Copies the keys and values of 32 positions, from `first` on, into their tiles. Of these, positions seen … end - 1 are
   seen by a query. */
static void lay_out_32_positions(const void *heads, const float *scales, enum type type, long kv_heads, long kv_head,
                                 long size, const int32_t *slots, long first, long seen, long end, bf16 *keys,
                                 bf16 *values) {
  bf16 states[2][MAX_HEAD_SIZE];
  for (int i = 0; i < 32; i += 2) {
    for (int which = 0; which < 2; which++) { /* which: 0 for the keys, 1 for the values */
      for (int j = 0; j < 2; j++) {
        if (first + i + j >= seen && first + i + j < end)
          read_head_as_bf16(heads, scales, type, (slots[first + i + j] * 2L + which) * kv_heads + kv_head, size,
                            states[j]);
        else
          memset(states[j], 0, size * sizeof(bf16));
      }
      if (which == 0) {
        for (int j = 0; j < 2; j++) {
          uint32_t *column = (uint32_t *)(keys + (i + j) / 16 * 16 * size) + (i + j) % 16;
          for (long d = 0; d < size / 2; d++) memcpy(column + d * 16, states[j] + 2 * d, 4);
        }
      } else {
        for (long d = 0; d < size; d += 16) {
          vu pairs = widen_16_bits(states[0] + d) | widen_16_bits(states[1] + d) << 16;
          memcpy(values + d * 32 + i / 2 * 32, &pairs, sizeof pairs);
        }
      }
    }
  }
}

/* A block of queries of one key head, and their state after some of the keys. Their result so far is out / sum.

   Matrices are stored as columns of 64 bytes, whose rows follow each other in memory. The rows of a whole matrix
   would be a power of two apart, and would evict each other from the first-level cache. */
struct chunk_block {
  bf16 q[MAX_HEAD_SIZE / 32][BLOCK_QUERIES][32];
  bf16 weights[CHUNK_KEYS / 32][BLOCK_QUERIES][32];
  float scores[CHUNK_KEYS / 16][BLOCK_QUERIES][16];
  float out[MAX_HEAD_SIZE / 16][BLOCK_QUERIES][16];
  float peaks[BLOCK_QUERIES]; /* the largest score so far; sums and out are in units of 2^peak */
  float sums[BLOCK_QUERIES];  /* sums of each query's weights */
} __attribute__((aligned(64)));

/* scores = q * keys for CHUNK_KEYS keys. Tiles 0 to 3 are scores, 4 and 5 queries 0-15 and 16-31, 6 and 7 keys. */
static void score_chunk_keys(struct chunk_block *b, const bf16 *keys, long size) {
  MEMORY_IS_WRITTEN;
  for (int k = 0; k < CHUNK_KEYS; k += 32) {
    const bf16 *first = keys + k * size, *second = first + 16 * size;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long d = 0; d < size; d += 32) {
      _tile_loadd(4, b->q[d / 32][0], 64);
      _tile_loadd(5, b->q[d / 32][16], 64);
      _tile_loadd(6, first + d * 16, 64);
      _tile_loadd(7, second + d * 16, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, b->scores[k / 16][0], 64);
    _tile_stored(1, b->scores[k / 16 + 1][0], 64);
    _tile_stored(2, b->scores[k / 16][16], 64);
    _tile_stored(3, b->scores[k / 16 + 1][16], 64);
  }
  MEMORY_IS_WRITTEN;
}

/* Turns the scores of query i into weights 2^(score - peak). The query attends to keys hidden … visible - 1 of the
   CHUNK_KEYS keys. If a score exceeds the peak, it becomes the new peak, and sums and out are multiplied by 2^(old
   peak - new peak). `distance`: position of the first key - position of the query. is_plain, a constant: there is no
   hidden key, and scores have nothing but their scale. */
INLINE void weigh_chunk_query(struct chunk_block *b, int i, long hidden, long visible, const struct score_rule *r,
                              float slope, long distance, long size, int is_plain) {
  const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  vf scores[CHUNK_KEYS / LANES], peaks = splat(-INFINITY), sums = {};
  for (int k = 0; k < CHUNK_KEYS / LANES; k++) {
    vf s = load(b->scores[k][i], 0, F32) * r->scale;
    if (!is_plain && alters(r)) s = altered(s, r, splat(slope), lane_numbers() + (float)(distance + k * LANES));
    scores[k] = blend(lanes + k * LANES < (int)visible, s, splat(-INFINITY));
    if (!is_plain) scores[k] = blend(lanes + k * LANES < (int)hidden, splat(-INFINITY), scores[k]);
    peaks = larger(peaks, scores[k]);
  }
  float peak = lane_max(peaks);
  if (!(peak <= b->peaks[i])) {
    vf shrink = exp2_of(splat(b->peaks[i] - peak));
    b->sums[i] *= shrink[0];
    for (long d = 0; d < size / LANES; d++) store(b->out[d][i], 0, load(b->out[d][i], 0, F32) * shrink, F32);
    b->peaks[i] = peak;
  }
  /* Until the query has seen a key, its peak is minus infinity, which would make NaN of hidden scores. */
  float base = !is_plain && b->peaks[i] == -INFINITY ? 0 : b->peaks[i];
  for (int k = 0; k < CHUNK_KEYS / LANES; k++) {
    vf w = exp2_of_negative(scores[k] - base);
    store_bf16(b->weights[k / 2][i] + k % 2 * LANES, w);
    sums += w;
  }
  b->sums[i] += lane_sum(sums);
}

/* out += weights * values for CHUNK_KEYS keys. Tiles 0 to 3 are out, 4 and 5 weights of queries 0-15 and 16-31, 6 and 7
   values. */
static void add_chunk_values(struct chunk_block *b, const bf16 *values, long size) {
  MEMORY_IS_WRITTEN;
  for (long d = 0; d < size; d += 32) {
    int second = d + 16 < size;
    _tile_loadd(0, b->out[d / 16][0], 64);
    _tile_loadd(2, b->out[d / 16][16], 64);
    if (second) {
      _tile_loadd(1, b->out[d / 16 + 1][0], 64);
      _tile_loadd(3, b->out[d / 16 + 1][16], 64);
    }
    for (int k = 0; k < CHUNK_KEYS; k += 32) {
      const bf16 *v = values + k * size + d * 32;
      _tile_loadd(4, b->weights[k / 32][0], 64);
      _tile_loadd(5, b->weights[k / 32][16], 64);
      _tile_loadd(6, v, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
      if (second) {
        _tile_loadd(7, v + 16 * 32, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, b->out[d / 16][0], 64);
    _tile_stored(2, b->out[d / 16][16], 64);
    if (second) {
      _tile_stored(1, b->out[d / 16 + 1][0], 64);
      _tile_stored(3, b->out[d / 16 + 1][16], 64);
    }
  }
  MEMORY_IS_WRITTEN;
}

/* Computes a block of queries of one key head, beginning with query `first`. The queries of a key head are numbered
   position by position: first all query heads of the key head at position `start`, then those at the next position. */
static void attend_query_block(const struct chunk *c, long kv_head, long first, struct chunk_block *b) {
  long group = c->heads / c->kv_heads, size = c->size, all = (c->end - c->start) * group;
  long count = all - first < BLOCK_QUERIES ? all - first : BLOCK_QUERIES;
  for (long i = 0; i < BLOCK_QUERIES; i++) {
    long query = first + (i < count ? i : 0), token = query / group, head = kv_head * group + query % group;
    for (long d = 0; d < size; d += 32) memcpy(b->q[d / 32][i], c->q + token * c->q_stride + head * size + d, 64);
    for (long d = 0; d < size; d += LANES) memset(b->out[d / 16][i], 0, 64);
    b->peaks[i] = c->rule.sinks ? c->rule.sinks[head] * LOG2E : -INFINITY;
    b->sums[i] = c->rule.sinks ? 1 : 0;
  }
  long last = c->start + (first + count - 1) / group; /* the position of the block's last query */
  long seen = first_seen(&c->rule, c->start + first / group);
  for (long key = seen / CHUNK_KEYS * CHUNK_KEYS; key <= last; key += CHUNK_KEYS) {
    long at = (key - c->base) * size;
    score_chunk_keys(b, c->kv[kv_head].keys + at, size);
    for (int i = 0; i < BLOCK_QUERIES; i++) {
      long query = first + (i < count ? i : 0), position = c->start + query / group, visible = position - key + 1;
      if (visible > CHUNK_KEYS) visible = CHUNK_KEYS;
      if (c->rule.window || alters(&c->rule))
        weigh_chunk_query(b, i, first_seen(&c->rule, position) - key, visible, &c->rule,
                          slope_of(&c->rule, kv_head * group + query % group), key - position, size, 0);
      else
        weigh_chunk_query(b, i, 0, visible, &c->rule, 0, 0, size, 1);
    }
    add_chunk_values(b, c->kv[kv_head].values + at, size);
  }
  for (long i = 0; i < count; i++) {
    long token = (first + i) / group, head = kv_head * group + (first + i) % group;
    for (long d = 0; d < size; d += LANES)
      store_bf16(c->out + (token * c->heads + head) * size + d, load(b->out[d / 16][i], 0, F32) / b->sums[i]);
  }
}

EXPORT void attend_chunk(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct attend_chunk_arguments *a = arguments;
  const bf16 *q = a->q;
  long q_stride = a->q_stride, heads = a->heads, kv_heads = a->kv_heads, size = a->head_size;
  long start = a->start, end = a->end;
  bf16 *out = a->out, *scratch = a->scratch;
  const void *kv = a->kv;
  const float *scales = a->kv_scales;
  enum type kv_type = a->kv_type;
  const int32_t *slots = a->slots;
  struct chunk_kv rows[kv_heads];
  struct score_rule rule = make_rule((float)a->scale * LOG2E, a->softcap, a->slopes, a->sinks, a->window);
  long seen = first_seen(&rule, start), base = seen / CHUNK_KEYS * CHUNK_KEYS;
  long length = padded_length(end) - base, group = heads / kv_heads;
  long blocks = ((end - start) * group + BLOCK_QUERIES - 1) / BLOCK_QUERIES;
  for (long h = 0; h < kv_heads; h++) {
    rows[h].keys = scratch + 2 * h * size * length;
    rows[h].values = rows[h].keys + size * length;
  }
  struct chunk c = {q, q_stride, heads, kv_heads, size, start, end, out, rule, rows, base};
  FOR_EACH_ITEM(item, kv_heads * (length / 32), 1, team) {
    const struct chunk_kv *to = &rows[item % kv_heads];
    long first = item / kv_heads * 32;
    lay_out_32_positions(kv, scales, kv_type, kv_heads, item % kv_heads, size, slots, base + first, seen, end,
                         to->keys + first * size, to->values + first * size);
  }
  wait_for_team(team);
  struct chunk_block b;
  configure_tiles(16, 16);
  /* Queries at later positions attend to more keys. They are taken first, so that the items taken last are short. */
  FOR_EACH_ITEM(item, kv_heads * blocks, 1, team)
    attend_query_block(&c, item % kv_heads, (blocks - 1 - item / kv_heads) * BLOCK_QUERIES, &b);
  _tile_release();
}

#endif
