/* Codes of weights as float32 in registers, or as pairs of bfloat16: README.md draws how they lie in memory.

   Integers of 4 bits and fewer than 8 are not moved to the lowest bits of their lane. A lane is masked, so that it
   holds a code times a power of 2, and becomes float32, which is exact. x is divided by the same power of 2 beforehand,
   which is exact too: `shift_of_input`. */
#pragma once

#include "product.h"

#define WORDS_OF_STEP (CODES_STEP / 2)        /* pairs of inputs in a step */
#define BYTES_OF_PLANES 2                     /* words of a lane that hold the bytes of a step */
#define MOST_CODES 64                         /* most codes of a type that is widened into pairs by a table */
#define WIDENED_AT_ONCE (LANES == 16 ? 1 : 2) /* vectors that are widened before they are multiplied */

/* TABLE4 whose numbers are integers of 8 bits without a sign, times one power of 2, where bytes can be looked up. */
#define BYTES4 (TABLE8 + 16)
#if defined(__AVX2__) && !defined(__AVX512F__)
#define LOOKS_UP_BYTES 1
#else
#define LOOKS_UP_BYTES 0
#endif

INLINE int low_bits(int type) { return type == PLANES2 ? 2 : type == I4 || type == TABLE4 || type >= PLANES5 ? 4 : 0; }

INLINE int high_bits(int type) { return type == PLANES5 ? 1 : type == PLANES6 ? 2 : 0; }

/* Whether a step's codes become bytes first: inputs 0, 4, 1, 5 in one word of a lane, 2, 6, 3, 7 in another. */
INLINE int has_bytes(int type) { return type >= PLANES2; }

/* The zero point of codes without zero points and offsets. */
INLINE float zero_of_type(int type) {
  return type == I4 ? 8 : has_bytes(type) && type != BYTES4 ? (float)(1 << (low_bits(type) + high_bits(type) - 1)) : 0;
}

/* Bytes of a step of a pair of panels. */
INLINE long bytes_of_step(int type) {
  if (low_bits(type)) return CODES_STEP * PAIR_OUTPUTS * low_bits(type) / 8;
  return CODES_STEP * PAIR_OUTPUTS * bytes_of((enum type)type);
}

/* The lowest bit of a code of this input in its lane, if float32 is made of the lane as it is. Codes at the upper end
   of a lane are moved, because they would look like a sign. */
INLINE int shift_of_input(int type, int input) {
  int bits = has_bytes(type) ? 8 : 4;
  int place = has_bytes(type) ? input / 4 + 2 * (input % 2) : input / 2 + 4 * (input % 2);
  return type != I4 && !has_bytes(type) ? 0 : bits * place + bits == 32 ? 0 : bits * place;
}

INLINE vf number_in_place(vu word, int bits, int place) {
  int from = bits * place;
  vu found = from + bits == 32 ? word >> from : word & ((1u << bits) - 1) << from;
  return __builtin_convertvector((vi)found, vf);
}

INLINE vu load_words(const char *p) {
  vu words;
  memcpy(&words, p, sizeof words);
  return words;
}

INLINE vu load_halves(const char *p) {
#if defined(__AVX512F__) /* the compiler would convert 8 at a time, and join them */
  return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__) /* the compiler would convert 4 at a time */
  return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
#else
  vu16 halves;
  memcpy(&halves, p, sizeof halves);
  return __builtin_convertvector(halves, vu);
#endif
}

/* Brings the codes of a step into words, for LANES outputs from the pair's output `at` on. Shifted copies of a plane
   beside each other have its bits at the distance of bytes; what overlaps is masked. */
INLINE void open_codes(const char *step, const char *high, int type, const float *table, long at,
                       vu words[BYTES_OF_PLANES]) {
  (void)table;
  if (!low_bits(type)) return;
  if (type == PLANES2) {
    vu twos = load_halves(step + 2 * at);
    twos |= twos << 14;
    words[0] = twos & 0x03030303;
    words[1] = twos >> 4 & 0x03030303;
    return;
  }
  vu codes = load_words(step + 4 * at);
  words[0] = codes;
  if (!has_bytes(type)) return;
  words[0] = codes & 0x0f0f0f0f;
  words[1] = codes >> 4 & 0x0f0f0f0f;
  if (type == PLANES5) {
    vu ones = (vu)load_u8(high + at);
    ones |= ones << 4;
    ones |= ones << 15;
    words[0] |= ones << 4 & 0x10101010;
    words[1] |= ones << 2 & 0x10101010;
  } else if (type == PLANES6) {
    vu twos = load_halves(high + 2 * at);
    twos |= twos << 14;
    words[0] |= twos << 4 & 0x30303030;
    words[1] |= twos & 0x30303030;
  }
#if LOOKS_UP_BYTES
  if (type == BYTES4) {
    __m256i bytes = _mm256_loadu_si256((const __m256i *)table);
    for (int i = 0; i < BYTES_OF_PLANES; i++) words[i] = (vu)_mm256_shuffle_epi8(bytes, (__m256i)words[i]);
  }
#endif
}

/* The numbers of the lowest 4 bits of each lane. */
INLINE vf numbers_of(vu codes, const float *table) {
#if defined(__AVX512F__)
  return (vf)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
  __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)codes);
  __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)codes);
  return (vf)_mm256_blendv_ps(low, high, (__m256)(codes << 28));
#else
  vf numbers;
  for (int i = 0; i < LANES; i++) numbers[i] = table[codes[i] & 15];
  return numbers;
#endif
}

/* Word `word` of a step, for LANES outputs from the pair's output `at` on: inputs 2 * word and 2 * word + 1. `codes`:
   of open_codes. */
INLINE void widen_codes(const char *step, const vu codes[BYTES_OF_PLANES], int type, const float *table, int word,
                        long at, vf *even, vf *odd) {
  if (has_bytes(type)) {
    *even = number_in_place(codes[word % 2], 8, word / 2);
    *odd = number_in_place(codes[word % 2], 8, 2 + word / 2);
  } else if (type == I4) {
    *even = number_in_place(codes[0], 4, word);
    *odd = number_in_place(codes[0], 4, 4 + word);
  } else if (type == TABLE4) {
    *even = numbers_of(codes[0] >> 4 * word, table);
    *odd = numbers_of(codes[0] >> (16 + 4 * word), table);
  } else if (type == F8) {
    *even = load_f8_units((const uint8_t *)step + 2 * word * PAIR_OUTPUTS + at);
    *odd = load_f8_units((const uint8_t *)step + (2 * word + 1) * PAIR_OUTPUTS + at);
  } else {
    *even = load(step, 2 * word * PAIR_OUTPUTS + at, (enum type)type);
    *odd = load(step, (2 * word + 1) * PAIR_OUTPUTS + at, (enum type)type);
  }
}

/* The same for WIDENED_AT_ONCE vectors. */
INLINE void widen_vectors(const char *step, const vu codes[][BYTES_OF_PLANES], int type, const float *table, int word,
                          long at, vf *even, vf *odd) {
#if LOOKS_UP_BYTES && defined(__F16C__)
  if (type == F8) {
    for (int input = 0; input < 2; input++) {
      const char *from = step + (2 * word + input) * PAIR_OUTPUTS + at;
      __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from)), 7);
      half = _mm256_and_si256(half, _mm256_set1_epi16((short)0xbfff)); /* as load_f8_units, 16 at a time */
      vf *to = input ? odd : even;
      to[0] = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(half));
      to[1] = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
    }
    return;
  }
#endif
#pragma GCC unroll 2
  for (int i = 0; i < WIDENED_AT_ONCE; i++)
    widen_codes(step, codes[i], type, table, word, at + i * LANES, &even[i], &odd[i]);
}

#if defined(__AVX512BF16__)
/* The same as words of two bfloat16 numbers, which hold the numbers exactly. Each half of a word of codes has a number
   of the table by its lowest 5 bits, or 6 of PLANES6. 4 bits have theirs twice, so that the next code does not matter.
 */
INLINE __m512bh widen_pairs(const char *step, const vu codes[BYTES_OF_PLANES], int type, const float *table, int word,
                            long at) {
  if (low_bits(type)) {
    vu found = has_bytes(type) ? codes[word % 2] >> 8 * (word / 2) : codes[0] >> 4 * word;
    __m512i first = _mm512_loadu_si512(table);
    if (type != PLANES6) return (__m512bh)_mm512_permutexvar_epi16((__m512i)found, first);
    return (__m512bh)_mm512_permutex2var_epi16(first, (__m512i)found, _mm512_loadu_si512(table + 16));
  }
  vf even, odd;
  widen_codes(step, codes, type, table, word, at, &even, &odd);
  return (__m512bh)(vu_bits(even) >> 16 | vu_bits(odd));
}
#endif

#if LOOKS_UP_BYTES
/* Numbers of TABLE4 as bytes: table[i] = unit * (bytes[i] - zero). False, and nothing is changed, if they are not. */
INLINE int as_bytes(const float *table, uint8_t bytes[16], float *unit, float *zero) {
  for (float of_one = 0x1p-24f; of_one <= 0x1p24f; of_one *= 2) {
    float least = 0, most = 0;
    for (int i = 0; i < 16; i++) {
      float number = table[i] / of_one;
      if (floorf(number) != number) return 0;
      least = number < least ? number : least;
      most = number > most ? number : most;
    }
    if (most - least > 255) continue;
    for (int i = 0; i < 16; i++) bytes[i] = (uint8_t)(table[i] / of_one - least);
    *unit = of_one;
    *zero = -least;
    return 1;
  }
  return 0;
}
#endif
