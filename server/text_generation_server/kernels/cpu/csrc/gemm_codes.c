/* y = x Wᵀ for weights that are kept in fewer bits than they are multiplied in: codes in groups, W = scale * (code -
   zero) or scale * code - offset, and numbers of 8, 16 and 32 bits. README.md draws how they lie in memory.

   Codes become float32 in registers (`widen_codes`), or pairs of bfloat16 (`widen_pairs`) where a processor multiplies
   these and they are exact. A segment is inputs of one group within one part of the inputs. It has a few sums for each
   output, without scale and zero point: these are applied once to the sum of a segment, with the sum of its x for zero
   points and offsets. The scales of a part become float32 first (scales.h). Few rows multiply codes as they are read;
   for more rows the codes of a part are widened first, and kept in the nearest cache. The order of all additions is
   that of the inputs alone, so a row of y has the same bits for any number of rows and of threads. */
#include "codes.h"
#include "float_rows.h"
#include "scales.h"
#include "widen.h"

#define ROWS_OF_CODES (LANES == 16 ? 4 : 3) /* most rows that multiply codes as they are read */
#define CHAINS (LANES == 16 ? 4 : 2)        /* sums of an output in a segment, so that additions need not wait */
#define PAIR_VECTORS (PAIR_OUTPUTS / LANES)
#define MIN_BLOCK_ROWS 24 /* fewest rows of a block, if there are as many */
#define BLOCK_OF_X 262144 /* numbers of x in a block between them */
#define CODES_AHEAD 8192  /* bytes between the codes in use and those that are prefetched */
#define ROW_PADDING 16    /* numbers between rows of x, so that they do not share places in the cache */

/* Inputs of one part, of a pair of panels, and rows of x. */
struct part {
  const char *codes, *high;
  long inputs;
  long first, group; /* inputs of the first segment, and most inputs of the others */
  const char *x;     /* the part's first input in the first row */
  long x_stride;
  const float *table;
  const float *scales; /* [segments, 32], as are zeros and offsets; or null */
  const float *zeros;
  const float *offsets;
  const float *x_sums; /* [segments, rows of a block], or null */
  long sums_stride;
  long line;   /* for codes that are kept: `line` bytes of the next part's codes for each of their words */
  float *kept; /* the part's widened codes, [inputs][32] or [pairs of inputs][32], if there are more rows */
};

#if defined(__AVX512BF16__)
INLINE __m512bh two_of_x(const char *x) {
  int word;
  memcpy(&word, x, sizeof word);
  return (__m512bh)_mm512_set1_epi32(word);
}
#endif

INLINE vf number_of_x(const char *x) {
  float number;
  memcpy(&number, x, sizeof number);
  return splat(number);
}

/* parts += a step of `rows` rows of x times that of `count` vectors of outputs from the pair's output `at` on. */
INLINE void multiply_step(const struct part *s, const char *step, const char *high, const char *x, int rows, long at,
                          int count, int type, int pairs, vf parts[ROWS_OF_CODES][PAIR_VECTORS][CHAINS]) {
#pragma GCC unroll 8
  for (int v = 0; v < count; v += WIDENED_AT_ONCE) {
    vu codes[WIDENED_AT_ONCE][BYTES_OF_PLANES];
#pragma GCC unroll 2
    for (int i = 0; i < WIDENED_AT_ONCE; i++) open_codes(step, high, type, s->table, at + (v + i) * LANES, codes[i]);
#pragma GCC unroll 4
    for (int word = 0; word < WORDS_OF_STEP; word++) {
      /* Numbers of x are loaded again: kept for all vectors, they would fill the registers. */
      if (LANES < 16) __asm__("" : "+r"(x));
      vf even[WIDENED_AT_ONCE], odd[WIDENED_AT_ONCE];
      long n = at + v * LANES;
      if (!pairs) widen_vectors(step, codes, type, s->table, word, n, even, odd);
#if defined(__AVX512BF16__)
#pragma GCC unroll 2
      for (int i = 0; i < WIDENED_AT_ONCE && pairs; i++, n += LANES)
        even[i] = (vf)widen_pairs(step, codes[i], type, s->table, word, n);
#endif
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) {
        const char *two = x + r * s->x_stride + (pairs ? 4 : 8) * word;
#if defined(__AVX512BF16__)
        if (pairs) {
#pragma GCC unroll 2
          for (int i = 0; i < WIDENED_AT_ONCE; i++) {
            vf *sum = &parts[r][v + i][word % CHAINS];
            *sum = (vf)_mm512_dpbf16_ps((__m512)*sum, (__m512bh)even[i], two_of_x(two));
          }
          continue;
        }
#endif
#pragma GCC unroll 2
        for (int i = 0; i < WIDENED_AT_ONCE; i++) {
          vf *sums = parts[r][v + i] + 2 * word % CHAINS;
          sums[0] = multiply_add(number_of_x(two), even[i], sums[0]);
          sums[1] = multiply_add(number_of_x(two + 4), odd[i], sums[1]);
        }
      }
    }
  }
}

/* What is applied to the sum of a segment. */
enum segment_scaling { NO_SCALES, SCALES, ZEROS_AND_SCALES, SCALES_AND_OFFSETS };

INLINE enum segment_scaling scaling_of(const struct part *s) {
  return !s->scales ? NO_SCALES : !s->x_sums ? SCALES : s->offsets ? SCALES_AND_OFFSETS : ZEROS_AND_SCALES;
}

/* sum + the sum of LANES outputs of a row and a segment, scaled. `at`: the first of these outputs in scales, zeros and
   offsets. */
INLINE vf add_scaled(const struct part *s, enum segment_scaling scaling, long at, float x_sum, vf part, vf sum) {
  if (scaling == NO_SCALES) return sum + part;
  if (scaling == ZEROS_AND_SCALES) part = multiply_add(load(s->zeros, at, F32), splat(-x_sum), part);
  if (scaling == SCALES_AND_OFFSETS) sum = multiply_add(load(s->offsets, at, F32), splat(-x_sum), sum);
  return multiply_add(load(s->scales, at, F32), part, sum);
}

INLINE void prefetch_step(const char *step, const char *high, long bytes, long high_bytes) {
#pragma GCC unroll 8
  for (long line = 0; line < bytes; line += 64) __builtin_prefetch(step + CODES_AHEAD + line, 0, AHEAD_CACHE);
  if (high_bytes) __builtin_prefetch(high + CODES_AHEAD / 4, 0, AHEAD_CACHE);
}

/* sums += a part, for a number of rows, a type and kind of numbers that the compiler knows. */
INLINE void add_part_of(const struct part *s, int rows, int type, int pairs, float sums[][PAIR_OUTPUTS]) {
  enum segment_scaling scaling = scaling_of(s);
  int count = PAIR_VECTORS;
  while (count * rows * CHAINS > SUM_VECTORS) count /= 2;
  long bytes = bytes_of_step(type), number = pairs ? 2 : 4, high_bytes = PAIR_OUTPUTS * high_bits(type);
#pragma GCC unroll 1
  for (long at = 0; at < PAIR_OUTPUTS; at += count * LANES) {
    const char *step = s->codes, *high = s->high, *x = s->x;
    const float *x_sums = s->x_sums;
    for (long i = 0, end = s->first, of_group = at; i < s->inputs; end += s->group, of_group += PAIR_OUTPUTS) {
      vf parts[ROWS_OF_CODES][PAIR_VECTORS][CHAINS] = {};
      if (end > s->inputs) end = s->inputs;
      for (; i < end; i += CODES_STEP, step += bytes, high += high_bytes, x += CODES_STEP * number) {
        prefetch_step(step, high, bytes, high_bytes);
        multiply_step(s, step, high, x, rows, at, count, type, pairs, parts);
      }
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < count; v++) {
          long n = at + v * LANES;
          vf part = parts[r][v][0] + parts[r][v][1];
#if LANES == 16
          part += parts[r][v][2] + parts[r][v][3];
#endif
          float x_sum = x_sums ? x_sums[r] : 0;
          vf sum = load(sums[r], n, F32);
          store(sums[r], n, add_scaled(s, scaling, of_group + v * LANES, x_sum, part, sum), F32);
        }
      if (x_sums) x_sums += s->sums_stride;
    }
  }
}

/* Widens the codes of a part, for a type and kind of numbers that the compiler knows. */
INLINE void widen_part_of(const struct part *s, int type, int pairs) {
  long bytes = bytes_of_step(type), high_bytes = PAIR_OUTPUTS * high_bits(type);
  const char *step = s->codes, *high = s->high;
  float *kept = s->kept;
  for (long i = 0; i < s->inputs; i += CODES_STEP, step += bytes, high += high_bytes) {
    if (high_bytes) __builtin_prefetch(high + CODES_AHEAD / 4, 0, AHEAD_CACHE);
#pragma GCC unroll 8
    for (int v = 0; v < PAIR_VECTORS; v += WIDENED_AT_ONCE) {
      vu codes[WIDENED_AT_ONCE][BYTES_OF_PLANES];
#pragma GCC unroll 2
      for (int j = 0; j < WIDENED_AT_ONCE; j++) open_codes(step, high, type, s->table, (v + j) * LANES, codes[j]);
#pragma GCC unroll 4
      for (int word = 0; word < WORDS_OF_STEP; word++) {
        vf even[WIDENED_AT_ONCE], odd[WIDENED_AT_ONCE];
        if (!pairs) widen_vectors(step, codes, type, s->table, word, v * LANES, even, odd);
#pragma GCC unroll 2
        for (int j = 0; j < WIDENED_AT_ONCE; j++) {
          long n = (v + j) * LANES;
#if defined(__AVX512BF16__)
          if (pairs) {
            store(kept, word * PAIR_OUTPUTS + n, (vf)widen_pairs(step, codes[j], type, s->table, word, n), F32);
            continue;
          }
#endif
          store(kept, 2 * word * PAIR_OUTPUTS + n, even[j], F32);
          store(kept, (2 * word + 1) * PAIR_OUTPUTS + n, odd[j], F32);
        }
      }
    }
    kept += CODES_STEP / (pairs ? 2 : 1) * PAIR_OUTPUTS;
  }
}

/* Sums of pairs of chains of a group of rows. */
typedef float chain_sums[CHAINS / 2][GROUP_ROWS][PAIR_OUTPUTS];

/* sums += the chains of a segment, of `count` vectors from output `at` of the pair on. `of_group`: the same output in
   scales, zeros and offsets. */
INLINE void add_chains(const struct part *s, enum segment_scaling scaling, const chain_sums halves, long rows,
                       int count, long at, long of_group, const float *x_sums, float sums[][PAIR_OUTPUTS]) {
#define ADD_CHAINS(SCALING)                                                                     \
  case SCALING:                                                                                 \
    for (long r = 0; r < rows; r++) {                                                           \
      float x_sum = SCALING > SCALES ? x_sums[r] : 0;                                           \
      _Pragma("GCC unroll 8") for (int v = 0; v < count; v++) {                                 \
        vf part = load(halves[0][r], v * LANES, F32), sum = load(sums[r], at + v * LANES, F32); \
        if (LANES == 16) part += load(halves[CHAINS / 2 - 1][r], v * LANES, F32);               \
        sum = add_scaled(s, SCALING, of_group + v * LANES, x_sum, part, sum);                   \
        store(sums[r], at + v * LANES, sum, F32);                                               \
      }                                                                                         \
    }                                                                                           \
    break
  switch (scaling) {
    ADD_CHAINS(NO_SCALES);
    ADD_CHAINS(SCALES);
    ADD_CHAINS(ZEROS_AND_SCALES);
    ADD_CHAINS(SCALES_AND_OFFSETS);
  }
#undef ADD_CHAINS
}

/* The same as add_part_of with codes that are kept, for a group of rows. The sums of one chain are in registers at a
   time. */
INLINE void add_kept_part_of(const struct part *s, int rows, int pairs, float sums[][PAIR_OUTPUTS]) {
  int count = vectors_at_once(rows), inputs_of_word = pairs ? 2 : 1;
  chain_sums halves __attribute__((aligned(64)));
#pragma GCC unroll 1
  for (long at = 0; at < PAIR_OUTPUTS; at += count * LANES) {
    const float *x = (const float *)s->x, *kept = s->kept + at, *x_sums = s->x_sums;
    const char *ahead = s->codes;
    for (long i = 0, end = s->first, of_group = at; i < s->inputs; end += s->group, of_group += PAIR_OUTPUTS) {
      if (end > s->inputs) end = s->inputs;
      long words = (end - i) / inputs_of_word;
#pragma GCC unroll 1
      for (int chain = 0; chain < CHAINS; chain++) {
        vf part[GROUP_ROWS][2 * PANEL_VECTORS] = {};
        ahead = add_kept(part, x + chain * rows, rows, kept + chain * PAIR_OUTPUTS, count, words / CHAINS, CHAINS,
                         pairs, ahead, s->line);
        float (*half)[PAIR_OUTPUTS] = halves[chain / 2];
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
          for (int v = 0; v < count; v++) {
            if (chain % 2) part[r][v] += load(half[r], v * LANES, F32);
            store(half[r], v * LANES, part[r][v], F32);
          }
      }
      add_chains(s, scaling_of(s), halves, rows, count, at, of_group, x_sums, sums);
      if (x_sums) x_sums += s->sums_stride;
      i = end;
      x += words * rows;
      kept += words * PAIR_OUTPUTS;
    }
  }
}

/* The types whose codes are widened, each with whether pairs are multiplied. */
#define EACH_PAIR_TYPE(DO, PAIRS) \
  DO(BF16, PAIRS);                \
  DO(I8, PAIRS);                  \
  DO(F8, PAIRS);                  \
  DO(I4, PAIRS);                  \
  DO(TABLE4, PAIRS);              \
  DO(PLANES2, PAIRS);             \
  DO(PLANES5, PAIRS);             \
  DO(PLANES6, PAIRS)

/* Calls add_part_of or, without rows, widen_part_of; the compiler makes a copy of them for each number of rows, type
   and kind of numbers. */
static void add_part(const struct part *s, long rows, int type, int pairs, float sums[][PAIR_OUTPUTS]) {
#define ADD_CODES(TYPE, PAIRS)                                                     \
  case TYPE + 32 * PAIRS:                                                          \
    rows == 0                  ? widen_part_of(s, TYPE, PAIRS)                     \
    : rows == 1                ? add_part_of(s, 1, TYPE, PAIRS, sums)              \
    : rows == 2                ? add_part_of(s, 2, TYPE, PAIRS, sums)              \
    : rows == 3 && LANES == 16 ? add_part_of(s, 3, TYPE, PAIRS, sums)              \
                               : add_part_of(s, ROWS_OF_CODES, TYPE, PAIRS, sums); \
    break
  switch (type + 32 * pairs) {
    EACH_PAIR_TYPE(ADD_CODES, 0);
    ADD_CODES(F16, 0);
    ADD_CODES(F32, 0);
#if LOOKS_UP_BYTES
    ADD_CODES(BYTES4, 0);
#endif
#if defined(__AVX512BF16__)
    EACH_PAIR_TYPE(ADD_CODES, 1);
#endif
  }
#undef ADD_CODES
}

static void add_kept_part(const struct part *s, long rows, int pairs, float sums[][PAIR_OUTPUTS]) {
#if defined(__AVX512BF16__)
#define ADD_KEPT_PART(ROWS) \
  case ROWS: pairs ? add_kept_part_of(s, ROWS, 1, sums) : add_kept_part_of(s, ROWS, 0, sums); break
#else
#define ADD_KEPT_PART(ROWS) \
  case ROWS: add_kept_part_of(s, ROWS, 0, sums); break
#endif
  (void)pairs;
  switch (rows) { EACH_GROUP(ADD_KEPT_PART); }
#undef ADD_KEPT_PART
}

/* The end of the segment that begins with input `from`. */
INLINE long end_of_segment(long from, long group, long inputs) {
  long of_group = (from / group + 1) * group, of_part = (from / PART_INPUTS_OF_CODES + 1) * PART_INPUTS_OF_CODES;
  long end = of_group < of_part ? of_group : of_part;
  return end < inputs ? end : inputs;
}

static long count_segments(long group, long inputs) {
  long count = 0;
  for (long i = 0; i < inputs; i = end_of_segment(i, group, inputs)) count++;
  return count;
}

/* The inputs of a part. A segment ends where a part does, so sums have the same order for parts of either size. */
static long part_inputs(const struct codes_product *p, long rows) {
  int is_short = rows > ROWS_OF_CODES && !p->pairs && KEPT_INPUTS % p->a->group == 0;
  return is_short ? KEPT_INPUTS : PART_INPUTS_OF_CODES;
}

void sum_codes(const struct codes_product *p, long rows, long pair, float sums[][PAIR_OUTPUTS]) {
  const struct gemm_codes_arguments *a = p->a;
  memset(sums, 0, rows * sizeof *sums);
  long bytes = bytes_of_step(p->type), steps = a->inputs / CODES_STEP;
  long high_bytes = PAIR_OUTPUTS * high_bits(p->type);
  const char *codes = (const char *)a->codes + pair * steps * bytes;
  struct scales_of_part numbers;
  for (long n = 0; p->zero != 0 && !a->zeros && n < MAX_SEGMENTS; n++)
    for (long o = 0; o < PAIR_OUTPUTS; o += LANES) store(numbers.zeros[n], o, splat(p->zero), F32);
  long most = part_inputs(p, rows);
  for (long i = 0, end, segment = 0; i < a->inputs; i = end) {
    end = i + most < a->inputs ? i + most : a->inputs;
    long first = i / a->group, segments = (end - 1) / a->group + 1 - first;
    widen_scales(&numbers, a, pair, p->groups, first, segments);
    if (p->unit != 1 && a->scales) multiply_by_unit(numbers.scales, segments, p->unit);
    struct part s = {
        .codes = codes + i / CODES_STEP * bytes,
        .high = (const char *)a->high + (pair * steps + i / CODES_STEP) * high_bytes,
        .inputs = end - i,
        .first = (first + 1) * a->group - i,
        .group = a->group,
        .x_stride = p->x_stride,
        .table = p->table,
        .scales = a->scales ? numbers.scales[0] : 0,
        .zeros = numbers.zeros[0],
        .offsets = a->offsets ? numbers.offsets[0] : 0,
        .sums_stride = p->block,
        .kept = p->kept,
    };
    const float *x_sums = p->sums_x ? p->x_sums + segment * p->block : 0;
    if (rows <= ROWS_OF_CODES) {
      s.x = p->x + i * (p->pairs ? 2 : 4);
      s.x_sums = x_sums;
      add_part(&s, rows, p->type, p->pairs, sums);
    } else {
      struct row_block b = {.rows = rows, .groups = count_groups(rows)};
      long words = (end - i) / (p->pairs ? 2 : 1), word = i / (p->pairs ? 2 : 1);
      add_part(&s, 0, p->type, p->pairs, 0);
      s.codes += most / CODES_STEP * bytes;
      s.line = bytes / CODES_STEP * (p->pairs ? 2 : 1);
      for (long group = 0; group < b.groups; group++) {
        long from = first_of_group(&b, group), count = first_of_group(&b, group + 1) - from;
        s.x = (const char *)(p->x_in_groups + word * rows + from * words);
        s.x_sums = x_sums ? x_sums + from : 0;
        add_kept_part(&s, count, p->pairs, sums + from);
        s.codes = (const char *)p->kept; /* the first group has prefetched the next part */
        s.line = 0;
      }
    }
    segment += segments;
  }
}

/* One item of the work: `rows` rows of x, from row `first` on, and a pair of panels. */
static void multiply_codes(const struct codes_product *p, long first, long rows, long pair) {
  float sums[BLOCK_ROWS][PAIR_OUTPUTS] __attribute__((aligned(64)));
  sum_codes(p, rows, pair, sums);
  for (long r = 0; r < rows; r++)
    for (long at = 0; at < PANEL_OUTPUTS; at += LANES)
      store_pair(&p->g, first + r, pair, at, load(sums[r], at, F32), load(sums[r], PANEL_OUTPUTS + at, F32));
}

/* Copies a row of x as float32, times what its codes need, or for pairs as bfloat16: in the order of the codes, and
   with zeros for the inputs that it does not have. */
static void copy_row(const struct codes_product *p, const char *x, char *to) {
  const struct gemm_codes_arguments *a = p->a;
  enum type type = (enum type)a->x_type;
  long i = 0, whole = a->order ? 0 : a->x_inputs / LANES * LANES;
  for (; i < whole; i += LANES)
    store(to, i, load(x, i, type) * load(p->x_factors, i % CODES_STEP, F32), p->pairs ? BF16 : F32);
  for (; i < a->inputs; i++) {
    long from = a->order ? a->order[i] : i;
    uint32_t bits = 0;
    if (from < a->x_inputs) bits = type == F32 ? ((const uint32_t *)x)[from] : (uint32_t)((const bf16 *)x)[from] << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    if (p->pairs)
      ((bf16 *)to)[i] = (bf16)(bits >> 16);
    else
      ((float *)to)[i] = number * p->x_factors[i % CODES_STEP];
  }
}

/* The sum of `count` numbers of a row of x times their units, in an order that depends on their number alone. */
static float sum_of_x(const char *x, long count, enum type type, const float *units) {
  vf sums = {};
  float rest = 0.0f;
  long i = 0;
  for (; i + LANES <= count; i += LANES) sums += load(x, i, type) * load(units, i % CODES_STEP, F32);
  for (; i < count; i++) {
    uint32_t bits = type == F32 ? ((const uint32_t *)x)[i] : (uint32_t)((const bf16 *)x)[i] << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    rest += number * units[i % CODES_STEP];
  }
  return lane_sum(sums) + rest;
}

static const char *row_of_x(const struct codes_product *p, long row) {
  long size = p->a->x_inputs * bytes_of((enum type)p->a->x_type);
  return (const char *)p->a->x + (p->pairs_of_x ? p->pairs_of_x[row] / p->chosen : row) * size;
}

/* Copies a block of rows, whose words are float32 or pairs, in the order of widen_block. */
static void copy_groups(const struct codes_product *p, long rows) {
  struct row_block b = {.rows = rows, .groups = count_groups(rows)};
  long all = p->a->inputs / (p->pairs ? 2 : 1), part = part_inputs(p, rows) / (p->pairs ? 2 : 1);
  for (long start = 0; start < all; start += part)
    for (long group = 0; group < b.groups; group++) {
      long from = first_of_group(&b, group), count = first_of_group(&b, group + 1) - from, word = 0;
      long words = all - start < part ? all - start : part;
      const char *x = p->x + from * p->x_stride + 4 * start;
      float *to = p->x_in_groups + start * rows + from * words;
      for (; word + LANES <= words; word += LANES)
        widen_inputs(x + 4 * word, F32, p->x_stride, count, to + word * count);
      for (; word < words; word++)
        for (long r = 0; r < count; r++) memcpy(to + word * count + r, x + r * p->x_stride + 4 * word, 4);
    }
}

void prepare_block(struct codes_product *p, long first, long rows) {
  const struct gemm_codes_arguments *a = p->a;
  enum type type = p->pairs ? BF16 : F32;
  long given = a->x_inputs * bytes_of((enum type)a->x_type);
  p->x = row_of_x(p, first);
  p->x_stride = given;
  if ((p->pairs_of_x && rows > 1) || a->order || a->x_inputs != a->inputs || type != (enum type)a->x_type ||
      p->has_factors) {
    p->x_stride = (a->inputs + ROW_PADDING) * bytes_of(type);
    for (long r = 0; r < rows; r++) copy_row(p, row_of_x(p, first + r), (char *)p->own + r * p->x_stride);
    p->x = (const char *)p->own;
  }
  for (long i = 0, end, segment = 0; p->sums_x && i < a->inputs; i = end, segment++) {
    end = end_of_segment(i, a->group, a->inputs);
    for (long r = 0; r < rows; r++)
      p->x_sums[segment * p->block + r] =
          sum_of_x(p->x + r * p->x_stride + i * bytes_of(type), end - i, type, p->x_units);
  }
  if (rows > ROWS_OF_CODES) copy_groups(p, rows);
}

static long rows_of_block(long inputs) {
  long most = BLOCK_OF_X / inputs;
  return most < MIN_BLOCK_ROWS ? MIN_BLOCK_ROWS : most > BLOCK_ROWS ? BLOCK_ROWS : most;
}

long codes_row_blocks(long rows, long inputs) {
  long most = rows_of_block(inputs);
  return (rows + most - 1) / most;
}

/* Floats of scratch memory of each thread, in multiples of 16: a block of x, its sums, the block in groups, and a
   widened part. */
struct codes_scratch {
  long block, x, x_sums, groups, kept, all;
};

static struct codes_scratch divide_codes_scratch(long rows, long inputs, long group) {
  long blocks = codes_row_blocks(rows, inputs);
  struct codes_scratch d = {.block = (rows + blocks - 1) / blocks};
  d.x = d.block * (inputs + ROW_PADDING + LANES) / 16 * 16 + 16;
  d.x_sums = d.block * count_segments(group, inputs) / 16 * 16 + 16;
  d.groups = d.block > ROWS_OF_CODES ? (d.block * inputs + LANES) / 16 * 16 + 16 : 0;
  d.kept = PART_INPUTS_OF_CODES * PAIR_OUTPUTS;
  d.all = d.x + d.x_sums + d.groups + d.kept;
  return d;
}

/* The size of `scratch`, in bfloat16 numbers. */
EXPORT long gemm_codes_scratch(long rows, long inputs, long group, int threads) {
  struct codes_scratch d = divide_codes_scratch(rows, inputs, group);
  return 2 * threads * d.all;
}

long codes_scratch_numbers(long rows, long inputs, long group) {
  long most = rows_of_block(inputs);
  struct codes_scratch d = divide_codes_scratch(rows < most ? rows : most, inputs, group);
  return d.all;
}

/* Whether pairs of bfloat16 are multiplied: x is bfloat16, and so are all numbers of the weights' type. */
static int multiplies_pairs(const struct gemm_codes_arguments *a, const float *table) {
#if defined(__AVX512BF16__)
  uint32_t bits[16];
  memcpy(bits, table, sizeof bits);
  for (int i = 0; i < 16; i++)
    if (bits[i] & 0xffff) return 0;
  return a->x_type == BF16 && a->type != F16 && a->type != F32;
#else
  (void)a, (void)table;
  return 0;
#endif
}

/* Makes of 16 numbers that bfloat16 holds, or of the integers of planes, the same numbers in bfloat16. */
static void table_for_pairs(float *table, int type) {
  bf16 numbers[MOST_CODES];
  for (int i = 0; i < MOST_CODES; i++) {
    float number = has_bytes(type) ? (float)i : table[i % 16];
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    numbers[i] = (bf16)(bits >> 16);
  }
  memcpy(table, numbers, sizeof numbers);
}

/* Says how the codes become numbers that are multiplied: the table, and what is left for scales, zero points and x. */
static void choose_widening(struct codes_product *p) {
  const struct gemm_codes_arguments *a = p->a;
  p->type = (int)a->type;
  p->unit = p->type == F8 ? F8_UNIT : 1;
  p->zero = zero_of_type(p->type);
  for (int i = 0; i < 16; i++) p->table[i] = p->type == TABLE4 ? a->table[i] : (float)i;
  p->pairs = multiplies_pairs(a, p->table);
  if (p->pairs) table_for_pairs(p->table, p->type);
#if LOOKS_UP_BYTES
  uint8_t bytes[16];
  if (p->type == TABLE4 && a->scales && as_bytes(a->table, bytes, &p->unit, &p->zero)) {
    p->type = BYTES4;
    for (int i = 0; i < 2; i++) memcpy((char *)p->table + sizeof bytes * i, bytes, sizeof bytes);
  }
#endif
  for (int i = 0; i < 16; i++) {
    p->x_units[i] = p->pairs ? 1 : (float)(1 << shift_of_input(p->type, i % CODES_STEP));
    p->x_factors[i] = 1 / p->x_units[i];
  }
  p->has_factors = !p->pairs && (p->type == I4 || has_bytes(p->type));
  p->sums_x = a->zeros || a->offsets || p->zero != 0;
}

void begin_codes(struct codes_product *p, const struct gemm_codes_arguments *a, long rows, float *own) {
  struct codes_scratch d = divide_codes_scratch(rows, a->inputs, a->group);
  *p = (struct codes_product){
      .a = a,
      .g = {.e = {.scales = a->output_scales,
                  .bias = a->bias,
                  .addend = a->addend,
                  .addend_stride = a->addend_stride * bytes_of((enum type)a->addend_type),
                  .addend_type = (enum type)a->addend_type,
                  .columns = a->columns,
                  .gated = a->gated,
                  .type = (enum type)a->y_type},
            .y = a->y,
            .y_stride = a->y_stride * bytes_of((enum type)a->y_type)},
      .groups = (a->inputs + a->group - 1) / a->group,
      .blocks = codes_row_blocks(rows, a->inputs),
      .block = d.block,
      .x_sums = own + d.x,
      .own = own,
      .x_in_groups = own + d.x + d.x_sums,
      .kept = own + d.x + d.x_sums + d.groups,
  };
  choose_widening(p);
}

EXPORT void gemm_codes(const void *arguments, struct team *team, int me) {
  const struct gemm_codes_arguments *a = arguments;
  struct codes_scratch d = divide_codes_scratch(a->rows, a->inputs, a->group);
  struct codes_product p;
  begin_codes(&p, a, a->rows, (float *)a->scratch + me * d.all);
  long pairs = a->outputs / PAIR_OUTPUTS, items = p.blocks * pairs, prepared = -1, first = 0, rows = 0;
  FOR_EACH_ITEM(item, items, items_at_a_time(items, a->rows, a->outputs, team->threads), team) {
    if (item / pairs != prepared) {
      prepared = item / pairs;
      first = prepared * a->rows / p.blocks;
      rows = (prepared + 1) * a->rows / p.blocks - first;
      prepare_block(&p, first, rows);
    }
    multiply_codes(&p, first, rows, item % pairs);
  }
}
