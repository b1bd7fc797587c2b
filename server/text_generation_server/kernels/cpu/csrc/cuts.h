/* The cuts of one row of logits: top-k, top-p, min-p and typical-p, without a sort. */
#pragma once

#include "vectors.h"

/* Tokens of a row, in the order of their ids. */
struct tokens {
  const float *logits;
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

/* The tokens that the cuts keep. They lie in `scratch`, which has cut_words(size) words. */
struct tokens cut_row(const float *row, long size, const struct cuts *cuts, int64_t *scratch);

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
