/* Attention of single tokens in bfloat16 by dot products of 16-bit numbers, over keys and values in bfloat16 or 8 bits.

   VDPBF16PS and VPDPWSSD multiply 32 numbers of 16 bits by 32 others, and add the products of neighbours to 16 sums. So
   all numbers come in lines of 32:
     bfloat16   keys and values are used as they are; the weights of keys are rounded to bfloat16.
     e4m3       keys and values become bfloat16 with the exponent that they have, 2^120 times smaller than they are.
                Queries and weights are multiplied by 2^64, and the results by 2^56. Denormal numbers, which are below
                1 / 28,000 of the largest number of a head, count as 0.
     int8       keys and values become 16-bit integers, and so do queries, and the weights of each step: both are
   divided by their largest number, so that they are more precise than in bfloat16. Sums of integers are exact. The
   product with keys sums over a head, whose neighbours are neighbours in memory. The product with values sums over
   positions, so lines of two positions are interleaved, number by number.

   A head is computed in the same order whatever its item has besides, so a query's result has the same bits in any
   step and for any number of threads. */
#include "attention.h"
#include "int_pairs.h"

#if defined(__AVX512BF16__)

#define DOT_QUERIES 4  /* query heads of one key head computed together, whose sums fit the registers */
#define DOT_KEYS LANES /* keys of a step: those of all heads are computed while those of the next step are fetched */
#define LINE 32

/* Up to 4 query heads of one key head, and their results after some of the keys, which are out / sums. */
struct dot_block {
  __m512i lines[DOT_QUERIES][MAX_HEAD_SIZE / LINE];
  float factors[DOT_QUERIES]; /* what the products of queries and keys are multiplied by */
  float peaks[DOT_QUERIES];   /* the largest scores so far; sums and out are in units of 2^peak */
  vf sums[DOT_QUERIES];       /* sums of the weights, still to be added up */
  /* The columns of a line in the order of `unpacklo` and `unpackhi`. */
  float out[DOT_QUERIES][MAX_HEAD_SIZE] __attribute__((aligned(64)));
};

/* The slots of a step. Positions that are hidden or missing have the addresses of another position. */
struct dot_step {
  const char *heads[DOT_KEYS];
  const float *scales[DOT_KEYS];
};

/* What one block computes of a step. */
struct dot_weights {
  float scores[DOT_QUERIES][DOT_KEYS];
  uint16_t weights[DOT_QUERIES][DOT_KEYS];
  float key_scales[DOT_KEYS], value_scales[DOT_KEYS]; /* 8 bits: the scales of the head */
  float units[DOT_QUERIES];                           /* int8: what 1 means in weights */
} __attribute__((aligned(64)));

/* What queries and weights are multiplied by, and what the products with e4m3 are multiplied by in turn. */
INLINE float raised(enum type type) { return type == F8 ? 0x1p64f : 1.0f; }
INLINE float lowered(enum type type) { return type == F8 ? 0x1p56f : 1.0f; }

INLINE __m512i load_line(const char *head, long first, enum type type) {
  head += first * bytes_of(type);
  if (type == BF16) return _mm512_loadu_si512(head);
  __m512i numbers = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)head));
  if (type == I8) return numbers;
  return _mm512_and_si512(_mm512_slli_epi16(numbers, 4), _mm512_set1_epi16((short)0x87f0));
}

/* Sums are integers for int8, and floats for the other types. */
INLINE __m512i add_dots(__m512i sums, __m512i a, __m512i b, enum type type) {
  if (type == I8) return _mm512_dpwssd_epi32(sums, a, b);
  return (__m512i)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
}

INLINE __m512i add_sums(__m512i a, __m512i b, enum type type) {
  if (type == I8) return _mm512_add_epi32(a, b);
  return (__m512i)_mm512_add_ps((__m512)a, (__m512)b);
}

INLINE vf floats_of(__m512i sums, enum type type) { return type == I8 ? (vf)_mm512_cvtepi32_ps(sums) : (vf)sums; }

/* The sum over the lanes of each of 16 vectors, added in the order of lane_sums of vectors.h. four_sums adds the lanes
   of each of the vectors i, i + 4, i + 8 and i + 12 up to 4 lanes, side by side in one vector. sixteen_sums adds four
   such vectors up to the 16 sums. */
INLINE __m512i four_sums(const __m512i x[4], enum type type) {
  __m512i a = add_sums(_mm512_shuffle_i32x4(x[0], x[2], 0x44), _mm512_shuffle_i32x4(x[0], x[2], 0xee), type);
  __m512i b = add_sums(_mm512_shuffle_i32x4(x[1], x[3], 0x44), _mm512_shuffle_i32x4(x[1], x[3], 0xee), type);
  return add_sums(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd), type);
}

#define SHUFFLED(A, B, HOW) ((__m512i)_mm512_shuffle_ps((__m512)(A), (__m512)(B), HOW))

INLINE __m512i sixteen_sums(const __m512i x[4], enum type type) {
  __m512i a = add_sums(SHUFFLED(x[0], x[2], 0x44), SHUFFLED(x[0], x[2], 0xee), type);
  __m512i b = add_sums(SHUFFLED(x[1], x[3], 0x44), SHUFFLED(x[1], x[3], 0xee), type);
  const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return _mm512_permutexvar_epi32(order, add_sums(SHUFFLED(a, b, 0x88), SHUFFLED(a, b, 0xdd), type));
}

/* Scores of the keys of the head that lies `offset` bytes after its slot's address. */
INLINE void score_dots(const struct dot_block *b, int queries, enum type type, long size, const struct dot_step *s,
                       long offset, struct prefetch *next, struct dot_weights *t) {
  __m512i fours[DOT_QUERIES][4];
#pragma GCC unroll 1
  for (int i = 0; i < 4; i++) {
    __m512i sums[DOT_QUERIES][4];
#pragma GCC unroll 4
    for (int j = 0; j < queries; j++)
#pragma GCC unroll 4
      for (int n = 0; n < 4; n++) sums[j][n] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (long d = 0; d < size; d += LINE)
#pragma GCC unroll 4
      for (int n = 0; n < 4; n++) {
        __m512i key = load_line(s->heads[i + 4 * n] + offset, d, type);
#pragma GCC unroll 4
        for (int j = 0; j < queries; j++) sums[j][n] = add_dots(sums[j][n], key, b->lines[j][d / LINE], type);
      }
    prefetch_heads(next, 4, type, size);
#pragma GCC unroll 4
    for (int j = 0; j < queries; j++) fours[j][i] = four_sums(sums[j], type);
  }
#pragma GCC unroll 4
  for (int j = 0; j < queries; j++) {
    vf scores = floats_of(sixteen_sums(fours[j], type), type) * b->factors[j];
    store(t->scores[j], 0, type == BF16 ? scores : scores * load(t->key_scales, 0, F32), F32);
  }
}

/* Turns the weights of one query into 16-bit numbers. Weights of 8-bit values are multiplied by the values' scales. */
INLINE void narrow_weights(vf w, enum type type, int query, struct dot_weights *t) {
  if (type != BF16) w *= load(t->value_scales, 0, F32);
  if (type != I8) {
    store_bf16(t->weights[query], w);
    return;
  }
  /* The bits of weights, which are not negative, have the order of the weights, and those of NaN come last. */
  uint32_t bits = _mm512_reduce_max_epu32((__m512i)w);
  float largest;
  memcpy(&largest, &bits, sizeof largest);
  if (largest < LEAST_NUMBER) largest = LEAST_NUMBER;
  t->units[query] = largest * (1 / MAX_INT16);
  __m256i numbers = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32((__m512)(w * (MAX_INT16 / largest))));
  memcpy(t->weights[query], &numbers, sizeof numbers);
}

/* A new peak for a query: sums and out are multiplied by 2^(old peak - new peak). */
NOT_INLINED void raise_peak(struct dot_block *b, int query, long size, vf scores) {
  float peak = lane_max(scores), old = b->peaks[query];
  if (peak < old) peak = old;
  vf shrink = exp2_of(splat(old - peak));
  b->sums[query] *= shrink;
  for (long d = 0; d < size; d += LANES) store(b->out[query], d, load(b->out[query], d, F32) * shrink, F32);
  b->peaks[query] = peak;
}

/* Turns the scores of a step into weights 2^(score - peak), where the peak is the largest score so far. */
INLINE void weigh_dots(struct dot_block *b, int queries, enum type type, long size, struct dot_weights *t) {
#pragma GCC unroll 4
  for (int j = 0; j < queries; j++) {
    vf w = load(t->scores[j], 0, F32);
    if (_mm512_cmp_ps_mask((__m512)w, _mm512_set1_ps(b->peaks[j]), _CMP_NLE_UQ)) raise_peak(b, j, size, w);
    w = exp2_of_negative(w - b->peaks[j]);
    b->sums[j] += w;
    narrow_weights(w, type, j, t);
  }
}

/* out += weights * values, for `lines` (1 or 2) lines of columns from `first` on. `next` may be null. */
INLINE void add_columns(struct dot_block *b, int queries, enum type type, long first, int lines,
                        const struct dot_step *s, long offset, struct prefetch *next, long size,
                        const struct dot_weights *t) {
  __m512i out[DOT_QUERIES][4];
#pragma GCC unroll 4
  for (int j = 0; j < queries; j++)
#pragma GCC unroll 4
    for (int i = 0; i < 2 * lines; i++)
      out[j][i] = type == I8 ? _mm512_setzero_si512() : _mm512_load_si512(b->out[j] + first + i * LANES);
#pragma GCC unroll 1
  for (int p = 0; p < DOT_KEYS; p += 2) {
    __m512i values[4];
#pragma GCC unroll 2
    for (int i = 0; i < lines; i++) {
      __m512i x = load_line(s->heads[p] + offset, first + i * LINE, type);
      __m512i y = load_line(s->heads[p + 1] + offset, first + i * LINE, type);
      values[2 * i] = _mm512_unpacklo_epi16(x, y);
      values[2 * i + 1] = _mm512_unpackhi_epi16(x, y);
    }
    if (next) prefetch_heads(next, 2, type, size);
#pragma GCC unroll 4
    for (int j = 0; j < queries; j++) {
      int two;
      memcpy(&two, t->weights[j] + p, sizeof two);
      __m512i weights = _mm512_set1_epi32(two);
#pragma GCC unroll 4
      for (int i = 0; i < 2 * lines; i++) out[j][i] = add_dots(out[j][i], values[i], weights, type);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < queries; j++)
#pragma GCC unroll 4
    for (int i = 0; i < 2 * lines; i++) {
      float *to = b->out[j] + first + i * LANES;
      vf sums = floats_of(out[j][i], type);
      store(to, 0, type == I8 ? load(to, 0, F32) + sums * t->units[j] : sums, F32);
    }
}

/* Adds the keys of a step to the results of a block. */
INLINE void attend_step(struct dot_block *b, int queries, const struct kv_cache *c, enum type type, long size,
                        const struct key_tile *tile, const struct dot_step *s, struct prefetch *next) {
  struct dot_weights t;
  long offset = tile->kv_head * size * bytes_of(type);
  if (type != BF16)
    for (int i = 0; i < DOT_KEYS; i++) {
      t.key_scales[i] = s->scales[i][tile->kv_head];
      t.value_scales[i] = s->scales[i][tile->kv_head + c->kv_heads] * raised(type);
    }
  score_dots(b, queries, type, size, s, offset, next, &t);
  if (tile->hidden || tile->count < DOT_KEYS || alters(tile->rule)) alter_scores(tile, queries, t.scores[0], DOT_KEYS);
  weigh_dots(b, queries, type, size, &t);
  offset += c->kv_heads * size * bytes_of(type);
  long first = 0;
  for (; first + 2 * LINE <= size; first += 2 * LINE)
    add_columns(b, queries, type, first, 2, s, offset, first ? NULL : next, size, &t);
  if (first < size) add_columns(b, queries, type, first, 1, s, offset, first ? NULL : next, size, &t);
}

/* The next two functions choose a compiled copy of attend_step: by the number of queries, and by type and head size. */
INLINE void attend_step_by_queries(struct dot_block *b, int queries, const struct kv_cache *c, enum type type,
                                   long size, const struct key_tile *t, const struct dot_step *s,
                                   struct prefetch *next) {
  struct prefetch in_registers = *next; /* a local copy, whose address no function gets, can stay in registers */
  switch (queries) {
    case 1: attend_step(b, 1, c, type, size, t, s, &in_registers); break;
    case 2: attend_step(b, 2, c, type, size, t, s, &in_registers); break;
    case 3: attend_step(b, 3, c, type, size, t, s, &in_registers); break;
    default: attend_step(b, 4, c, type, size, t, s, &in_registers);
  }
  *next = in_registers;
}

#define ATTEND_STEP_BY_SIZE(TYPE)                                                  \
  switch (c->size) {                                                               \
    case 64: attend_step_by_queries(b, queries, c, TYPE, 64, t, s, next); break;   \
    case 128: attend_step_by_queries(b, queries, c, TYPE, 128, t, s, next); break; \
    default: attend_step_by_queries(b, queries, c, TYPE, c->size, t, s, next);     \
  }                                                                                \
  break

static void attend_step_by_type(struct dot_block *b, int queries, const struct kv_cache *c, const struct key_tile *t,
                                const struct dot_step *s, struct prefetch *next) {
  switch (c->type) {
    case I8: ATTEND_STEP_BY_SIZE(I8);
    case F8: ATTEND_STEP_BY_SIZE(F8);
    default: ATTEND_STEP_BY_SIZE(BF16);
  }
}

/* The numbers of a query as lines of 16-bit integers. Returns what 1 means in them; NaN if a number is not finite. */
static float lines_of_integers(const bf16 *q, long size, __m512i *lines) {
  vf largest = splat(LEAST_NUMBER), nan = {};
  for (long d = 0; d < size; d += LANES) {
    vf x = load_bf16(q + d);
    largest = larger(larger(x, -x), largest);
    nan += x * 0.0f;
  }
  float unit = lane_max(largest) / MAX_INT16 + lane_sum(nan);
  for (long d = 0; d < size; d += LANES) {
    __m256i numbers = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32((__m512)(load_bf16(q + d) / unit)));
    memcpy((char *)lines + d * sizeof *q, &numbers, sizeof numbers);
  }
  return unit;
}

static void begin_dot_block(struct dot_block *b, const struct attention *job, const bf16 *q, long query, int queries) {
  enum type type = job->cache.type;
  long size = job->cache.size;
  for (int j = 0; j < queries; j++, q += size) {
    b->factors[j] = job->rule.scale * lowered(type);
    if (type == I8)
      b->factors[j] *= lines_of_integers(q, size, b->lines[j]);
    else
      for (long d = 0; d < size; d += LANES) store_bf16((bf16 *)b->lines[j] + d, load_bf16(q + d) * raised(type));
    b->peaks[j] = job->rule.sinks ? job->rule.sinks[query + j] * LOG2E : -INFINITY;
    b->sums[j] = (vf){job->rule.sinks ? 1.0f : 0.0f};
    memset(b->out[j], 0, size * sizeof(float));
  }
}

/* Stores the results of one query, with its columns in order. */
static void store_ordered(bf16 *to, const float *out, float factor, long size) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (long d = 0; d < size; d += LINE) {
    __m512 x = _mm512_load_ps(out + d), y = _mm512_load_ps(out + d + LANES);
    store_bf16(to + d, (vf)_mm512_permutex2var_ps(x, low, y) * factor);
    store_bf16(to + d + LANES, (vf)_mm512_permutex2var_ps(x, high, y) * factor);
  }
}

static void find_step(struct dot_step *s, const struct kv_cache *c, const struct key_tile *t) {
  for (int i = 0; i < DOT_KEYS; i++) {
    long slot = t->slots[i >= t->hidden && i < t->count ? i : t->hidden];
    s->heads[i] = head_at(c, slot, 0);
    if (c->scales) s->scales[i] = c->scales + slot * 2 * c->kv_heads;
  }
}

static void attend_item_by_dots(const struct attention *job, const struct decode_item *s, long next_item) {
  long blocks = (s->group + DOT_QUERIES - 1) / DOT_QUERIES, query = s->first * s->group;
  const struct kv_cache *c = &job->cache;
  struct dot_block all[s->count * blocks];
  const bf16 *q = (const bf16 *)job->q + s->token * job->q_stride;
  for (long i = 0; i < s->count * blocks; i++) {
    long head = query + i / blocks * s->group + i % blocks * DOT_QUERIES;
    begin_dot_block(&all[i], job, q + head * c->size, head, (int)min(s->group - i % blocks * DOT_QUERIES, DOT_QUERIES));
  }
  for (long start = s->seen / DOT_KEYS * DOT_KEYS; start < s->length; start += DOT_KEYS) {
    struct prefetch next = prefetch_after(job, s, start + DOT_KEYS, DOT_KEYS, next_item);
    struct key_tile t = {
        .slots = s->slots + start,
        .hidden = s->seen > start ? (int)(s->seen - start) : 0,
        .count = (int)min(s->length - start, DOT_KEYS),
        .distance = start - (s->length - 1),
        .rule = &job->rule,
    };
    struct dot_step step;
    find_step(&step, c, &t);
    for (long i = 0; i < s->count * blocks; i++) {
      long before = i % blocks * DOT_QUERIES;
      t.kv_head = s->first + i / blocks;
      t.query_head = query + i / blocks * s->group + before;
      attend_step_by_type(&all[i], (int)min(s->group - before, DOT_QUERIES), c, &t, &step, &next);
    }
    prefetch_heads(&next, 2 * s->count * DOT_KEYS, c->type, c->size);
  }
  bf16 *to = (bf16 *)job->out + (s->token * job->heads + query) * c->size;
  for (long j = 0; j < s->count * s->group; j++) {
    struct dot_block *b = &all[j / s->group * blocks + j % s->group / DOT_QUERIES];
    long own = j % s->group % DOT_QUERIES;
    store_ordered(to + j * c->size, b->out[own], lowered(c->type) / lane_sum(b->sums[own]), c->size);
  }
}

void attend_by_dot_products(const struct attention *job, struct team *team, int me) {
  long items = count_items(job);
  /* Each thread takes its next item before it computes the current one, to prefetch its first keys. */
  for (long item = me, after; item < items; item = after) {
    after = take_items(team, 1) + team->threads;
    struct decode_item s = item_at(job, item);
    attend_item_by_dots(job, &s, after);
  }
}

#endif
