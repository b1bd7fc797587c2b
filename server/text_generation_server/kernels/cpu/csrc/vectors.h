/* Vectors of LANES floats, and how the number formats in memory are loaded and stored.

   The types are those of GCC's vector extension, https://gcc.gnu.org/onlinedocs/gcc/Vector-Extensions.html: + - * / and
   comparisons work lane by lane on any processor. Every file is compiled once for each target of ../build.py. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "arguments.h"

/* Wider vectors than the processor has would lie in memory, and each operation would load and store them. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define SUM_VECTORS (LANES == 16 ? 24 : 12) /* vectors of sums that fit the registers, beside what is multiplied */
#define INLINE static inline __attribute__((always_inline))

/* Vectors of LANES floats, and of LANES signed and unsigned integers of 32, 16 and 8 bits. */
typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef int16_t vi16 __attribute__((vector_size(2 * LANES)));
typedef uint16_t vu16 __attribute__((vector_size(2 * LANES)));
typedef int8_t vi8 __attribute__((vector_size(LANES)));
typedef uint8_t vu8 __attribute__((vector_size(LANES)));

/* The compiler may not move additions to this vector behind others, until what is added fills the registers. */
#if defined(__AVX512F__)
#define KEEP_IN_REGISTER(VECTOR) __asm__("" : "+v"(VECTOR))
#elif defined(__SSE2__)
#define KEEP_IN_REGISTER(VECTOR) __asm__("" : "+x"(VECTOR))
#else
#define KEEP_IN_REGISTER(VECTOR)
#endif

INLINE vf splat(float x) { return x - (vf){}; }

INLINE vi splat_int(int32_t n) { return n - (vi){}; }

INLINE vi splat_word(const void *from) {
  int32_t word;
  memcpy(&word, from, sizeof word);
  return splat_int(word);
}

/* Reinterprets the 32 bits of each lane as another type. */
INLINE vf vf_bits(vu u) {
  vf f;
  memcpy(&f, &u, sizeof f);
  return f;
}
INLINE vu vu_bits(vf f) {
  vu u;
  memcpy(&u, &f, sizeof u);
  return u;
}

/* a where the mask is -1, b where it is 0. */
INLINE vf blend(vi mask, vf a, vf b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (vf)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)mask);
#else
  return vf_bits(((vu)mask & vu_bits(a)) | (~(vu)mask & vu_bits(b)));
#endif
}

/* The larger of a and b; b where a is NaN. */
INLINE vf larger(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
  return blend(a > b, a, b);
#endif
}

/* The smaller of a and b; b where a is NaN. */
INLINE vf smaller(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (vf)_mm_min_ps((__m128)a, (__m128)b);
#else
  return blend(a < b, a, b);
#endif
}

/* a * b + sum, always fused on processors that have this instruction, and never on others. Otherwise the compiler
   might fuse in one copy of a loop and not in another, and the bits would depend on the number of rows. */
INLINE vf multiply_add(vf a, vf b, vf sum) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX2__) && defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__SSE2__) && !defined(__FMA__)
  return a * b + sum;
#else
  vf product = a * b;
  __asm__("" : "+m"(product)); /* the compiler must not fuse across this line */
  return product + sum;
#endif
}

INLINE vf load_bf16(const bf16 *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#elif defined(__SSE2__)
  return (vf)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i *)p));
#else
  vu16 h;
  memcpy(&h, p, sizeof h);
  return vf_bits(__builtin_convertvector(h, vu) << 16);
#endif
}

/* Rounds to the nearest bfloat16, ties to even. NaN stays NaN. */
INLINE void store_any_bf16(bf16 *p, vf x) {
  vu u = vu_bits(x);
  vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  rounded = vu_bits(blend(x == x, vf_bits(rounded), vf_bits((vu){} + 0x7fc0)));
#if defined(__SSE2__) && LANES == 4
  /* Packing saturates signed numbers, and changes none whose upper half repeats the sign. */
  _mm_storel_epi64((__m128i *)p, _mm_packs_epi32((__m128i)((vi)rounded << 16 >> 16), _mm_setzero_si128()));
#else
  vu16 h = __builtin_convertvector(rounded, vu16);
  memcpy(p, &h, sizeof h);
#endif
}

/* The same, but numbers below the least normal one may become 0: the instruction takes them as 0. */
INLINE void store_bf16(bf16 *p, vf x) {
#if defined(__AVX512BF16__)
  __m256bh h = _mm512_cvtneps_pbh((__m512)x);
  memcpy(p, &h, sizeof h);
#else
  store_any_bf16(p, x);
#endif
}

/* LANES unsigned numbers of 8 bits. */
INLINE vi load_u8(const void *p) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#elif defined(__SSE2__)
  __m128i none = _mm_setzero_si128();
  return (vi)_mm_unpacklo_epi16(_mm_unpacklo_epi8(_mm_loadu_si32(p), none), none);
#else
  vu8 b;
  memcpy(&b, p, sizeof b);
  return __builtin_convertvector(b, vi);
#endif
}

/* LANES signed numbers of 8 bits. */
INLINE vi load_signed(const void *from) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
  return load_u8(from) << 24 >> 24;
#endif
}

/* Magnitudes below 0x400 are multiples of 2^-24, infinity and NaN have the largest exponent. Where no instruction
   converts the numbers, small ones are converted as integers, because moving their bits into a float would make a
   denormal number, which is slow to compute with. */
INLINE vf load_f16(const uint16_t *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__) && defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
  vu16 h;
  memcpy(&h, p, sizeof h);
  vu u = __builtin_convertvector(h, vu), magnitude = u & 0x7fff;
  vu not_finite = (vu)(magnitude >= 0x7c00) & 112 << 23;
  vf small = __builtin_convertvector((vi)magnitude, vf) * 0x1p-24f;
  vf large = vf_bits((magnitude << 13) + (112 << 23) + not_finite);
  return vf_bits(vu_bits(blend(magnitude < 0x400, small, large)) | (u & 0x8000) << 16);
#endif
}

/* Numbers of e4m3 divided by F8_UNIT. The code of NaN, 0x7f, becomes 480. Bits of e4m3, with zeros behind them, are a
   float16 that is smaller by 2^8. Where no instruction converts it, magnitudes below 8, multiples of 2^-9, are
   converted as integers as in load_f16. */
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__F16C__))
#define F8_UNIT 0x1p8f
#else
#define F8_UNIT 1.0f
#endif
INLINE vf load_f8_units(const uint8_t *p) {
#if defined(__AVX512F__)
  __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
  return (vf)_mm512_cvtph_ps(_mm256_and_si256(half, _mm256_set1_epi16((short)0xbfff)));
#elif defined(__AVX2__) && defined(__F16C__)
  __m128i half = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p)), 7);
  return (vf)_mm256_cvtph_ps(_mm_and_si128(half, _mm_set1_epi16((short)0xbfff)));
#else
  vu u = (vu)load_u8(p);
  vu magnitude = u & 0x7f;
  vf small = __builtin_convertvector((vi)magnitude, vf) * 0x1p-9f, large = vf_bits((magnitude << 20) + (120 << 23));
  return vf_bits(vu_bits(blend(magnitude < 8, small, large)) | (u & 0x80) << 24);
#endif
}

INLINE vf load_f8(const uint8_t *p) { return load_f8_units(p) * F8_UNIT; }

/* Stores x as e4m3, for |x| up to 448, the largest number of this type. Rounds to the nearest, ties to even. */
INLINE void store_f8(uint8_t *p, vf x) {
  vu u = vu_bits(x * 0x1p-120f);
  vu magnitude = u & 0x7fffffff;
  vu rounded = (magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20;
  vu8 b = __builtin_convertvector(rounded | (u >> 24 & 0x80), vu8);
  memcpy(p, &b, sizeof b);
}

INLINE vf load_i8(const int8_t *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#elif defined(__SSE2__)
  __m128i b = _mm_loadu_si32(p), twice = _mm_unpacklo_epi8(b, b);
  return __builtin_convertvector((vi)_mm_unpacklo_epi16(twice, twice) >> 24, vf);
#else
  vi8 b;
  memcpy(&b, p, sizeof b);
  return __builtin_convertvector(__builtin_convertvector(b, vi), vf);
#endif
}

/* Powers of 2: 127 is 2^0, 255 is not a number. */
INLINE vf load_e8m0(const uint8_t *p) {
  vi code = load_u8(p);
  vu bits = (vu)code << 23 | ((vu)(code == 0) & 0x00400000) | ((vu)(code == 255) & 0x00400000);
  return vf_bits(bits);
}

/* LANES signed numbers of 16 bits. */
INLINE vi load_i16(const void *p) {
#if defined(__AVX512F__) /* the compiler would convert 8 at a time, and join them */
  return (vi)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__SSE2__) && LANES == 4
  __m128i h = _mm_loadl_epi64(p);
  return (vi)_mm_unpacklo_epi16(h, h) >> 16;
#else
  vi16 h;
  memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, vi);
#endif
}

/* Words of two 16-bit numbers: the sum of both products of each word. */
INLINE vi multiply_halves(vi a, vi b) {
#if defined(__AVX512BW__)
  return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

/* Stores x as int8, for |x| up to 127. */
INLINE void store_i8(int8_t *p, vf x) {
  /* Adding and subtracting 1.5 * 2^23 rounds to the nearest whole number, ties to even. */
  vi8 b = __builtin_convertvector(__builtin_convertvector((x + 0x1.8p23f) - 0x1.8p23f, vi), vi8);
  memcpy(p, &b, sizeof b);
}

/* Loads LANES numbers from memory `p`, beginning with number i. */
INLINE vf load(const void *p, long i, enum type type) {
  vf x;
  switch (type) {
    case BF16: return load_bf16((const bf16 *)p + i);
    case I8: return load_i8((const int8_t *)p + i);
    case F8: return load_f8((const uint8_t *)p + i);
    case F16: return load_f16((const uint16_t *)p + i);
    case U8: return __builtin_convertvector(load_u8((const uint8_t *)p + i), vf);
    case E8M0: return load_e8m0((const uint8_t *)p + i);
    default: memcpy(&x, (const float *)p + i, sizeof x); return x;
  }
}

INLINE void store(void *p, long i, vf x, enum type type) {
  switch (type) {
    case BF16: store_bf16((bf16 *)p + i, x); break;
    case I8: store_i8((int8_t *)p + i, x); break;
    case F8: store_f8((uint8_t *)p + i, x); break;
    default: memcpy((float *)p + i, &x, sizeof x);
  }
}

INLINE long bytes_of(enum type type) { return type == F32 ? 4 : type == BF16 || type == F16 ? 2 : 1; }

/* The sum of all lanes, always in the same order, so that it has the same bits in every kernel. */
INLINE float lane_sum(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#elif defined(__AVX2__)
  __m128 a = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
#else
  float a[LANES];
  memcpy(a, &x, sizeof a);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) a[i] += a[i + width];
  return a[0];
#endif
}

/* a + b, of floats or of integers. */
INLINE vf add_lanes(vf a, vf b, int integers) { return integers ? (vf)((vi)a + (vi)b) : a + b; }

/* Lane i of the result is the sum of the lanes of x[i], which are floats or integers. */
INLINE vf lane_sums_of(const vf x[LANES], int integers) {
#if defined(__AVX512F__)
#define ADDED(A, B) ((__m512)add_lanes((vf)(A), (vf)(B), integers))
  /* Each round adds halves of the remaining lanes: 16 vectors of 16 lanes become 8 vectors that hold 8 lanes of x[i]
     and 8 of x[i + 8], then 4 with 4 lanes of four vectors, 2 with 2 lanes of eight, 1 with one lane of each. The
     shuffles put the halves side by side (0x44 and 0xee: lower and upper half; 0x88 and 0xdd: even and odd quarters),
     and the last permutation brings the sums into the order of x. README.md draws one round. */
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; i++)
    a[i] = ADDED(_mm512_shuffle_f32x4((__m512)x[i], (__m512)x[i + 8], 0x44),
                 _mm512_shuffle_f32x4((__m512)x[i], (__m512)x[i + 8], 0xee));
  for (int i = 0; i < 4; i++)
    b[i] = ADDED(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
  for (int i = 0; i < 2; i++)
    c[i] = ADDED(_mm512_shuffle_ps(b[i], b[i + 2], 0x44), _mm512_shuffle_ps(b[i], b[i + 2], 0xee));
  __m512 sums = ADDED(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xdd));
  const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return (vf)_mm512_permutexvar_ps(order, sums);
#elif LANES == 4
  const vi lower = {0, 4, 1, 5}, upper = {2, 6, 3, 7}, left = {0, 1, 4, 5}, right = {2, 3, 6, 7};
  vf a = add_lanes(__builtin_shuffle(x[0], x[1], lower), __builtin_shuffle(x[0], x[1], upper), integers);
  vf b = add_lanes(__builtin_shuffle(x[2], x[3], lower), __builtin_shuffle(x[2], x[3], upper), integers);
  return add_lanes(__builtin_shuffle(a, b, left), __builtin_shuffle(a, b, right), integers);
#else
#define ADDED(A, B) ((__m256)add_lanes((vf)(A), (vf)(B), integers))
  /* The three last rounds of the same. */
  __m256 a[4], b[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    a[i] = ADDED(_mm256_permute2f128_ps((__m256)x[i], (__m256)x[i + 4], 0x20),
                 _mm256_permute2f128_ps((__m256)x[i], (__m256)x[i + 4], 0x31));
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    b[i] = ADDED(_mm256_shuffle_ps(a[i], a[i + 2], 0x44), _mm256_shuffle_ps(a[i], a[i + 2], 0xee));
  __m256 sums = ADDED(_mm256_shuffle_ps(b[0], b[1], 0x88), _mm256_shuffle_ps(b[0], b[1], 0xdd));
  return (vf)_mm256_permute_ps(sums, 0xd8);
#endif
}

INLINE vf lane_sums(const vf x[LANES]) { return lane_sums_of(x, 0); }

/* The largest of all lanes of integers. */
INLINE int32_t lane_most(vi x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)x);
#elif defined(__AVX2__)
  __m128i most = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
#else
  int32_t most = x[0];
  for (int n = 1; n < LANES; n++) most = x[n] > most ? x[n] : most;
  return most;
#endif
}

/* The largest of all lanes. */
INLINE float lane_max(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#elif defined(__AVX2__)
  __m128 a = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  a = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
#else
  float a[LANES];
  memcpy(a, &x, sizeof a);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) a[i] = a[i] > a[i + width] ? a[i] : a[i + width];
  return a[0];
#endif
}

/* 2^f for f from -0.5 to 0.5, by a polynomial with a relative error of 2e-7. */
INLINE vf exp2_of_fraction(vf f) {
  vf y = splat(1.5403530e-4f);
  y = y * f + 1.3333558e-3f;
  y = y * f + 9.6181291e-3f;
  y = y * f + 5.5504109e-2f;
  y = y * f + 2.4022651e-1f;
  y = y * f + 6.9314718e-1f;
  return y * f + 1.0f;
}

#define ROUNDING 0x1.8p23f /* a sum with it is rounded to a whole number, which is in the sum's lowest bits */

/* 2^x for x up to 128, and 0 for x below -126. The whole part of x becomes the exponent's bits. */
INLINE vf exp2_of(vf x) {
  vf clamped = larger(x, splat(-126.0f));
  vf whole = (clamped + ROUNDING) - ROUNDING;
  vf y = exp2_of_fraction(clamped - whole);
  vi exponent = __builtin_convertvector(whole, vi);
  vf power = vf_bits((vu)((exponent + 127) << 23));
  return blend(x == x, blend(x >= -126.0f, y * power, (vf){}), x);
}

/* The bits of exp2_of(x), for x up to 0, in fewer instructions: adds the whole part to the exponent's bits. */
INLINE vf exp2_up_to_1(vf x) {
  vf clamped = larger(splat(-126.0f), x), shifted = clamped + ROUNDING;
  vf y = vf_bits(vu_bits(exp2_of_fraction(clamped - (shifted - ROUNDING))) + (vu_bits(shifted) << 23));
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126), _CMP_NLT_UQ), (__m512)y);
#else
  return blend(x < -126.0f, (vf){}, y);
#endif
}

/* 2^x for x up to 0, with a relative error of 1e-4, a twentieth of what rounding to bfloat16 adds. Where x is at most
   -127 the polynomial is 1, whose exponent bits become those of 0. NaN stays NaN. */
INLINE vf exp2_for_bf16(vf x) {
  vf clamped = larger(splat(-127.0f), x), shifted = clamped + ROUNDING, f = clamped - (shifted - ROUNDING);
  vf y = splat(0.0550090596f);
  y = y * f + 0.242210969f;
  y = y * f + 0.693282902f;
  y = y * f + 1.0f;
  return vf_bits(vu_bits(y) + (vu_bits(shifted) << 23));
}

#if defined(__AVX512F__)
/* 2^x for x up to 0, and 0 for x below -126; NaN stays NaN. The relative error of 4e-6 is far below that of bfloat16,
   to which the attention kernels round the result. */
INLINE vf exp2_of_negative(vf x) {
  vf whole = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  vf f = x - whole;
  vf y = splat(0.0096663684f);
  y = y * f + 0.055921976f;
  y = y * f + 0.2402235f;
  y = y * f + 0.69312102f;
  y = y * f + 1.0f;
  __mmask16 seen = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126), _CMP_NLT_UQ);
  return (vf)_mm512_maskz_scalef_ps(seen, (__m512)y, (__m512)whole);
}
#endif

#define LOG2E 1.44269504088896340736f

/* x / (1 + e^-x). The power of two is capped at 2^128, which is infinity: beyond it, exponent bits would reach the
   sign. */
INLINE vf silu(vf x) { return x / (exp2_of(-larger(x * LOG2E, splat(-128.0f))) + 1.0f); }

/* x (1 + tanh(y)) / 2 = x / (1 + e^-2y), with y = sqrt(2 / pi) (x + 0.044715 x^3). */
INLINE vf gelu_tanh(vf x) {
  vf twice = (x + x * x * x * 0.044715f) * (2 * 0.7978845608028654f);
  return x / (exp2_of(-larger(twice * LOG2E, splat(-128.0f))) + 1.0f);
}

/* x (1 + erf(x / sqrt(2))) / 2. With z = |x| / sqrt(2), 1 - erf(z) is e^-z^2 times a polynomial in 1 / (1 + 0.3275911
   z), with an absolute error of 1.5e-7 (Abramowitz and Stegun, 7.1.26). */
INLINE vf gelu(vf x) {
  vf z = larger(x, -x) * 0.7071067811865476f;
  vf t = splat(1.0f) / (z * 0.3275911f + 1.0f);
  vf y = splat(1.061405429f);
  y = y * t - 1.453152027f;
  y = y * t + 1.421413741f;
  y = y * t - 0.284496736f;
  y = y * t + 0.254829592f;
  vf outside = x * 0.5f * (y * t * exp2_of(z * z * -LOG2E));
  return blend(x < 0.0f, outside, x - outside);
}

INLINE vf activated(vf x, enum activation activation) {
  switch (activation) {
    case SILU: return silu(x);
    case GELU_TANH: return gelu_tanh(x);
    case GELU: return gelu(x);
    default: return blend(x < 0.0f, splat(0.0f), x);
  }
}
