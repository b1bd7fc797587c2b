/* Products whose lanes are queries: each lane of a vector belongs to a query, and what the queries share is repeated in
   all lanes. So keys and values need no transposing, and no sum runs over the lanes.

   A word is what one lane holds: a float32, a pair of 16-bit integers or, where a processor has a dot-product
   instruction for bfloat16, a pair of bfloat16 numbers. The functions get a constant, `pairs`, that says which. */
#pragma once

#include "int_pairs.h"

#define QUERY_LANES (2 * LANES) /* queries of a block: two vectors */
#if defined(__AVX512F__)
#define COLUMNS_AT_ONCE 8 /* keys, or numbers of values, whose sums for a block of queries fit the registers */
#else
#define COLUMNS_AT_ONCE 4
#endif

enum pairs { NO_PAIRS = 0, BF16_PAIRS = 1, INT_PAIRS = 2 };

/* sum + a * b, where b is one word; pairs: sum + a[0] * b[0] + a[1] * b[1]. Floats are multiplied as attention.c does
   it, so that the compiler fuses the same operations. */
INLINE vf add_product(vf sum, vf a, const float *b, int pairs) {
#if defined(__AVX512BF16__)
  if (pairs == BF16_PAIRS) {
    int word;
    memcpy(&word, b, sizeof word);
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)_mm512_set1_epi32(word));
  }
#endif
  if (pairs == INT_PAIRS) return (vf)((vi)sum + multiply_halves((vi)a, splat_word(b)));
  return sum + a * *b;
}

/* The same with an operation that is fused on every processor that can: the bits of no product depend on its loop. */
INLINE vf add_word(vf sum, vf a, const float *b, int pairs) {
  return pairs ? add_product(sum, a, b, pairs) : multiply_add(splat(*b), a, sum);
}

/* sums[j][i] += the sum over n < count of a[n * a_step + lane] * b[n * b_step + j * b_columns], for the two vectors i
   of a block and COLUMNS_AT_ONCE columns j. */
INLINE void add_products(vf sums[COLUMNS_AT_ONCE][2], const float *a, long a_step, const float *b, long b_step,
                         long b_columns, long count, int pairs) {
  for (long n = 0; n < count; n++, a += a_step, b += b_step) {
    vf low = load(a, 0, F32), high = load(a, LANES, F32);
#pragma GCC unroll 8
    for (int j = 0; j < COLUMNS_AT_ONCE; j++) {
      sums[j][0] = add_product(sums[j][0], low, b + j * b_columns, pairs);
      sums[j][1] = add_product(sums[j][1], high, b + j * b_columns, pairs);
    }
  }
}

/* The number whose bits are those of `number`, of which there are log2(LANES), in reverse order. */
INLINE int reversed_bits(int number) {
  int reversed = 0;
  for (int bit = 1; bit < LANES; bit *= 2) reversed = 2 * reversed + !!(number & bit);
  return reversed;
}

/* sums = the products of a block's queries q [words, QUERY_LANES] with COLUMNS_AT_ONCE keys, which lie `stride`
   words apart.

   Floats are added in the order of attention.c: every LANES-th number in turn, and then these LANES sums as lane_sum
   adds lanes, first those that are LANES / 2 apart. Sums in the order of their numbers' reversed bits are added in such
   a way if each is added to its neighbour as soon as both are complete. */
INLINE void multiply_keys(vf sums[COLUMNS_AT_ONCE][2], const float *q, const float *keys, long stride, long words,
                          int pairs) {
  if (pairs) {
    memset(sums, 0, COLUMNS_AT_ONCE * sizeof sums[0]);
    add_products(sums, q, QUERY_LANES, keys, 1, stride, words, pairs);
    return;
  }
  vf complete[5][COLUMNS_AT_ONCE][2]; /* [n]: the sum of 2^n sums */
  for (int n = 0; n < LANES; n++) {
    int first = reversed_bits(n), level = 0;
    vf part[COLUMNS_AT_ONCE][2] = {};
    add_products(part, q + first * QUERY_LANES, LANES * QUERY_LANES, keys + first, LANES, stride, words / LANES, 0);
    for (; n >> level & 1; level++)
#pragma GCC unroll 8
      for (int j = 0; j < COLUMNS_AT_ONCE; j++) {
        part[j][0] = complete[level][j][0] + part[j][0];
        part[j][1] = complete[level][j][1] + part[j][1];
      }
#pragma GCC unroll 8
    for (int j = 0; j < COLUMNS_AT_ONCE; j++) {
      complete[level][j][0] = part[j][0];
      complete[level][j][1] = part[j][1];
      if (n == LANES - 1) {
        sums[j][0] = part[j][0];
        sums[j][1] = part[j][1];
      }
    }
  }
}

/* Words of two vectors, as bfloat16: lane i has (low[i], high[i]). */
INLINE vf paired_words(vf low, vf high) {
#if defined(__AVX512BF16__)
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (vf)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
  (void)high;
  return low;
#endif
}

/* x[i][j] becomes x[j][i]. */
INLINE void transpose(vf x[LANES]) {
#if defined(__AVX512F__)
  /* Rounds over squares of 1, 2, 4 and 8 lanes: of each four squares that touch, the upper right and the lower left
     one are exchanged. */
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#pragma GCC unroll 4
  for (int side = 1; side < LANES; side *= 2) {
    __mmask16 right = _mm512_test_epi32_mask(lanes, _mm512_set1_epi32(side));
    __m512i upper = _mm512_mask_add_epi32(lanes, right, lanes, _mm512_set1_epi32(LANES - side));
    __m512i lower =
        _mm512_mask_add_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(side)), right, lanes, _mm512_set1_epi32(LANES));
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
      if (i & side) continue;
      __m512 a = (__m512)x[i], b = (__m512)x[i + side];
      x[i] = (vf)_mm512_permutex2var_ps(a, upper, b);
      x[i + side] = (vf)_mm512_permutex2var_ps(a, lower, b);
    }
  }
#elif LANES == 4
  const vi even = {0, 4, 2, 6}, odd = {1, 5, 3, 7}, left = {0, 1, 4, 5}, right = {2, 3, 6, 7};
  vf a = __builtin_shuffle(x[0], x[1], even), b = __builtin_shuffle(x[0], x[1], odd);
  vf c = __builtin_shuffle(x[2], x[3], even), d = __builtin_shuffle(x[2], x[3], odd);
  x[0] = __builtin_shuffle(a, c, left), x[1] = __builtin_shuffle(b, d, left);
  x[2] = __builtin_shuffle(a, c, right), x[3] = __builtin_shuffle(b, d, right);
#else
  float from[LANES][LANES], to[LANES][LANES];
  memcpy(from, x, sizeof from);
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < LANES; j++) to[j][i] = from[i][j];
  memcpy(x, to, sizeof to);
#endif
}

INLINE int any_lane(vi mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#elif defined(__SSE2__)
  return _mm_movemask_ps((__m128)mask) != 0;
#else
  int any = 0;
  for (int i = 0; i < LANES; i++) any |= mask[i];
  return any;
#endif
}
