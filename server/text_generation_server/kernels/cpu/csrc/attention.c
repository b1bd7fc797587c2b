/* Attention of single tokens over the slots of their rows. Keys and values are read in place, wherever their slots are,
   and once for all query heads that share a key head. While one tile of keys is used, the next tile is prefetched.
   Where there is a matrix unit, attention_tiles.c does the same for bfloat16. Keys and values of int8 are multiplied as
   integers (int_pairs.h), if queries are bfloat16.

   The order of the arithmetic depends only on a key's position: keys are taken in tiles of 64 from position 0, tiles in
   splits of 512, and splits are merged in order. A window begins within a tile, whose first keys are then hidden. So a
   query's result from this file has the same bits in any step, alone and among other rows, and for any number of
   threads.

   Softmax is computed in base 2, which needs no multiplication before each exponential: scores are multiplied by
   log2(e) too. */
#include "attention.h"
#include "int_pairs.h"

#define MAX_HEADS_PER_ITEM 8
#define QUERIES_AT_ONCE 4 /* query heads of one key head computed together, whose sums fit the registers */
#define KEYS_AT_ONCE (LANES == 16 ? 1 : 2) /* keys that share the loads of the queries */

/* Vectors of a value whose sums, for this number of query heads, fit the registers and are enough to keep them busy. */
INLINE int value_vectors(int queries) { return LANES == 8 && queries > 3 ? 2 : LANES == 8 && queries < 2 ? 8 : 4; }

/* What one tile of keys reads. Positions that are hidden or missing have the addresses of another position. */
struct tile_slots {
  const char *heads[TILE_KEYS];   /* the first key head of a slot */
  const float *scales[TILE_KEYS]; /* I8 and F8: its scale */
};

static void find_slots(struct tile_slots *s, const struct kv_cache *c, const struct key_tile *t) {
  const long heads = 2 * c->kv_heads, bytes = heads * c->size * bytes_of(c->type);
  for (int i = 0; i < TILE_KEYS; i++) {
    long slot = t->slots[i >= t->hidden && i < t->count ? i : t->hidden];
    s->heads[i] = (const char *)c->heads + slot * bytes;
    if (c->scales) s->scales[i] = c->scales + slot * heads;
  }
}

/* The queries of one block, [QUERIES_AT_ONCE, size]: floats in the order of widened keys, or pairs of integers. */
struct own_queries {
  const float *q;
  const float *factors; /* integers: what their products with keys are multiplied by */
};

/* The scales of one key head and of its value head in a tile, times a factor each. */
struct head_scales {
  float keys[TILE_KEYS], values[TILE_KEYS];
} __attribute__((aligned(64)));

INLINE void collect_scales(const struct tile_slots *s, long kv_head, long kv_heads, float key_factor,
                           float value_factor, struct head_scales *to) {
#pragma GCC unroll 4
  for (int i = 0; i < TILE_KEYS; i++) {
    to->keys[i] = s->scales[i][kv_head] * key_factor;
    to->values[i] = s->scales[i][kv_heads + kv_head] * value_factor;
  }
}

/* A head `offset` bytes behind its slot. The compiler may not take the sum apart: it would keep an offset in a register
   for each line of the head, and has none left. */
INLINE const char *head_behind(const char *slot, long offset) {
  const char *head = slot + offset;
  __asm__("" : "+r"(head));
  return head;
}

/* Multiplies KEYS_AT_ONCE keys, which lie `offset` bytes behind their slots, with each of the queries [queries, size].
   products[query][i], and those after it, are LANES partial sums of a key each. */
INLINE void multiply_keys_at_once(const float *q, int queries, const char *const keys[KEYS_AT_ONCE], long offset,
                                  enum type type, int integers, long size, vf products[QUERIES_AT_ONCE][LANES], int i) {
  vf sums[KEYS_AT_ONCE][QUERIES_AT_ONCE] = {};
  const int vectors = integers ? 1 : WIDENED_VECTORS;
  const char *heads[KEYS_AT_ONCE];
#pragma GCC unroll 2
  for (int n = 0; n < KEYS_AT_ONCE; n++) heads[n] = head_behind(keys[n], offset);
#pragma GCC unroll 4
  for (long d = 0; d < size; d += integers ? 2 * LANES : WIDENED) {
    vf k[KEYS_AT_ONCE][WIDENED_VECTORS];
#pragma GCC unroll 2
    for (int n = 0; n < KEYS_AT_ONCE; n++)
      if (integers)
        k[n][0] = (vf)load_int_pairs(heads[n] + d);
      else
        widen_head(heads[n], d, type, k[n]);
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++)
#pragma GCC unroll 4
      for (int j = 0; j < queries; j++)
#pragma GCC unroll 2
        for (int n = 0; n < KEYS_AT_ONCE; n++) {
          vf own = load(q + j * size, integers ? d / 2 : d + v * LANES, F32);
          if (integers) {
            sums[n][j] = (vf)((vi)sums[n][j] + multiply_halves((vi)k[n][v], (vi)own));
            KEEP_IN_REGISTER(sums[n][j]);
          } else {
            sums[n][j] += k[n][v] * own;
          }
        }
  }
#pragma GCC unroll 4
  for (int j = 0; j < queries; j++)
#pragma GCC unroll 2
    for (int n = 0; n < KEYS_AT_ONCE; n++) products[j][i + n] = sums[n][j];
}

/* scores[query][key] of the keys of a tile, those that are missing included. `scales` are those of 8-bit keys. */
INLINE void score_keys(const struct own_queries *own, int queries, enum type type, int integers, long size,
                       const struct tile_slots *s, const float *scales, const struct key_tile *t, struct prefetch *next,
                       float scores[QUERIES_AT_ONCE][TILE_KEYS]) {
  const long offset = t->kv_head * size * bytes_of(type);
  for (int first = 0; first < t->count; first += LANES) {
    vf products[QUERIES_AT_ONCE][LANES];
#pragma GCC unroll 1
    for (int i = 0; i < LANES; i += KEYS_AT_ONCE) {
      prefetch_heads(next, KEYS_AT_ONCE, type, size);
      multiply_keys_at_once(own->q, queries, s->heads + first + i, offset, type, integers, size, products, i);
    }
    vf factors = is_scaled(type) ? load(scales, first, F32) : splat(t->rule->scale);
#pragma GCC unroll 4
    for (int j = 0; j < queries; j++) {
      vf sums = lane_sums_of(products[j], integers);
      if (integers) sums = __builtin_convertvector((vi)sums, vf);
      store(scores[j], first, sums * (integers ? factors * own->factors[j] : factors), F32);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < queries; j++)
    for (int i = t->count; i < TILE_KEYS; i++) scores[j][i] = -INFINITY;
}

/* The state of one query after some of its keys: its result so far is out / sum. */
struct partial_attention {
  float peak; /* the largest score so far; sum and out are in units of 2^peak */
  float sum;  /* sum of the weights */
  float out[MAX_HEAD_SIZE] __attribute__((aligned(64)));
};

/* Turns the weights of a tile into pairs of integers: word LANES * g + i has keys 2 * LANES * g + i, and LANES further.
   `most`: the bits of their largest magnitudes. Returns what 1 means in the integers. */
INLINE float narrow_tile(float weights[TILE_KEYS], vi most) {
  vf largest = count_as_number(splat_int(lane_most(most)));
  for (int i = 0; i < TILE_KEYS; i += 2 * LANES) {
    vi words = narrow_pair(load(weights, i, F32), load(weights, i + LANES, F32), MAX_INT16 / largest);
    memcpy(weights + i / 2, &words, sizeof words);
  }
  return largest[0] * (1 / MAX_INT16);
}

/* Replaces the scores of a tile by weights 2^(score - peak), which contain the `scales` of 8-bit values, or by pairs of
   integers (narrow_tile). If a score exceeds the peak, it becomes the new peak, and sum and out are multiplied by
   2^(old peak - new peak). Returns what 1 means in integers. */
INLINE float weigh_scores(float scores[TILE_KEYS], enum type type, int integers, const float *scales,
                          struct partial_attention *s, long size) {
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
  vi most = {};
  for (int i = 0; i < TILE_KEYS; i += LANES) {
    vf w = exp2_up_to_1(load(scores, i, F32) - s->peak);
    sum += w;
    if (is_scaled(type)) w *= load(scales, i, F32);
    if (integers) most = larger_magnitude(most, w);
    store(scores, i, w, F32);
  }
  s->sum += lane_sum(sum);
  return integers ? narrow_tile(scores, most) : 1;
}

/* The weight of a key, or of two keys in integers. Without AVX, to repeat it in all lanes takes two instructions, so
   this is done once for all columns. */
#if LANES == 4
typedef vf key_weight;
#else
typedef float key_weight;
#endif

INLINE vi repeated_pair(const key_weight *w) {
#if LANES == 4
  return (vi)*w;
#else
  return splat_word(w);
#endif
}

/* Adds `vectors` vectors of columns, from `first` on, of the values of a tile's keys, times their weights, to the
   states' out. */
INLINE void add_value_columns(enum type type, long size, long first, int vectors, const struct tile_slots *s,
                              const struct key_tile *t, key_weight weights[QUERIES_AT_ONCE][TILE_KEYS], int queries,
                              long offset, struct prefetch *next, struct partial_attention *states) {
  vf out[QUERIES_AT_ONCE][8];
#pragma GCC unroll 4
  for (int j = 0; j < queries; j++)
#pragma GCC unroll 8
    for (int d = 0; d < vectors; d++) out[j][d] = load(states[j].out, first + d * LANES, F32);
  for (int i = t->hidden; i < t->count; i++) {
    if (first == 0) prefetch_heads(next, 1, type, size);
    const char *value = head_behind(s->heads[i], offset + first * bytes_of(type));
#pragma GCC unroll 4
    for (int d = 0; d < vectors; d += WIDENED_VECTORS) {
      vf v[WIDENED_VECTORS];
      widen_head(value, d * LANES, type, v);
#pragma GCC unroll 4
      for (int j = 0; j < queries; j++)
#pragma GCC unroll 2
        for (int n = 0; n < WIDENED_VECTORS; n++) out[j][d + n] += v[n] * weights[j][i];
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < queries; j++)
#pragma GCC unroll 8
    for (int d = 0; d < vectors; d++) store(states[j].out, first + d * LANES, out[j][d], F32);
}

/* The same in integers, over pairs of keys that lie LANES apart. `vectors` is even. units: what 1 means in weights. */
INLINE void add_integer_columns(long size, long first, int vectors, const struct tile_slots *s,
                                const struct key_tile *t, key_weight pairs[QUERIES_AT_ONCE][TILE_KEYS],
                                const float *units, int queries, long offset, struct prefetch *next,
                                struct partial_attention *states) {
  vi out[QUERIES_AT_ONCE][8] = {};
  for (int word = t->hidden / (2 * LANES) * LANES, i; (i = word + (word & -LANES)) < t->count; word++) {
    if (first == 0) prefetch_heads(next, 2, I8, size);
    const char *values[] = {head_behind(s->heads[i], offset + first), head_behind(s->heads[i + LANES], offset + first)};
#pragma GCC unroll 4
    for (int d = 0; d < vectors; d += 2) {
      vi v[2];
      interleave(values[0] + d * LANES, values[1] + d * LANES, v);
#pragma GCC unroll 4
      for (int j = 0; j < queries; j++)
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++) {
          out[j][d + n] += multiply_halves(v[n], repeated_pair(&pairs[j][word]));
          KEEP_IN_REGISTER(out[j][d + n]);
        }
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < queries; j++)
#pragma GCC unroll 8
    for (int d = 0; d < vectors; d++) {
      float *to = states[j].out + first + d * LANES;
      store(to, 0, add_integers(load(to, 0, F32), out[j][d], splat(units[j])), F32);
    }
}

INLINE void add_tile_columns(enum type type, int integers, long size, long first, int vectors,
                             const struct tile_slots *s, const struct key_tile *t,
                             key_weight weights[QUERIES_AT_ONCE][TILE_KEYS], const float *units, int queries,
                             long offset, struct prefetch *next, struct partial_attention *states) {
  if (integers)
    add_integer_columns(size, first, vectors, s, t, weights, units, queries, offset, next, states);
  else
    add_value_columns(type, size, first, vectors, s, t, weights, queries, offset, next, states);
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

/* Adds one tile of keys to the states of up to QUERIES_AT_ONCE queries. */
INLINE void attend_tile(const struct own_queries *own, int queries, const struct kv_cache *c, enum type type,
                        int integers, long size, const struct key_tile *t, const struct tile_slots *s,
                        struct prefetch *next, struct partial_attention *states) {
  float scores[QUERIES_AT_ONCE][TILE_KEYS] __attribute__((aligned(64))), units[QUERIES_AT_ONCE];
  struct head_scales scales;
  if (is_scaled(type))
    collect_scales(s, t->kv_head, c->kv_heads, integers ? 1 : t->rule->scale * unit_of(type), unit_of(type), &scales);
  score_keys(own, queries, type, integers, size, s, scales.keys, t, next, scores);
  if (t->hidden || alters(t->rule)) alter_scores(t, queries, scores[0], TILE_KEYS);
  for (int j = 0; j < queries; j++) units[j] = weigh_scores(scores[j], type, integers, scales.values, &states[j], size);
#if LANES == 4
  vf weights[QUERIES_AT_ONCE][TILE_KEYS];
  for (int j = 0; j < queries; j++)
    for (int i = 0; i < (integers ? TILE_KEYS / 2 : TILE_KEYS); i++) weights[j][i] = (vf)splat_word(&scores[j][i]);
#else
  float (*weights)[TILE_KEYS] = scores;
#endif
  const long offset = (c->kv_heads + t->kv_head) * size * bytes_of(type);
  const int wide = value_vectors(queries), narrow = integers ? 2 : WIDENED_VECTORS;
  long first = 0;
  for (; first + wide * LANES <= size; first += wide * LANES)
    add_tile_columns(type, integers, size, first, wide, s, t, weights, units, queries, offset, next, states);
  for (; first < size; first += narrow * LANES)
    add_tile_columns(type, integers, size, first, narrow, s, t, weights, units, queries, offset, next, states);
}

/* The next three functions choose a compiled copy of attend_tile: by the number of queries, by the type, and by the
   head size, so that loops over a head are unrolled. */
INLINE void attend_tile_by_queries(const struct own_queries *own, int queries, const struct kv_cache *c, enum type type,
                                   int integers, long size, const struct key_tile *t, const struct tile_slots *s,
                                   struct prefetch *next, struct partial_attention *states) {
  struct prefetch in_registers = *next; /* a local copy, whose address no function gets, can stay in registers */
#define ATTEND_TILE(QUERIES) attend_tile(own, QUERIES, c, type, integers, size, t, s, &in_registers, states)
  switch (queries) {
    case 1: ATTEND_TILE(1); break;
    case 2: ATTEND_TILE(2); break;
    case 3: ATTEND_TILE(3); break;
    default: ATTEND_TILE(4);
  }
#undef ATTEND_TILE
  *next = in_registers;
}

/* A function of its own for each type and head size: the compiler takes half as long again for one with all copies. */
#define TILE_PARAMETERS                                                                           \
  const struct own_queries *own, int queries, const struct kv_cache *c, const struct key_tile *t, \
      const struct tile_slots *s, struct prefetch *next, struct partial_attention *states
#define COPY_OF_ATTEND_TILE(NAME, TYPE, INTEGERS, SIZE_NAME, SIZE)                     \
  NOT_INLINED void attend_tile_##NAME##_##SIZE_NAME(TILE_PARAMETERS) {                 \
    attend_tile_by_queries(own, queries, c, TYPE, INTEGERS, SIZE, t, s, next, states); \
  }
#define COPIES_OF_ATTEND_TILE(NAME, TYPE, INTEGERS)                                   \
  COPY_OF_ATTEND_TILE(NAME, TYPE, INTEGERS, 64, 64)                                   \
  COPY_OF_ATTEND_TILE(NAME, TYPE, INTEGERS, 128, 128)                                 \
  COPY_OF_ATTEND_TILE(NAME, TYPE, INTEGERS, any, c->size)                             \
  static void attend_tile_##NAME(TILE_PARAMETERS) {                                   \
    switch (c->size) {                                                                \
      case 64: attend_tile_##NAME##_64(own, queries, c, t, s, next, states); break;   \
      case 128: attend_tile_##NAME##_128(own, queries, c, t, s, next, states); break; \
      default: attend_tile_##NAME##_any(own, queries, c, t, s, next, states);         \
    }                                                                                 \
  }
#define ONE_COPY_OF_ATTEND_TILE(NAME, TYPE, INTEGERS)     \
  COPY_OF_ATTEND_TILE(NAME, TYPE, INTEGERS, any, c->size) \
  static void attend_tile_##NAME(TILE_PARAMETERS) { attend_tile_##NAME##_any(own, queries, c, t, s, next, states); }

COPIES_OF_ATTEND_TILE(BF16, BF16, 0)
COPIES_OF_ATTEND_TILE(F8, F8, 0)
#if LANES == 16
COPIES_OF_ATTEND_TILE(F32, F32, 0)
#else
ONE_COPY_OF_ATTEND_TILE(F32, F32, 0)
#endif
ONE_COPY_OF_ATTEND_TILE(I8, I8, 0)
#if HAS_INT_ATTENTION
COPIES_OF_ATTEND_TILE(integers, I8, 1)
#endif

static void attend_tile_by_type(int integers, TILE_PARAMETERS) {
#if HAS_INT_ATTENTION
  if (integers) {
    attend_tile_integers(own, queries, c, t, s, next, states);
    return;
  }
#endif
  (void)integers;
  switch (c->type) {
    case F32: attend_tile_F32(own, queries, c, t, s, next, states); break;
    case BF16: attend_tile_BF16(own, queries, c, t, s, next, states); break;
    case I8: attend_tile_I8(own, queries, c, t, s, next, states); break;
    case F8: attend_tile_F8(own, queries, c, t, s, next, states); break;
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

/* `kv`: the type of keys and values. */
static void store_quotient(void *out, enum type type, enum type kv, const struct partial_attention *s, long size) {
  for (long d = 0; d < size; d += WIDENED) {
    vf x[WIDENED_VECTORS];
    for (int v = 0; v < WIDENED_VECTORS; v++) x[v] = load(s->out, d + v * LANES, F32) / s->sum;
    if (IS_SPLIT(kv)) join_numbers(x);
    for (int v = 0; v < WIDENED_VECTORS; v++) store(out, d + v * LANES, x[v], type);
  }
}

/* The number of blocks of QUERIES_AT_ONCE heads that hold the query heads of one key head. */
static long count_query_blocks(long group) { return (group + QUERIES_AT_ONCE - 1) / QUERIES_AT_ONCE; }

static long split_after(long start) { return (start / SPLIT_KEYS + 1) * SPLIT_KEYS; }

/* Computes the states of an item's queries after the keys of one split, which begins at position `start`. Sinks are
   keys of the first split. */
static void attend_split(const float *blocks, const float *factors, const struct attention *job,
                         const struct decode_item *s, long start, struct team *team, struct partial_attention *states) {
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
    struct key_tile t = {
        .slots = s->slots + i,
        .hidden = s->seen > i ? (int)(s->seen - i) : 0,
        .count = (int)min(s->length - i, TILE_KEYS),
        .distance = i - (s->length - 1),
        .rule = &job->rule,
    };
    struct tile_slots slots;
    find_slots(&slots, c, &t);
    const float *q = blocks;
    int integers = is_in_integers(job->type, c->type, c->size);
    for (long head = 0; head < s->count; head++)
      for (long j = 0; j < s->group; j += QUERIES_AT_ONCE) {
        t.kv_head = s->first + head;
        t.query_head = t.kv_head * s->group + j;
        int queries = (int)min(s->group - j, QUERIES_AT_ONCE);
        long query = head * s->group + j;
        struct own_queries own = {q, factors + query};
        attend_tile_by_type(integers, &own, queries, c, &t, &slots, &next, states + query);
        q += QUERIES_AT_ONCE * c->size;
      }
    prefetch_heads(&next, 2 * s->count * TILE_KEYS, c->type, c->size);
  }
}

/* An item's queries, in blocks of own_queries. */
static void prepare_queries(const struct attention *job, const struct decode_item *s, const char *q, float *blocks,
                            float *factors) {
  long size = job->cache.size;
  for (long head = 0; head < s->count; head++, blocks += (-s->group & (QUERIES_AT_ONCE - 1)) * size)
    for (long j = 0; j < s->group; j++, q += size * bytes_of(job->type), blocks += size, factors++) {
      if (is_in_integers(job->type, job->cache.type, size)) {
        *factors = job->rule.scale * narrow_query(q, job->type, size, (int16_t *)blocks);
        continue;
      }
      for (long i = 0; i < size; i += WIDENED) {
        vf x[WIDENED_VECTORS];
        load_in_order(q, i, job->type, job->cache.type, x);
        for (int v = 0; v < WIDENED_VECTORS; v++) store(blocks, i + v * LANES, x[v], F32);
      }
    }
}

static void attend_item(const struct attention *job, const struct decode_item *s, struct team *team) {
  long queries = s->count * s->group, size = job->cache.size, bytes = bytes_of(job->type), query = s->first * s->group;
  struct partial_attention states[queries], later[queries];
  float blocks[s->count * count_query_blocks(s->group) * QUERIES_AT_ONCE * size] __attribute__((aligned(64)));
  float factors[queries];
  prepare_queries(job, s, job->q + (s->token * job->q_stride + query * size) * bytes, blocks, factors);
  long begin = s->seen / TILE_KEYS * TILE_KEYS;
  for (long start = begin; start < s->length; start = split_after(start)) {
    attend_split(blocks, factors, job, s, start, team, start > begin ? later : states);
    for (long j = 0; start > begin && j < queries; j++) merge_splits(&states[j], &later[j], size);
  }
  for (long j = 0; j < queries; j++)
    store_quotient(job->out + (s->token * job->heads + query + j) * size * bytes, job->type, job->cache.type,
                   &states[j], size);
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
