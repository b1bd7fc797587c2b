/* Sums of products of integers: weights in up to 8 bits, and rows of x that have become integers of 8 bits. This file
   is compiled twice for targets some of whose processors have VPDPBUSD: with it, and without.

   Codes have no sign, and `zero` is subtracted from them: sum (code - zero) * x = sum code * x - zero * sum x, where
   the sums of x are known. So are offsets. README.md says what is added to a row of y, and in which order; no
   multiplication is fused with an addition. */
#pragma once

#include "ints.h"
#include "scales.h"
#include "widen.h"

#pragma GCC optimize("fp-contract=off")

#define ROWS_OF_INTS (LANES == 16 ? 8 : 4) /* most rows whose sums are in registers */
#define VECTORS_OF_PAIR (PAIR_OUTPUTS / LANES)
#define NEAR_ROWS (LANES == 16 ? 4 : 2) /* codes of fewer rows are prefetched into the nearest cache on all targets */

#if (LANES == 16 && defined(__AVX512VNNI__)) || (LANES == 8 && defined(__AVXVNNI__))
#define HAS_VNNI
#endif

/* One part of the inputs, of a pair of panels, and rows of x. */
struct ints_part {
  const struct ints_product *p;
  const char *codes;
  const char *next, *next_high; /* the codes of the next part, which are prefetched, and upper bits of planes */
  long next_bytes, high_bytes;  /* bytes of both for 32 inputs */
  long first, end;              /* rows of the block that are multiplied now, a number of them at a time */
  long count;                   /* rows of the block */
  long from, inputs;
  char *rows;          /* where the integers of the block begin */
  long left;           /* inputs of the first group that lie in this part, or beyond it */
  const float *scales; /* [groups, 32] of this part, as are offsets; null where they are not used */
  const float *offsets;
  const int8_t *zeros; /* [groups, 32], or null */
  const char *levels;  /* [groups, 32] integers of 8 bits, as are minima; or null */
  const char *minima;
  const float *factors; /* [32], as are factors of minima */
  const float *minimum_factors;
  float (*totals)[PAIR_OUTPUTS]; /* [rows]: integers of a part that would fill the registers, as have minima */
  float (*minimum_totals)[PAIR_OUTPUTS];
};

INLINE vi load_ints(const float *from, long at) {
  vi found;
  memcpy(&found, from + at, sizeof found);
  return found;
}

INLINE void store_ints(float *to, long at, vi ints) { memcpy(to + at, &ints, sizeof ints); }

INLINE void add_ints_to(float *to, long at, vi ints) { store_ints(to, at, load_ints(to, at) + ints); }

/* sum + multiply_halves(a, b) */
INLINE vi add_products_of_halves(vi sum, vi a, vi b) {
#if defined(HAS_VNNI) && LANES == 16
  return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(HAS_VNNI)
  return (vi)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#else
  return sum + multiply_halves(a, b);
#endif
}

#if defined(HAS_VNNI)
/* Words of four bytes: sum + the products of codes and x. */
INLINE vi add_products_of_bytes(vi sum, vu codes, vi x) {
#if LANES == 16
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
#else
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#endif
}
#endif

#if defined(__AVX2__)
/* Words of four bytes: the sums of the first two products of each word, and of the last two, as 16-bit numbers. */
INLINE vi multiply_bytes(vu codes, vi x) {
#if defined(__AVX512BW__)
  return (vi)_mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
#else
  return (vi)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
#endif
}

INLINE vi add_halves(vi a, vi b) {
#if defined(__AVX512BW__)
  return (vi)_mm512_add_epi16((__m512i)a, (__m512i)b);
#else
  return (vi)_mm256_add_epi16((__m256i)a, (__m256i)b);
#endif
}
#endif

/* The numbers of a table of bytes, for codes of 4 bits in each byte. */
INLINE vu numbers_of_bytes(vu codes, const uint8_t *table) {
#if defined(__AVX512BW__)
  return (vu)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), (__m512i)codes);
#elif defined(__AVX2__)
  return (vu)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), (__m256i)codes);
#else
  uint8_t bytes[4 * LANES];
  memcpy(bytes, &codes, sizeof bytes);
  for (int i = 0; i < 4 * LANES; i++) bytes[i] = table[bytes[i]];
  memcpy(&codes, bytes, sizeof bytes);
  return codes;
#endif
}

/* Words of 4 codes of LANES outputs: word i + next of the inputs that begin at `from`, for even i, and 0 or 1. */
INLINE vu codes_of_word(const char *from, enum code_kind kind, const uint8_t *table, int i, int next) {
  vu found;
  int is_nibbles = kind == NIBBLES || kind == NAMED;
  memcpy(&found, from + (is_nibbles ? i / 2 : i + next) * 4 * PAIR_OUTPUTS, sizeof found);
  if (!is_nibbles) return found;
  found = (next ? found >> 4 : found) & 0x0f0f0f0f;
  return kind == NAMED ? numbers_of_bytes(found, table) : found;
}

/* Words of `count` vectors of outputs. */
INLINE void load_code_words(const char *from, enum code_kind kind, const uint8_t *table, int i, int next, int count,
                            vu codes[VECTORS_OF_PAIR]) {
#pragma GCC unroll 8
  for (int v = 0; v < count; v++) codes[v] = codes_of_word(from + 4 * v * LANES, kind, table, i, next);
}

/* sums += the products of `words` words of `count` vectors of outputs, from an even word on, and of `rows` rows of x,
   whose words are `x_next` bytes apart. */
INLINE void add_int_dots(const char *codes, enum code_kind kind, const uint8_t *table, const char *x, long x_next,
                         int rows, int count, int words, vi sums[ROWS_OF_INTS][VECTORS_OF_PAIR]) {
#if defined(HAS_VNNI)
#pragma GCC unroll 1
  for (int i = 0; i < words; i += 2)
#pragma GCC unroll 2
    for (int next = 0; next < 2; next++, x += x_next) {
      vu c[VECTORS_OF_PAIR];
      load_code_words(codes, kind, table, i, next, count, c);
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) {
        vi number = splat_word(x + 4 * r);
#pragma GCC unroll 8
        for (int v = 0; v < count; v++) {
          sums[r][v] = add_products_of_bytes(sums[r][v], c[v], number);
          KEEP_IN_REGISTER(sums[r][v]);
        }
      }
    }
#else
#if defined(__AVX2__)
  if (kind == NIBBLES) { /* 16 products of a code and a number of x are a sum of 16 bits */
    vi pairs[ROWS_OF_INTS][VECTORS_OF_PAIR] = {};
#pragma GCC unroll 1
    for (int i = 0; i < words; i += 2)
#pragma GCC unroll 2
      for (int next = 0; next < 2; next++, x += x_next) {
        vu c[VECTORS_OF_PAIR];
        load_code_words(codes, kind, table, i, next, count, c);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
          vi number = splat_word(x + 4 * r);
#pragma GCC unroll 8
          for (int v = 0; v < count; v++) {
            pairs[r][v] = add_halves(pairs[r][v], multiply_bytes(c[v], number));
            KEEP_IN_REGISTER(pairs[r][v]);
          }
        }
      }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
      for (int v = 0; v < count; v++) sums[r][v] += multiply_halves(pairs[r][v], splat_int(0x00010001));
    return;
  }
  if (kind == SMALL) {
#pragma GCC unroll 1
    for (int i = 0; i < words; i += 2, x += 2 * x_next) {
      vu even[VECTORS_OF_PAIR], odd[VECTORS_OF_PAIR];
      load_code_words(codes, kind, table, i, 0, count, even);
      load_code_words(codes, kind, table, i, 1, count, odd);
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) {
        vi first = splat_word(x + 4 * r), second = splat_word(x + 4 * r + x_next);
#pragma GCC unroll 8
        for (int v = 0; v < count; v++) {
          vi pairs = add_halves(multiply_bytes(even[v], first), multiply_bytes(odd[v], second));
          sums[r][v] += multiply_halves(pairs, splat_int(0x00010001));
          KEEP_IN_REGISTER(sums[r][v]);
        }
      }
    }
    return;
  }
#endif
#pragma GCC unroll 1
  for (int i = 0; i < words; i += 2)
#pragma GCC unroll 2
    for (int next = 0; next < 2; next++, x += 2 * x_next) {
      vu c[VECTORS_OF_PAIR];
      load_code_words(codes, kind, table, i, next, count, c);
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) {
        vi first = splat_word(x + 4 * r), second = splat_word(x + 4 * r + x_next);
#pragma GCC unroll 8
        for (int v = 0; v < count; v++) {
          sums[r][v] += multiply_halves((vi)(c[v] & 0x00ff00ff), first);
          sums[r][v] += multiply_halves((vi)(c[v] >> 8 & 0x00ff00ff), second);
          KEEP_IN_REGISTER(sums[r][v]);
        }
      }
    }
#endif
}

/* sums += a part, for a number of rows and a form of weights that the compiler knows. Sums of BY_ROW are integers. */
INLINE void add_ints_of(const struct ints_part *s, int rows, enum code_kind kind, enum scaling scaling, int unit,
                        int starts, float sums[][PAIR_OUTPUTS]) {
  const struct ints_product *p = s->p;
  const int count = rows == 1 ? VECTORS_OF_PAIR : 2, is_nibbles = kind == NIBBLES || kind == NAMED;
  const int in_registers = LANES == 16 && rows <= 4;
  const long together = p->together, bytes = unit * PAIR_OUTPUTS / (is_nibbles ? 2 : 1), zero = p->a->zero;
  const long of_x = together * (p->halves ? 2 : 1) * unit;
  const int is_signed = p->a->scale_type == I8;
  const uint8_t *table = p->a->table;
  /* Copies: the compiler would load a member of a struct again after each store. */
  const long units = s->inputs / unit, of_group = p->a->group;
  const char *const next = s->next, *const next_high = s->next_high;
  const long next_bytes = unit == 32 ? s->next_bytes : s->next_bytes / 2,
             high_bytes = unit == 32 ? s->high_bytes : s->high_bytes / 2;
  const char *const levels = s->levels, *const minima = starts ? 0 : s->minima;
  const float *const scales = s->scales, *const offsets = starts ? 0 : s->offsets;
  const int8_t *const zeros = starts ? 0 : s->zeros;
  float (*totals)[PAIR_OUTPUTS] = s->totals;
  float (*minimum_totals)[PAIR_OUTPUTS] = s->minimum_totals;
  for (long first = s->first; first < s->end; first += rows, sums += rows)
#pragma GCC unroll 1
    for (long at = 0; at < PAIR_OUTPUTS; at += count * LANES) {
      const char *row = int_row(p, s->rows, first), *codes = s->codes + 4 * at, *x = row + s->from / unit * of_x;
      /* The codes of the next part are prefetched while the first 16 rows are multiplied, a share with each group of
         rows; of up to 8 rows, with the first group. */
      const long reach = s->count <= 8 ? rows : s->count < 16 ? s->count : 16;
      const int prefetches = at == 0 && first < reach && (is_nibbles || s->count > ROWS_READ_AHEAD);
      const long from_line = prefetches ? next_bytes * first / reach : 0;
      const long to_line = prefetches ? next_bytes * (first + rows) / reach : 0;
      const float *x_scales = (const float *)(row + p->scales_at);
      if (scaling != BY_ROW) x_scales += s->from / (scaling == BY_GROUP ? 32 : PART_INPUTS_OF_INTS) * together;
      const int32_t *x_sums = (const int32_t *)(row + p->sums_at) + s->from / unit / (p->pairs ? 2 : 1) * together;
      /* Sums of the part: floats of BY_GROUP, otherwise integers. If they would fill the registers, they are in memory:
         in `sums` or `totals`. */
      vi kept[ROWS_OF_INTS][VECTORS_OF_PAIR], kept_minima[ROWS_OF_INTS][VECTORS_OF_PAIR];
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < count; v++) {
          if (scaling == BY_ROW || (in_registers && scaling == BY_GROUP))
            kept[r][v] = load_ints(sums[r], at + v * LANES);
          if (scaling != BY_LEVELS) continue;
          kept[r][v] = kept_minima[r][v] = (vi){};
          if (in_registers) continue;
          store_ints(totals[r], at + v * LANES, (vi){});
          store_ints(minimum_totals[r], at + v * LANES, (vi){});
        }
      for (long u = 0, left = s->left, group = at; u < units; u++, codes += bytes, x += of_x) {
        for (long line = from_line; line < to_line; line += 64)
          __builtin_prefetch(next + u * next_bytes + line, 0, rows < NEAR_ROWS ? 3 : AHEAD_CACHE);
        for (long line = at == 0 && first == 0 ? 0 : high_bytes; line < high_bytes; line += 64)
          __builtin_prefetch(next_high + u * high_bytes + line, 0, rows < NEAR_ROWS ? 3 : AHEAD_CACHE);
        if (scaling == BY_ROW) {
          add_int_dots(codes, kind, table, x, 4 * together, rows, count, unit / 4, kept);
          continue;
        }
        vi factors[VECTORS_OF_PAIR] = {};
        if (scaling == BY_LEVELS)
#pragma GCC unroll 8
          for (int v = 0; v < count; v++) {
            const char *level = levels + group + v * LANES;
            factors[v] = is_signed ? load_signed(level) : load_u8(level);
          }
        vi dots[ROWS_OF_INTS][VECTORS_OF_PAIR];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
          for (int v = 0; v < count; v++)
            dots[r][v] = starts ? splat_word((const char *)(x_sums + r + u * together)) : (vi){};
        add_int_dots(codes, kind, table, x, 4 * together, rows, count, unit / 4, dots);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
          const int32_t x_sum = scaling == BY_LEVELS ? 0 : x_sums[r + u * together];
          const float x_scale = x_scales[r + (scaling == BY_GROUP ? u * unit / 32 * together : 0)];
#pragma GCC unroll 8
          for (int v = 0; v < count; v++) {
            long n = at + v * LANES, number = group + v * LANES;
            vi dot = dots[r][v];
            if (!starts && zero) dot -= splat_int(zero * x_sum);
            if (scaling == BY_LEVELS) {
              if (in_registers) {
                kept[r][v] += dot * factors[v];
                KEEP_IN_REGISTER(kept[r][v]);
              } else
                add_ints_to(totals[r], n, dot * factors[v]);
              continue;
            }
            if (zeros) dot -= load_signed(zeros + number) * splat_int(x_sum);
            vf scale = load(scales, number, F32) * splat(x_scale);
            vf sum = (in_registers ? (vf)kept[r][v] : load(sums[r], n, F32)) + __builtin_convertvector(dot, vf) * scale;
            if (offsets) sum -= load(offsets, number, F32) * splat(x_scale * (float)x_sum);
            if (in_registers) {
              kept[r][v] = (vi)sum;
              KEEP_IN_REGISTER(kept[r][v]);
            } else
              store(sums[r], n, sum, F32);
          }
        }
        if (scaling == BY_LEVELS && minima && u % 2) { /* sums of x of two units lie in one word */
#pragma GCC unroll 8
          for (int v = 0; v < count; v++) {
            const char *both = minima + group + v * LANES;
            vi pair = load_u8(both - PAIR_OUTPUTS) | load_u8(both) << 16;
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
              long n = at + v * LANES;
              vi total = in_registers ? kept_minima[r][v] : load_ints(minimum_totals[r], n);
              total = add_products_of_halves(total, pair, splat_word((const char *)(x_sums + r + u / 2 * together)));
              if (in_registers) {
                kept_minima[r][v] = total;
                KEEP_IN_REGISTER(kept_minima[r][v]);
              } else
                store_ints(minimum_totals[r], n, total);
            }
          }
        }
        left -= unit;
        if (left == 0) {
          left = of_group;
          group += PAIR_OUTPUTS;
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < count; v++) {
          long n = at + v * LANES;
          if (scaling == BY_ROW || (in_registers && scaling == BY_GROUP)) store_ints(sums[r], n, kept[r][v]);
          if (scaling != BY_LEVELS) continue;
          vi total = in_registers ? kept[r][v] : load_ints(totals[r], n);
          vf sum = load(sums[r], n, F32), scale = load(s->factors, n, F32) * splat(x_scales[r]);
          sum += __builtin_convertvector(total, vf) * scale;
          if (minima) {
            total = in_registers ? kept_minima[r][v] : load_ints(minimum_totals[r], n);
            scale = load(s->minimum_factors, n, F32) * splat(x_scales[r]);
            sum -= __builtin_convertvector(total, vf) * scale;
          }
          store(sums[r], n, sum, F32);
        }
    }
}

/* The forms that are multiplied; `../ints.py` refuses others. */
#define EACH_INT_FORM(DO)    \
  DO(BYTES, BY_ROW, 32)      \
  DO(BYTES, BY_GROUP, 32)    \
  DO(SMALL, BY_GROUP, 32)    \
  DO(NIBBLES, BY_GROUP, 32)  \
  DO(NAMED, BY_GROUP, 32)    \
  DO(NIBBLES, BY_LEVELS, 32) \
  DO(SMALL, BY_LEVELS, 32)   \
  DO(NAMED, BY_LEVELS, 32)   \
  DO(NIBBLES, BY_LEVELS, 16) \
  DO(SMALL, BY_LEVELS, 16)

#define FORM_OF_INTS(KIND, SCALING, UNIT) ((KIND) + 4 * (SCALING) + 16 * ((UNIT) == 16))

/* Calls add_ints_of; the compiler makes a copy of it for each number of rows and form. */
static void add_ints(const struct ints_part *s, long rows, float sums[][PAIR_OUTPUTS]) {
#define ADD_INTS_OF(ROWS, KIND, SCALING, UNIT)                                        \
  p->starts || SCALING == BY_ROW ? add_ints_of(s, ROWS, KIND, SCALING, UNIT, 1, sums) \
                                 : add_ints_of(s, ROWS, KIND, SCALING, UNIT, 0, sums)
#define ADD_INTS(KIND, SCALING, UNIT)                 \
  case FORM_OF_INTS(KIND, SCALING, UNIT):             \
    if (rows == 1)                                    \
      ADD_INTS_OF(1, KIND, SCALING, UNIT);            \
    else if (rows == 2)                               \
      ADD_INTS_OF(2, KIND, SCALING, UNIT);            \
    else if (KIND == BYTES && rows == 8)              \
      ADD_INTS_OF(ROWS_OF_INTS, KIND, SCALING, UNIT); \
    else                                              \
      ADD_INTS_OF(4, KIND, SCALING, UNIT);            \
    break;
  const struct ints_product *p = s->p;
  switch (FORM_OF_INTS(p->codes, p->scaling, p->unit)) { EACH_INT_FORM(ADD_INTS) }
#undef ADD_INTS_OF
#undef ADD_INTS
}

/* How many of the `rows` rows that are left of a block of `count` are multiplied at a time. 8 rows of bytes are read
   once; with scales, whose sums are in memory then, that is faster only if there are no more. */
INLINE long rows_at_once(const struct ints_product *p, long count, long rows) {
  long most = p->scaling == BY_ROW || (p->codes == BYTES && p->scaling == BY_GROUP && count <= 8) ? ROWS_OF_INTS : 4;
  return rows >= most ? most : rows >= 4 ? 4 : rows >= 2 ? 2 : 1;
}

/* What belongs to the groups of a part. */
static void describe_part(const struct ints_product *p, long pair, struct scales_of_part *numbers,
                          struct scales_of_part *factors, struct ints_part *s) {
  const struct gemm_ints_arguments *a = p->a;
  long first = s->from / a->group, place = (pair * p->groups + first) * PAIR_OUTPUTS;
  s->left = (first + 1) * a->group - s->from;
  s->zeros = a->zeros ? a->zeros + place : 0;
  if (p->scaling == BY_GROUP) {
    long count = (s->from + s->inputs - 1) / a->group + 1 - first;
    widen_scales(numbers, &p->of_groups, pair, p->groups, first, count);
    s->scales = numbers->scales[0];
    s->offsets = a->offsets ? numbers->offsets[0] : 0;
  } else if (p->scaling == BY_LEVELS) {
    long of_factor = (pair * (p->groups / a->groups_of_factor) + first / a->groups_of_factor) * PAIR_OUTPUTS;
    enum type type = (enum type)a->factor_type;
    long bytes = bytes_of(type);
    s->levels = (const char *)a->scales + place;
    s->minima = a->offsets ? (const char *)a->offsets + place : 0;
    s->factors = factors->scales[0];
    s->minimum_factors = factors->offsets[0];
    widen_numbers((const char *)a->factors + of_factor * bytes, 1, type, 0, factors->scales);
    if (a->offsets) widen_numbers((const char *)a->offset_factors + of_factor * bytes, 1, type, 0, factors->offsets);
  }
}

/* Makes bytes of the planes of a part. */
INLINE void open_planes_of(const char *low, const char *high, long steps, int type, char *to) {
  long bytes = bytes_of_step(type), high_bytes = PAIR_OUTPUTS * high_bits(type);
  for (long i = 0; i < steps; i++, low += bytes, high += high_bytes, to += CODES_STEP * PAIR_OUTPUTS) {
#pragma GCC unroll 8
    for (long at = 0; at < PAIR_OUTPUTS; at += LANES) {
      vu words[BYTES_OF_PLANES];
      open_codes(low, high, type, 0, at, words);
      for (int word = 0; word < BYTES_OF_PLANES; word++)
        memcpy(to + 4 * (word * PAIR_OUTPUTS + at), &words[word], sizeof words[word]);
    }
  }
}

static void open_planes(const char *low, const char *high, long steps, int type, char *to) {
  switch (type) {
    case PLANES2: open_planes_of(low, high, steps, PLANES2, to); break;
    case PLANES5: open_planes_of(low, high, steps, PLANES5, to); break;
    default: open_planes_of(low, high, steps, PLANES6, to);
  }
}

/* The sums of integers of a whole row, from which the zero point is subtracted, times the scale of the row. */
INLINE void scale_row(const struct ints_product *p, const char *row, float *sums) {
  float scale = *(const float *)(row + p->scales_at);
  const int32_t *x_sums = (const int32_t *)(row + p->sums_at);
  uint32_t start = (uint32_t)*x_sums;
  for (long n = 0; n < PAIR_OUTPUTS; n += LANES) {
    vi total = (vi)((vu)load_ints(sums, n) + start);
    store(sums, n, __builtin_convertvector(total, vf) * splat(scale), F32);
  }
}

#if defined(HAS_VNNI)
void sum_ints_at_once(const struct ints_product *p, char *rows, long count, long pair, float sums[][PAIR_OUTPUTS]) {
#else
void sum_ints(const struct ints_product *p, char *rows, long count, long pair, float sums[][PAIR_OUTPUTS]) {
#endif
  memset(sums, 0, count * sizeof *sums);
  const struct gemm_ints_arguments *a = p->a;
  struct scales_of_part numbers, factors;
  float totals[2][ROWS_OF_INTS][PAIR_OUTPUTS] __attribute__((aligned(64)));
  char opened[PART_INPUTS_OF_INTS * PAIR_OUTPUTS] __attribute__((aligned(64)));
  long of_input = p->planes                                  ? bytes_of_step(p->planes) / CODES_STEP
                  : p->codes == NIBBLES || p->codes == NAMED ? PAIR_OUTPUTS / 2
                                                             : PAIR_OUTPUTS;
  for (long i = 0; i < a->inputs; i += PART_INPUTS_OF_INTS) {
    struct ints_part s = {
        .p = p, .rows = rows, .from = i, .count = count, .totals = totals[0], .minimum_totals = totals[1]};
    s.inputs = a->inputs - i < PART_INPUTS_OF_INTS ? a->inputs - i : PART_INPUTS_OF_INTS;
    s.codes = (const char *)a->codes + (pair * a->inputs + i) * of_input;
    s.next = s.codes + s.inputs * of_input;
    s.next_bytes = 32 * of_input;
    if (p->planes) {
      long high = PAIR_OUTPUTS * high_bits(p->planes) / CODES_STEP;
      const char *high_codes = (const char *)a->high + (pair * a->inputs + i) * high;
      open_planes(s.codes, high_codes, s.inputs / CODES_STEP, p->planes, opened);
      s.codes = opened;
      s.next_high = high_codes + s.inputs * high;
      s.high_bytes = 32 * high;
    }
    describe_part(p, pair, &numbers, &factors, &s);
    for (long at_once; s.first < count; s.first = s.end) {
      at_once = rows_at_once(p, count, count - s.first);
      s.end = count - (count - s.first) % at_once;
      add_ints(&s, at_once, sums + s.first);
    }
  }
  if (p->scaling == BY_ROW)
    for (long r = 0; r < count; r++) scale_row(p, int_row(p, rows, r), sums[r]);
}
