/* Attention of single tokens over the slots of their rows. Keys and values are read in place, wherever their slots are,
   and once for all query heads that share a key head. While one tile of keys is used, the next tile is prefetched.
   Where there is a matrix unit, attention_tiles.c does the same for bfloat16.

   The order of the arithmetic depends only on a key's position: keys are taken in tiles of 64 from position 0, tiles in
   splits of 512, and splits are merged in order. A window begins within a tile, whose first keys are then hidden. So a
   query's result from this file has the same bits in any step, alone and among other rows, and for any number of
   threads.

   Softmax is computed in base 2, which needs no multiplication before each exponential: scores are multiplied by
   log2(e) too. */
#include "attention.h"

#define MAX_HEADS_PER_ITEM 8
#define QUERIES_AT_ONCE 4 /* query heads of one key head computed together, whose sums fit the registers */
#define KEYS_AT_ONCE (LANES == 8 ? 2 : 1) /* keys that share the loads of the queries: measured on a Zen 3 */
#define MOST_VALUE_VECTORS 4

/* Vectors of a value whose sums, for this number of query heads, fit the registers; 4 lanes are faster with 4. */
INLINE int value_vectors(int queries) { return LANES == 8 && queries > 3 ? 2 : MOST_VALUE_VECTORS; }

/* Multiplies KEYS_AT_ONCE keys with each of the queries [queries, size]. products[query][i], and those after it, are
   LANES partial sums of a key each. */
INLINE void multiply_keys_at_once(const float *q, int queries, const void *keys[KEYS_AT_ONCE], enum type type,
                                  long size, vf products[QUERIES_AT_ONCE][LANES], int i) {
  vf sums[KEYS_AT_ONCE][QUERIES_AT_ONCE] = {};
#pragma GCC unroll 8
  for (long d = 0; d < size; d += LANES) {
    vf k[KEYS_AT_ONCE];
#pragma GCC unroll 2
    for (int n = 0; n < KEYS_AT_ONCE; n++) k[n] = load(keys[n], d, type);
#pragma GCC unroll 4
    for (int j = 0; j < queries; j++)
#pragma GCC unroll 2
      for (int n = 0; n < KEYS_AT_ONCE; n++) sums[n][j] += k[n] * load(q + j * size, d, F32);
  }
#pragma GCC unroll 4
  for (int j = 0; j < queries; j++)
#pragma GCC unroll 2
    for (int n = 0; n < KEYS_AT_ONCE; n++) products[j][i + n] = sums[n][j];
}

/* scores[query][key] of the `count` keys of a tile. The rest of the tile is filled with minus infinity. */
INLINE void score_keys(const float *q, int queries, const struct kv_cache *c, enum type type, long size, long kv_head,
                       float scale, const int32_t *slots, int count, struct prefetch *next,
                       float scores[QUERIES_AT_ONCE][TILE_KEYS]) {
  for (int first = 0; first < TILE_KEYS; first += LANES) {
    if (first >= count) {
#pragma GCC unroll 4
      for (int j = 0; j < queries; j++) store(scores[j], first, splat(-INFINITY), F32);
      continue;
    }
    vf products[QUERIES_AT_ONCE][LANES], scales = splat(scale);
#pragma GCC unroll 1
    for (int i = 0; i < LANES; i += KEYS_AT_ONCE) {
      const void *keys[KEYS_AT_ONCE];
      prefetch_heads(next, KEYS_AT_ONCE, type, size);
#pragma GCC unroll 2
      for (int n = 0; n < KEYS_AT_ONCE; n++) {
        long slot = slots[first + i + n < count ? first + i + n : first];
        keys[n] = head_at(c, slot, kv_head);
        if (type == I8 || type == F8) scales[i + n] = scale * c->scales[slot * 2 * c->kv_heads + kv_head];
      }
      multiply_keys_at_once(q, queries, keys, type, size, products, i);
    }
#pragma GCC unroll 4
    for (int j = 0; j < queries; j++) store(scores[j], first, lane_sums(products[j]) * scales, F32);
  }
#pragma GCC unroll 4
  for (int j = 0; j < queries; j++)
    for (int i = count; i < TILE_KEYS; i++) scores[j][i] = -INFINITY;
}

/* The state of one query after some of its keys: its result so far is out / sum. */
struct partial_attention {
  float peak; /* the largest score so far; sum and out are in units of 2^peak */
  float sum;  /* sum of the weights */
  float out[MAX_HEAD_SIZE] __attribute__((aligned(64)));
};

/* Replaces the scores of a tile by weights 2^(score - peak). If a score exceeds the peak, it becomes the new peak,
   and sum and out are multiplied by 2^(old peak - new peak). */
INLINE void weigh_scores(float scores[TILE_KEYS], struct partial_attention *s, long size) {
  vf peaks = load(scores, 0, F32);
  for (int i = LANES; i < TILE_KEYS; i += LANES) peaks = larger(peaks, load(scores, i, F32));
  float peak = lane_max(peaks);
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
  for (int i = 0; i < TILE_KEYS; i += LANES) {
    vf w = exp2_up_to_1(load(scores, i, F32) - s->peak);
    store(scores, i, w, F32);
    sum += w;
  }
  s->sum += lane_sum(sum);
}

/* Adds the values of keys hidden … count - 1 of a tile, times their weights, to the states' out. */
INLINE void add_weighted_values(const struct kv_cache *c, enum type type, long size, long kv_head, const int32_t *slots,
                                int hidden, int count, float weights[QUERIES_AT_ONCE][TILE_KEYS], int queries,
                                struct prefetch *next, struct partial_attention *states) {
  const long each = 2 * c->kv_heads * size * bytes_of(type);
  const int vectors = value_vectors(queries);
  for (long first = 0; first < size; first += vectors * LANES) {
    vf out[QUERIES_AT_ONCE][MOST_VALUE_VECTORS];
    int width = size - first < vectors * LANES ? (int)((size - first) / LANES) : vectors;
#pragma GCC unroll 4
    for (int j = 0; j < queries; j++)
#pragma GCC unroll 4
      for (int d = 0; d < vectors; d++) out[j][d] = d < width ? load(states[j].out, first + d * LANES, F32) : (vf){};
    const char *values = head_at(c, 0, c->kv_heads + kv_head);
    values += first * bytes_of(type);
    if (width == vectors) {
      for (int i = hidden; i < count; i++) {
        const void *value = values + slots[i] * each;
        if (first == 0) prefetch_heads(next, 1, type, size);
        vf w[QUERIES_AT_ONCE];
#pragma GCC unroll 4
        for (int j = 0; j < queries; j++) w[j] = splat(weights[j][i]);
#pragma GCC unroll 4
        for (int d = 0; d < vectors; d++) {
          vf v = load(value, d * LANES, type);
#pragma GCC unroll 4
          for (int j = 0; j < queries; j++) out[j][d] += v * w[j];
        }
      }
    } else {
      for (int i = hidden; i < count; i++) {
        const void *value = values + slots[i] * each;
#pragma GCC unroll 4
        for (int d = 0; d < width; d++) {
          vf v = load(value, d * LANES, type);
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

void alter_scores(const struct key_tile *t, int queries, float *scores, int keys) {
  for (int j = 0; j < queries; j++, scores += keys) {
    vf slopes = splat(slope_of(t->rule, t->query_head + j));
    for (int i = 0; alters(t->rule) && i < keys; i += LANES) {
      vf distances = lane_numbers() + (float)(t->distance + i);
      store(scores, i, altered(load(scores, i, F32), t->rule, slopes, distances), F32);
    }
    for (int i = 0; i < t->hidden; i++) scores[i] = -INFINITY;
    for (int i = t->count; i < keys; i++) scores[i] = -INFINITY;
  }
}

/* Adds one tile of keys to the states of up to QUERIES_AT_ONCE queries. The scales of 8-bit values are multiplied
   into their weights. */
INLINE void attend_tile(const float *q, int queries, const struct kv_cache *c, enum type type, long size,
                        const struct key_tile *t, struct prefetch *next, struct partial_attention *states) {
  float scores[QUERIES_AT_ONCE][TILE_KEYS] __attribute__((aligned(64)));
  score_keys(q, queries, c, type, size, t->kv_head, t->rule->scale, t->slots, t->count, next, scores);
  if (t->hidden || alters(t->rule)) alter_scores(t, queries, scores[0], TILE_KEYS);
  for (int j = 0; j < queries; j++) weigh_scores(scores[j], &states[j], size);
  if (type == I8 || type == F8) {
    float scales[TILE_KEYS] __attribute__((aligned(64))) = {0};
    const float *of_slot_0 = c->scales + c->kv_heads + t->kv_head;
    for (int i = t->hidden; i < t->count; i++) scales[i] = of_slot_0[t->slots[i] * 2L * c->kv_heads];
    for (int j = 0; j < queries; j++)
      for (int i = 0; i < TILE_KEYS; i += LANES)
        store(scores[j], i, load(scores[j], i, F32) * load(scales, i, F32), F32);
  }
  add_weighted_values(c, type, size, t->kv_head, t->slots, t->hidden, t->count, scores, queries, next, states);
}

/* The next three functions choose a compiled copy of attend_tile: by the number of queries, by the type, and (if
   there are enough registers to unroll the loops over a head) by the head size. */
INLINE void attend_tile_by_queries(const float *q, int queries, const struct kv_cache *c, enum type type, long size,
                                   const struct key_tile *t, struct prefetch *next, struct partial_attention *states) {
  struct prefetch in_registers = *next; /* a local copy, whose address no function gets, can stay in registers */
  switch (queries) {
    case 1: attend_tile(q, 1, c, type, size, t, &in_registers, states); break;
    case 2: attend_tile(q, 2, c, type, size, t, &in_registers, states); break;
    case 3: attend_tile(q, 3, c, type, size, t, &in_registers, states); break;
    default: attend_tile(q, 4, c, type, size, t, &in_registers, states);
  }
  *next = in_registers;
}

/* A function of its own for each type and head size: the compiler takes half as long again for one with all copies. */
#define TILE_PARAMETERS                                                                                   \
  const float *q, int queries, const struct kv_cache *c, const struct key_tile *t, struct prefetch *next, \
      struct partial_attention *states
#define COPY_OF_ATTEND_TILE(TYPE, NAME, SIZE)                           \
  NOT_INLINED void attend_tile_##TYPE##_##NAME(TILE_PARAMETERS) {       \
    attend_tile_by_queries(q, queries, c, TYPE, SIZE, t, next, states); \
  }

#if defined(__AVX512F__)
#define COPIES_OF_ATTEND_TILE(TYPE)   \
  COPY_OF_ATTEND_TILE(TYPE, 64, 64)   \
  COPY_OF_ATTEND_TILE(TYPE, 128, 128) \
  COPY_OF_ATTEND_TILE(TYPE, any, c->size)
#define ATTEND_BY_SIZE(TYPE)                                                   \
  switch (c->size) {                                                           \
    case 64: attend_tile_##TYPE##_64(q, queries, c, t, next, states); break;   \
    case 128: attend_tile_##TYPE##_128(q, queries, c, t, next, states); break; \
    default: attend_tile_##TYPE##_any(q, queries, c, t, next, states);         \
  }                                                                            \
  break
#else
#define COPIES_OF_ATTEND_TILE(TYPE) COPY_OF_ATTEND_TILE(TYPE, any, c->size)
#define ATTEND_BY_SIZE(TYPE)                                \
  attend_tile_##TYPE##_any(q, queries, c, t, next, states); \
  break
#endif

COPIES_OF_ATTEND_TILE(F32)
COPIES_OF_ATTEND_TILE(BF16)
COPIES_OF_ATTEND_TILE(I8)
COPIES_OF_ATTEND_TILE(F8)

static void attend_tile_by_type(TILE_PARAMETERS) {
  switch (c->type) {
    case F32: ATTEND_BY_SIZE(F32);
    case BF16: ATTEND_BY_SIZE(BF16);
    case I8: ATTEND_BY_SIZE(I8);
    case F8: ATTEND_BY_SIZE(F8);
    default: return; /* types of weights only */
  }
}

/* Merges the state of a split into the state of all splits before it. */
static void merge_splits(struct partial_attention *into, const struct partial_attention *from, long size) {
  float peak = into->peak > from->peak ? into->peak : from->peak;
  vf a = exp2_of(splat(into->peak - peak)), b = exp2_of(splat(from->peak - peak));
  into->sum = into->sum * a[0] + from->sum * b[0];
  for (long d = 0; d < size; d += LANES)
    store(into->out, d, load(into->out, d, F32) * a[0] + load(from->out, d, F32) * b[0], F32);
  into->peak = peak;
}

static void store_quotient(void *out, enum type type, const struct partial_attention *s, long size) {
  for (long d = 0; d < size; d += LANES) store(out, d, load(s->out, d, F32) / s->sum, type);
}

/* The number of blocks of QUERIES_AT_ONCE heads that hold the query heads of one key head. */
static long count_query_blocks(long group) { return (group + QUERIES_AT_ONCE - 1) / QUERIES_AT_ONCE; }

static long split_after(long start) { return (start / SPLIT_KEYS + 1) * SPLIT_KEYS; }

/* Computes the states of an item's queries after the keys of one split, which begins at position `start`. Sinks are
   keys of the first split. */
static void attend_split(const float *blocks, const struct attention *job, const struct decode_item *s, long start,
                         struct team *team, struct partial_attention *states) {
  const struct kv_cache *c = &job->cache;
  for (long j = 0; j < s->count * s->group; j++) {
    states[j].peak = -INFINITY;
    states[j].sum = 0;
    memset(states[j].out, 0, c->size * sizeof(float));
    if (job->rule.sinks && start <= s->seen) {
      states[j].peak = job->rule.sinks[s->first * s->group + j] * LOG2E;
      states[j].sum = 1;
    }
  }
  for (long i = start; i < min(split_after(start), s->length); i += TILE_KEYS) {
    struct prefetch next = prefetch_after(job, s, i + TILE_KEYS, TILE_KEYS, next_item(team));
    const float *q = blocks;
    for (long head = 0; head < s->count; head++)
      for (long j = 0; j < s->group; j += QUERIES_AT_ONCE) {
        struct key_tile t = {
            .slots = s->slots + i,
            .hidden = s->seen > i ? (int)(s->seen - i) : 0,
            .count = (int)min(s->length - i, TILE_KEYS),
            .kv_head = s->first + head,
            .query_head = (s->first + head) * s->group + j,
            .distance = i - (s->length - 1),
            .rule = &job->rule,
        };
        attend_tile_by_type(q, (int)min(s->group - j, QUERIES_AT_ONCE), c, &t, &next, states + head * s->group + j);
        q += QUERIES_AT_ONCE * c->size;
      }
    prefetch_heads(&next, 2 * s->count * TILE_KEYS, c->type, c->size);
  }
}

/* Converts an item's queries to float32, into blocks [QUERIES_AT_ONCE, size]. */
static void widen_queries(const struct attention *job, const struct decode_item *s, const char *q, float *blocks) {
  long size = job->cache.size;
  for (long head = 0; head < s->count; head++)
    for (long j = 0; j < s->group; j += QUERIES_AT_ONCE) {
      const char *from = q + (head * s->group + j) * size * bytes_of(job->type);
      int queries = (int)min(s->group - j, QUERIES_AT_ONCE);
      for (long i = 0; i < queries * size; i += LANES) store(blocks, i, load(from, i, job->type), F32);
      blocks += QUERIES_AT_ONCE * size;
    }
}

static void attend_item(const struct attention *job, const struct decode_item *s, struct team *team) {
  long queries = s->count * s->group, size = job->cache.size, bytes = bytes_of(job->type), query = s->first * s->group;
  struct partial_attention states[queries], later[queries];
  float blocks[s->count * count_query_blocks(s->group) * QUERIES_AT_ONCE * size] __attribute__((aligned(64)));
  widen_queries(job, s, job->q + (s->token * job->q_stride + query * size) * bytes, blocks);
  long begin = s->seen / TILE_KEYS * TILE_KEYS;
  for (long start = begin; start < s->length; start = split_after(start)) {
    attend_split(blocks, job, s, start, team, start > begin ? later : states);
    for (long j = 0; start > begin && j < queries; j++) merge_splits(&states[j], &later[j], size);
  }
  for (long j = 0; j < queries; j++)
    store_quotient(job->out + (s->token * job->heads + query + j) * size * bytes, job->type, &states[j], size);
}

EXPORT void attend(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct attend_arguments *a = arguments;
  struct attention job = {
      .q = a->q,
      .q_stride = a->q_stride,
      .type = a->q_type,
      .out = a->out,
      .tokens = a->tokens,
      .heads = a->heads,
      .cache =
          {.heads = a->kv, .scales = a->kv_scales, .kv_heads = a->kv_heads, .size = a->head_size, .type = a->kv_type},
      .table = a->table,
      .table_stride = a->table_stride,
      .rows = a->rows,
      .lengths = a->lengths,
      .rule = make_rule(a->scale * LOG2E, a->softcap, a->slopes, a->sinks, a->window),
  };
  /* The heads of a token are neighbours in memory, so one thread should read them together. With few tokens, some
     threads would then have no work, so each head is an item of its own. */
  job.heads_per_item = job.tokens < 2 * team->threads ? 1 : min(job.cache.kv_heads, MAX_HEADS_PER_ITEM);
  while (job.cache.kv_heads % job.heads_per_item) job.heads_per_item--;
#if defined(__AMX_BF16__)
  if (job.type == BF16 && job.cache.type == BF16 && job.cache.size % 32 == 0) {
    attend_on_matrix_unit(&job, team);
    return;
  }
#endif
#if defined(__AVX512BF16__)
  if (job.type == BF16 && job.cache.type != F32 && job.cache.size % 32 == 0) {
    attend_by_dot_products(&job, team, me);
    return;
  }
#endif
  FOR_EACH_ITEM(item, count_items(&job), 1, team) {
    struct decode_item s = item_at(&job, item);
    attend_item(&job, &s, team);
  }
}
