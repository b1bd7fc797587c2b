/* The cuts of one row of logits: top-k, top-p, min-p and typical-p, without a sort. */
#pragma once

#include "vectors.h"

/* Tokens of a row, in the order of their ids. */
struct tokens {
  float *logits;
  const int32_t *ids; /* or null: the ids are 0, 1, 2 … */
  long count;
};

/* What a row asks for. */
struct cuts {
  long top_k;      /* 0: no cut */
  float top_p;     /* 1: no cut */
  float log_min_p; /* minus infinity: no cut */
  float typical_p; /* 1: no cut */
};

INLINE int asks_for_cut(const struct cuts *cuts) {
  return cuts->top_k > 0 || cuts->top_p < 1 || cuts->log_min_p > -INFINITY || cuts->typical_p < 1;
}

/* Whatever a thread may have to remember of `size` tokens: CUT_BUCKETS + 3 * size + 16 words of 8 bytes. */
INLINE long cut_words(long size) { return CUT_BUCKETS + 3 * size + 16; }

/* The memory of a thread. Each list has room for all tokens of a row, and for LANES more. */
struct cut_memory {
  int64_t *sums; /* [CUT_BUCKETS] */
  struct listed *list;
  float *logits; /* logits of the tokens that are kept */
  int32_t *ids;
};

INLINE struct cut_memory divide_scratch(int64_t *scratch, long size) {
  int64_t *behind = scratch + CUT_BUCKETS + 2 * size;
  return (struct cut_memory){scratch, (struct listed *)(scratch + CUT_BUCKETS), (float *)behind,
                             (int32_t *)behind + size + LANES};
}

/* The tokens, of a row of `size` logits, that the cuts keep. They lie in `scratch`, which has cut_words(size) words; so
   may `tokens`, where `mask_row` lists them. */
struct tokens cut_row(struct tokens tokens, long size, const struct cuts *cuts, int64_t *scratch);

/* The lanes of a mask, one bit for each. */
INLINE unsigned lane_bits(vi mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
  return (unsigned)_mm256_movemask_ps((__m256)mask);
#elif defined(__SSE2__)
  return (unsigned)_mm_movemask_ps((__m128)mask);
#else
  unsigned bits = 0;
  for (int i = 0; i < LANES; i++) bits |= (unsigned)(mask[i] & 1) << i;
  return bits;
#endif
}

/* LANES logits from token i on; minus infinity past the end. */
INLINE vf logits_from(const float *row, long i, long size) {
  if (i + LANES <= size) return load(row, i, F32);
  float rest[LANES];
  for (int j = 0; j < LANES; j++) rest[j] = i + j < size ? row[i + j] : -INFINITY;
  return load(rest, 0, F32);
}

INLINE vi lane_indices(void) {
  vi lanes;
  for (int i = 0; i < LANES; i++) lanes[i] = i;
  return lanes;
}

/* Stores the lanes of `bits` one after the other from number `count` on. May write LANES numbers. */
INLINE long keep_lanes(unsigned bits, vf x, vi ids, long count, const struct cut_memory *memory) {
#if defined(__AVX512F__)
  _mm512_storeu_ps(memory->logits + count, _mm512_maskz_compress_ps((__mmask16)bits, (__m512)x));
  _mm512_storeu_si512(memory->ids + count, _mm512_maskz_compress_epi32((__mmask16)bits, (__m512i)ids));
  return count + __builtin_popcount(bits);
#else
  for (; bits; bits &= bits - 1, count++) {
    int j = __builtin_ctz(bits);
    memory->logits[count] = x[j], memory->ids[count] = ids[j];
  }
  return count;
#endif
}
