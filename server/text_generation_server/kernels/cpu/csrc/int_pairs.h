/* Attention over int8 keys and values in integers, for queries in bfloat16, where no instruction multiplies bfloat16.

   Queries, and the weights of a tile, become integers of 16 bits: both are divided by what makes their largest number
   MAX_INT16, which is more precise than bfloat16. One instruction multiplies two neighbours of 16 bits by two others,
   and adds the products. Sums of integers are exact: neither attention.c nor runs.c has to keep an order in them. */
#pragma once

#include "vectors.h"

#define MAX_INT16 32767.0f
#define LEAST_NUMBER 1e-26f /* largest numbers that are smaller count as this, which is as good as 0 */

#if defined(__AVX512BF16__)
#define HAS_INT_ATTENTION 0
#else
#define HAS_INT_ATTENTION 1
#endif

/* Whether attention goes this way: both attention.c and runs.c ask, whose results must be the same. */
INLINE int is_in_integers(enum type q, enum type kv, long size) {
  return HAS_INT_ATTENTION && q == BF16 && kv == I8 && size % (2 * LANES) == 0;
}

/* 2 * LANES integers of 8 bits that follow each other, as pairs. */
INLINE vi load_int_pairs(const void *p) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepi8_epi16(_mm256_loadu_si256(p));
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepi8_epi16(_mm_loadu_si128(p));
#elif defined(__SSE2__)
  __m128i bytes = _mm_loadl_epi64(p);
  return (vi)_mm_srai_epi16(_mm_unpacklo_epi8(bytes, bytes), 8);
#else
  int16_t numbers[2 * LANES];
  for (int i = 0; i < 2 * LANES; i++) numbers[i] = ((const int8_t *)p)[i];
  vi pairs;
  memcpy(&pairs, numbers, sizeof pairs);
  return pairs;
#endif
}

/* Pairs of the integers at a and b: 2 * LANES from each. */
INLINE void interleave(const void *a, const void *b, vi pairs[2]) {
#if defined(__AVX512F__)
  __m256i x = _mm256_permute4x64_epi64(_mm256_loadu_si256(a), 0xd8);
  __m256i y = _mm256_permute4x64_epi64(_mm256_loadu_si256(b), 0xd8);
  pairs[0] = (vi)_mm512_cvtepi8_epi16(_mm256_unpacklo_epi8(x, y));
  pairs[1] = (vi)_mm512_cvtepi8_epi16(_mm256_unpackhi_epi8(x, y));
#elif defined(__AVX2__)
  __m128i x = _mm_loadu_si128(a), y = _mm_loadu_si128(b);
  pairs[0] = (vi)_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(x, y));
  pairs[1] = (vi)_mm256_cvtepi8_epi16(_mm_unpackhi_epi8(x, y));
#elif defined(__SSE2__)
  __m128i bytes = _mm_unpacklo_epi8(_mm_loadl_epi64(a), _mm_loadl_epi64(b));
  pairs[0] = (vi)_mm_srai_epi16(_mm_unpacklo_epi8(bytes, bytes), 8);
  pairs[1] = (vi)_mm_srai_epi16(_mm_unpackhi_epi8(bytes, bytes), 8);
#else
  for (int i = 0; i < 2; i++)
    pairs[i] = (load_signed((const char *)a + i * LANES) & 0xffff) | load_signed((const char *)b + i * LANES) << 16;
#endif
}

/* The numbers x and y of each lane, of a magnitude up to MAX_INT16, rounded to the nearest integers. */
INLINE vi narrow_pair(vf x, vf y, vf factor) {
  vu low = vu_bits(multiply_add(x, factor, splat(ROUNDING))), high = vu_bits(multiply_add(y, factor, splat(ROUNDING)));
  return (vi)((low & 0xffff) | high << 16);
}

/* The larger magnitudes; NaN is larger than all others. `most` has no signs. */
INLINE vi larger_magnitude(vi most, vf x) {
  vi magnitude = (vi)(vu_bits(x) & 0x7fffffff);
#if defined(__AVX512F__)
  return (vi)_mm512_max_epi32((__m512i)most, (__m512i)magnitude);
#elif defined(__AVX2__)
  return (vi)_mm256_max_epi32((__m256i)most, (__m256i)magnitude);
#else
  vi is_larger = magnitude > most;
  return (is_larger & magnitude) | (~is_larger & most);
#endif
}

/* What the largest of some numbers counts as, whose bits are `most`. */
INLINE vf count_as_number(vi most) {
  vf largest = vf_bits((vu)most);
  return blend(largest < LEAST_NUMBER, splat(LEAST_NUMBER), largest);
}

/* out + sums, where 1 means `unit` in the sums. */
INLINE vf add_integers(vf out, vi sums, vf unit) { return multiply_add(__builtin_convertvector(sums, vf), unit, out); }

/* A query as integers. Returns what 1 means in them; NaN if a number is not finite. */
INLINE float narrow_query(const void *q, enum type type, long size, int16_t *numbers) {
  vi most = {};
  for (long d = 0; d < size; d += LANES) most = larger_magnitude(most, load(q, d, type));
  vf largest = count_as_number(splat_int(lane_most(most))), factor = MAX_INT16 / largest;
  for (long d = 0; d < size; d += LANES) {
    vf rounded = multiply_add(load(q, d, type), factor, splat(ROUNDING));
    vu16 halves = __builtin_convertvector(vu_bits(rounded), vu16);
    memcpy(numbers + d, &halves, sizeof halves);
  }
  return largest[0] * (1 / MAX_INT16) + largest[0] * 0.0f;
}
