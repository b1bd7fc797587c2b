/* Attention of single tokens over the slots of their rows on the matrix unit, for queries, keys and values in bfloat16.

   A step is 32 keys of the row. Both products of a step are small: up to 4 query heads by 32 keys. So most of the work
   is to bring numbers into the order that the matrix unit wants:
     keys stay where they are, since the rows of a tile may lie apart in memory;
     values of two neighbouring positions are interleaved, number by number;
     scores come out as [key][query], and softmax weighs 4 keys by 4 queries in one vector;
     weights are transposed to [query][key] and rounded to bfloat16. Their sum is taken before the rounding. */
#include "attention.h"

#if defined(__AMX_BF16__)

#include "tiles.h"

#define TILE_QUERIES 4
#define STEP_KEYS 32    /* keys of one step of the loop over a row's keys */
#define LINE_NUMBERS 32 /* bfloat16 numbers in 64 bytes */

/* The state of up to 4 query heads of one key head after some of their keys. Their result so far is out / sum. */
struct query_block {
  __m512 peaks; /* lane i: the largest score so far of query i % 4; sums and out are in units of 2^peak */
  __m512 sums;  /* sums of the weights; query j has lanes j, j + 4, j + 8 and j + 12, still to be added up */
  float out[TILE_QUERIES][MAX_HEAD_SIZE]; /* columns in the order that pair_values_of_step makes */
};

/* The scores of STEP_KEYS keys for each query of a tile, and the weights that softmax makes of the scores. */
struct key_scores {
  float by_key[STEP_KEYS][TILE_QUERIES];
  bf16 weights[TILE_QUERIES][STEP_KEYS];
} __attribute__((aligned(64)));

/* The values of STEP_KEYS positions for one head: [size / 16][16 pairs of positions][16 columns][2 positions]. */
struct paired_values {
  bf16 tiles[MAX_HEAD_SIZE / 16][16][LINE_NUMBERS];
} __attribute__((aligned(64)));

/* Tiles 0 and 1 are scores, 16 keys by 4 queries each. Tile 2 is 32 numbers of each query, in pairs. Tiles 3 and 6 are
   16 keys, and later 16 pairs of values. Tiles 4 and 5 are 16 columns of out. Tile 7 is the weights of 32 keys. */
static void configure_decode_tiles(void) {
  struct tile_config c = {.palette = 1,
                          .rows = {16, 16, 16, 16, TILE_QUERIES, TILE_QUERIES, 16, TILE_QUERIES},
                          .bytes = {TILE_QUERIES * 4, TILE_QUERIES * 4, TILE_QUERIES * 4, 64, 64, 64, 64, 64}};
  MEMORY_IS_WRITTEN;
  _tile_loadconfig(&c);
}

/* Copies queries into the order [size / 2][TILE_QUERIES][2], with zeros in place of missing queries. */
static void pair_query_numbers(const bf16 *q, long queries, long size, uint32_t *to) {
  memset(to, 0, size / 2 * TILE_QUERIES * sizeof *to);
  for (long j = 0; j < queries; j++)
    for (long d = 0; d < size / 2; d++) memcpy(to + d * TILE_QUERIES + j, q + j * size + 2 * d, 4);
}

/* The rows of a tile of 16 keys. */
struct key_rows {
  const bf16 *first;
  long stride; /* bytes from one key to the next */
};

/* Keys first … first + 15 of a step of `count` keys. If their slots are neighbours, the keys are used in place;
   otherwise they are copied into `gathered`. Missing keys are replaced by arbitrary keys, whose scores are not used. */
INLINE struct key_rows find_key_rows(const struct kv_cache *c, long size, long kv_head, const int32_t *slots, int first,
                                     int count, bf16 *gathered) {
  const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  if (first >= count) first = 0;
  slots += first;
  if (first + LANES <= count &&
      _mm512_cmpeq_epi32_mask(_mm512_loadu_si512(slots), (__m512i)(lanes + slots[0])) == 0xffff)
    return (struct key_rows){head_at(c, slots[0], kv_head), 2 * c->kv_heads * size * (long)sizeof(bf16)};
  for (int i = 0; i < LANES; i++)
    memcpy(gathered + i * size, head_at(c, slots[first + i < count ? i : 0], kv_head), size * sizeof(bf16));
  return (struct key_rows){gathered, size * (long)sizeof(bf16)};
}

/* The number of heads to prefetch between two tile instructions of the first and the last product. A step reads 32
   keys and 32 values of each head, so 64 heads of the next step are prefetched: 16 in each of pair_values_of_step,
   score_keys_in_tiles, weigh_keys_of_step and add_values_in_tiles. */
INLINE void prefetch_between_instructions(struct prefetch *next, long size) {
  prefetch_heads(next, size > 128 ? 1 : 128 / size, BF16, size);
}

/* Computes the scores of a step: 32 keys by up to 4 queries. */
INLINE void score_keys_in_tiles(const uint32_t *q, const struct kv_cache *c, long size, long kv_head,
                                const int32_t *slots, int count, struct prefetch *next, struct key_scores *s) {
  bf16 gathered[2][LANES * MAX_HEAD_SIZE] __attribute__((aligned(64)));
  struct key_rows a = find_key_rows(c, size, kv_head, slots, 0, count, gathered[0]);
  struct key_rows b = find_key_rows(c, size, kv_head, slots, LANES, count, gathered[1]);
  MEMORY_IS_WRITTEN;
  _tile_zero(0);
  _tile_zero(1);
  for (long d = 0; d < size; d += 32) {
    _tile_loadd(2, q + d / 2 * TILE_QUERIES, TILE_QUERIES * 4);
    prefetch_between_instructions(next, size);
    _tile_loadd(3, a.first + d, a.stride);
    prefetch_between_instructions(next, size);
    _tile_dpbf16ps(0, 3, 2);
    _tile_loadd(6, b.first + d, b.stride);
    prefetch_between_instructions(next, size);
    _tile_dpbf16ps(1, 6, 2);
    prefetch_between_instructions(next, size);
  }
  _tile_stored(0, s->by_key[0], sizeof s->by_key[0]);
  _tile_stored(1, s->by_key[LANES], sizeof s->by_key[0]);
  MEMORY_IS_WRITTEN;
}

/* Transposes the weights of 32 keys, 8 vectors of 4 keys by 4 queries, to rows of 32 bfloat16 weights for each
   query. */
INLINE void transpose_weights(const __m512 *w, bf16 (*to)[LINE_NUMBERS]) {
  const __m512i order = _mm512_set_epi16(31, 27, 23, 19, 15, 11, 7, 3, 30, 26, 22, 18, 14, 10, 6, 2, 29, 25, 21, 17, 13,
                                         9, 5, 1, 28, 24, 20, 16, 12, 8, 4, 0);
  __m512i p[4], h[4], rows[4];
  for (int i = 0; i < 4; i++)
    p[i] = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(w[2 * i + 1], w[2 * i]));
  /* Each p now holds 8 keys of query 0, then the same 8 keys of queries 1, 2 and 3: 4 quarters of 16 bytes. The
     shuffles collect quarter j of all p in rows[j], first in halves (0x44: quarters 0 and 1 of both; 0xee: 2 and 3),
     then 0x88 takes the even and 0xdd the odd quarters. */
  h[0] = _mm512_shuffle_i32x4(p[0], p[1], 0x44);
  h[1] = _mm512_shuffle_i32x4(p[2], p[3], 0x44);
  h[2] = _mm512_shuffle_i32x4(p[0], p[1], 0xee);
  h[3] = _mm512_shuffle_i32x4(p[2], p[3], 0xee);
  for (int i = 0; i < 4; i += 2) {
    rows[i] = _mm512_shuffle_i32x4(h[i], h[i + 1], 0x88);
    rows[i + 1] = _mm512_shuffle_i32x4(h[i], h[i + 1], 0xdd);
  }
  for (int i = 0; i < 4; i++) memcpy(to[i], &rows[i], 64);
}

/* Replaces the scores of a step by altered scores, times log2(e). The first `hidden` keys get minus infinity.
   `distance`: position of the step's first key - position of the query. */
NOT_INLINED void alter_step(struct key_scores *s, const struct score_rule *r, long query_head, int queries, int hidden,
                            long distance) {
  float slopes[LANES];
  for (int i = 0; i < LANES; i++)
    slopes[i] = i % TILE_QUERIES < queries ? slope_of(r, query_head + i % TILE_QUERIES) : 0;
  const vf keys = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  for (int i = 0; i < STEP_KEYS; i += 4) {
    vf scores = load(s->by_key[i], 0, F32) * r->scale, distances = keys + (float)(distance + i);
    if (alters(r)) scores = altered(scores, r, load(slopes, 0, F32), distances);
    store(s->by_key[i], 0, blend(keys + (float)i < (float)hidden, splat(-INFINITY), scores), F32);
  }
}

/* Turns the scores of a step's `count` keys into weights 2^(score * scale - peak). If a score exceeds the peak of
   its query, it becomes the new peak, and sums and out are multiplied by 2^(old peak - new peak). */
INLINE void weigh_keys_of_step(struct key_scores *s, int count, float scale, long size, struct prefetch *next,
                               struct query_block *b) {
  const vi lanes = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  __m512 w[STEP_KEYS / 4], peaks[4], scales = _mm512_set1_ps(scale), sums[2] = {};
  for (int i = 0; i < STEP_KEYS / 4; i++) {
    w[i] = _mm512_load_ps(s->by_key[4 * i]);
    if (count < STEP_KEYS)
      w[i] = _mm512_mask_blend_ps(_mm512_cmpgt_epi32_mask(_mm512_set1_epi32(count - 4 * i), (__m512i)lanes),
                                  _mm512_set1_ps(-INFINITY), w[i]);
  }
  for (int i = 0; i < 4; i++) peaks[i] = _mm512_max_ps(w[i], w[i + 4]);
  __m512 peak = _mm512_max_ps(_mm512_max_ps(peaks[0], peaks[1]), _mm512_max_ps(peaks[2], peaks[3]));
  peak = _mm512_max_ps(peak, _mm512_shuffle_f32x4(peak, peak, 0x4e));
  peak = _mm512_mul_ps(_mm512_max_ps(peak, _mm512_shuffle_f32x4(peak, peak, 0xb1)), scales);
  if (_mm512_cmp_ps_mask(peak, b->peaks, _CMP_NLE_UQ)) {
    peak = _mm512_max_ps(peak, b->peaks);
    vf shrink = exp2_of((vf)_mm512_sub_ps(b->peaks, peak));
    b->sums = _mm512_mul_ps(b->sums, (__m512)shrink);
    for (int j = 0; j < TILE_QUERIES; j++)
      for (long d = 0; d < size; d += LANES) store(b->out[j], d, load(b->out[j], d, F32) * shrink[j], F32);
    b->peaks = peak;
  }
  for (int i = 0; i < STEP_KEYS / 4; i++) {
    w[i] = (__m512)exp2_of_negative((vf)_mm512_fmsub_ps(w[i], scales, b->peaks));
    sums[i % 2] = _mm512_add_ps(sums[i % 2], w[i]);
    prefetch_heads(next, 2, BF16, size);
  }
  b->sums = _mm512_add_ps(b->sums, _mm512_add_ps(sums[0], sums[1]));
  transpose_weights(w, s->weights);
}

/* Interleaves the values of two neighbouring positions, for all heads and pairs of positions of a step. The unpack
   instructions work within 16 bytes, so that of each 32 columns the first tile gets columns 0-3, 8-11, 16-19 and 24-27,
   and the second 4-7, 12-15, 20-23 and 28-31. Positions that are hidden or past the end are zeros. */
INLINE void pair_values_of_step(const struct kv_cache *c, long size, long first, long heads, const int32_t *slots,
                                int hidden, int count, struct prefetch *next, struct paired_values *v) {
  static const bf16 nothing[LINE_NUMBERS];
  for (int i = 0; i < STEP_KEYS; i += 2) {
    const bf16 *a = nothing, *b = nothing;
    long a_step = 0, b_step = 0;
    if (i >= hidden && i < count) a = head_at(c, slots[i], c->kv_heads + first), a_step = LINE_NUMBERS;
    if (i + 1 >= hidden && i + 1 < count) b = head_at(c, slots[i + 1], c->kv_heads + first), b_step = LINE_NUMBERS;
    for (long h = 0; h < heads; h++) {
#pragma GCC unroll 4
      for (long d = 0; d < size; d += LINE_NUMBERS, a += a_step, b += b_step) {
        __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
        _mm512_store_si512(v[h].tiles[d / 16][i / 2], _mm512_unpacklo_epi16(x, y));
        _mm512_store_si512(v[h].tiles[d / 16 + 1][i / 2], _mm512_unpackhi_epi16(x, y));
      }
      prefetch_heads(next, 1, BF16, size);
    }
  }
}

/* out += weights * values, for up to 4 queries and the 32 keys of a step. */
INLINE void add_values_in_tiles(const struct paired_values *v, const struct key_scores *s, long size,
                                struct prefetch *next, struct query_block *b) {
  MEMORY_IS_WRITTEN;
  _tile_loadd(7, s->weights, 64);
  for (long d = 0; d < size; d += LINE_NUMBERS) {
    _tile_loadd(4, b->out[0] + d, sizeof b->out[0]);
    _tile_loadd(3, v->tiles[d / 16], 64);
    prefetch_between_instructions(next, size);
    _tile_dpbf16ps(4, 7, 3);
    _tile_loadd(5, b->out[0] + d + 16, sizeof b->out[0]);
    prefetch_between_instructions(next, size);
    _tile_loadd(6, v->tiles[d / 16 + 1], 64);
    prefetch_between_instructions(next, size);
    _tile_dpbf16ps(5, 7, 6);
    prefetch_between_instructions(next, size);
    _tile_stored(4, b->out[0] + d, sizeof b->out[0]);
    _tile_stored(5, b->out[0] + d + 16, sizeof b->out[0]);
  }
  MEMORY_IS_WRITTEN;
}

/* Stores the result of one query, out / sum, with its columns in their original order. */
static void store_ordered_quotient(bf16 *to, const struct query_block *b, int query, long size) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  float sums[LANES];
  memcpy(sums, &b->sums, sizeof sums);
  vf sum = splat((sums[query] + sums[query + 4]) + (sums[query + 8] + sums[query + 12]));
  for (long d = 0; d < size; d += LINE_NUMBERS) {
    __m512 x = _mm512_load_ps(b->out[query] + d), y = _mm512_load_ps(b->out[query] + d + 16);
    store_bf16(to + d, (vf)_mm512_permutex2var_ps(x, low, y) / sum);
    store_bf16(to + d + 16, (vf)_mm512_permutex2var_ps(x, high, y) / sum);
  }
}

/* Each sink counts once: in one of the lanes that are added up in the end. */
static void begin_with_sinks(struct query_block *b, const float *sinks, long queries) {
  float peaks[LANES] = {0}, sums[LANES] = {0};
  for (int i = 0; i < LANES; i++)
    if (i % TILE_QUERIES < queries) peaks[i] = sinks[i % TILE_QUERIES] * LOG2E;
  for (int j = 0; j < TILE_QUERIES; j++) sums[j] = 1;
  memcpy(&b->peaks, peaks, sizeof peaks);
  memcpy(&b->sums, sums, sizeof sums);
}

/* A block contains up to TILE_QUERIES query heads of one key head. */
INLINE void attend_item_in_tiles(const struct attention *job, const struct decode_item *s, long size,
                                 struct team *team) {
  const struct kv_cache *c = &job->cache;
  const struct score_rule *rule = &job->rule;
  long each = (s->group + TILE_QUERIES - 1) / TILE_QUERIES, count = s->count * each, query = s->first * s->group;
  struct query_block blocks[count];
  struct key_scores scores[count];
  struct paired_values values[s->count];
  uint32_t q[count * size / 2 * TILE_QUERIES] __attribute__((aligned(64)));
  const bf16 *from = (const bf16 *)job->q + s->token * job->q_stride + query * size;
  for (long i = 0; i < count; i++) {
    long head = i / each, j = i % each * TILE_QUERIES;
    pair_query_numbers(from + (head * s->group + j) * size, min(s->group - j, TILE_QUERIES), size,
                       q + i * size / 2 * TILE_QUERIES);
    blocks[i].peaks = _mm512_set1_ps(-INFINITY);
    blocks[i].sums = _mm512_setzero_ps();
    memset(blocks[i].out, 0, sizeof blocks[i].out);
    if (rule->sinks)
      begin_with_sinks(&blocks[i], rule->sinks + query + head * s->group + j, min(s->group - j, TILE_QUERIES));
  }
  for (long start = s->seen / STEP_KEYS * STEP_KEYS; start < s->length; start += STEP_KEYS) {
    const int32_t *slots = s->slots + start;
    int keys = (int)min(s->length - start, STEP_KEYS), hidden = s->seen > start ? (int)(s->seen - start) : 0;
    int is_altered = hidden || alters(rule);
    struct prefetch next = prefetch_after(job, s, start + STEP_KEYS, STEP_KEYS, next_item(team));
    pair_values_of_step(c, size, s->first, s->count, slots, hidden, keys, &next, values);
    for (long i = 0; i < count; i++)
      score_keys_in_tiles(q + i * size / 2 * TILE_QUERIES, c, size, s->first + i / each, slots, keys, &next,
                          &scores[i]);
    for (long i = 0; is_altered && i < count; i++) {
      long j = i % each * TILE_QUERIES;
      alter_step(&scores[i], rule, query + i / each * s->group + j, (int)min(s->group - j, TILE_QUERIES), hidden,
                 start - (s->length - 1));
    }
    float scale = is_altered ? 1 : rule->scale;
    for (long i = 0; i < count; i++) weigh_keys_of_step(&scores[i], keys, scale, size, &next, &blocks[i]);
    for (long i = 0; i < count; i++) add_values_in_tiles(&values[i / each], &scores[i], size, &next, &blocks[i]);
    prefetch_heads(&next, 2 * STEP_KEYS * s->count, BF16, size);
  }
  bf16 *to = (bf16 *)job->out + (s->token * job->heads + query) * size;
  for (long i = 0; i < s->count * s->group; i++)
    store_ordered_quotient(to + i * size, &blocks[i / s->group * each + i % s->group / TILE_QUERIES],
                           (int)(i % s->group % TILE_QUERIES), size);
}

void attend_on_matrix_unit(const struct attention *job, struct team *team) {
  configure_decode_tiles();
  FOR_EACH_ITEM(item, count_items(job), 1, team) {
    struct decode_item s = item_at(job, item);
    switch (job->cache.size) {
      case 64: attend_item_in_tiles(job, &s, 64, team); break;
      case 128: attend_item_in_tiles(job, &s, 128, team); break;
      default: attend_item_in_tiles(job, &s, job->cache.size, team);
    }
  }
  _tile_release();
}

#endif
