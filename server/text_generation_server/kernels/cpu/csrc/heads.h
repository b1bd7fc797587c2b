/* How the numbers of keys and values become floats in registers. */
#pragma once

#include "vectors.h"

/* Heads of keys and values are loaded WIDENED numbers at a time. Below AVX-512, two bfloat16 numbers become floats by
   one operation each where they are, as the halves of a word; the numbers at even places then come before those at odd
   places: such types are split. */
#if LANES < 16 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define WIDENED (2 * LANES)
#define IS_SPLIT(type) ((type) == BF16)
#else
#define WIDENED LANES
#define IS_SPLIT(type) ((void)(type), 0)
#endif
#define WIDENED_VECTORS (WIDENED / LANES)

#if LANES == 8
/* e4m3, divided by F8_UNIT: 16 numbers share what is done before the conversion. */
INLINE void widen_f8(const uint8_t *p, vf x[2]) {
  __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
  halves = _mm256_and_si256(halves, _mm256_set1_epi16((short)0xbfff));
  x[0] = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  x[1] = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
}
#endif

/* F8: divided by unit_of(type), which is left to the scales. */
INLINE void widen_head(const void *p, long i, enum type type, vf x[WIDENED_VECTORS]) {
  if (IS_SPLIT(type)) {
    vu words;
    memcpy(&words, (const bf16 *)p + i, sizeof words);
    x[0] = vf_bits(words << 16);
    x[WIDENED_VECTORS - 1] = vf_bits(words & 0xffff0000);
    return;
  }
#if LANES == 8
  if (type == F8) {
    widen_f8((const uint8_t *)p + i, x);
    return;
  }
#endif
#pragma GCC unroll 2
  for (int v = 0; v < WIDENED_VECTORS; v++, i += LANES)
    x[v] = type == F8 ? load_f8_units((const uint8_t *)p + i) : load(p, i, type);
}

INLINE float unit_of(enum type type) { return type == F8 ? F8_UNIT : 1.0f; }

/* WIDENED numbers of a query or key from number i on, in the order of widen_head for keys of type `kv`. */
INLINE void load_in_order(const void *p, long i, enum type type, enum type kv, vf x[WIDENED_VECTORS]) {
  for (int v = 0; v < WIDENED_VECTORS; v++) x[v] = load(p, i + v * LANES, type);
#if LANES == 8
  const vi even = {0, 2, 4, 6, 8, 10, 12, 14}, odd = {1, 3, 5, 7, 9, 11, 13, 15};
#elif LANES == 4
  const vi even = {0, 2, 4, 6}, odd = {1, 3, 5, 7};
#endif
#if WIDENED > LANES
  vf low = x[0], high = x[1];
  if (IS_SPLIT(kv)) x[0] = __builtin_shuffle(low, high, even), x[1] = __builtin_shuffle(low, high, odd);
#endif
  (void)kv;
}

/* Brings numbers of a split type into their own order. */
INLINE void join_numbers(vf x[WIDENED_VECTORS]) {
#if LANES == 8
  const vi low = {0, 8, 1, 9, 2, 10, 3, 11}, high = {4, 12, 5, 13, 6, 14, 7, 15};
#elif LANES == 4
  const vi low = {0, 4, 1, 5}, high = {2, 6, 3, 7};
#endif
#if WIDENED > LANES
  vf even = x[0], odd = x[1];
  x[0] = __builtin_shuffle(even, odd, low), x[1] = __builtin_shuffle(even, odd, high);
#endif
  (void)x;
}

/* The place of number n of a head in this order. */
INLINE long place_of(long n, enum type type) {
  return IS_SPLIT(type) ? n / WIDENED * WIDENED + n % 2 * LANES + n % WIDENED / 2 : n;
}
