/* A matrix product, and what becomes of its sums. */
#pragma once

#include "team.h"
#include "vectors.h"

#define PANEL_OUTPUTS 16
#define PAIR_OUTPUTS (2 * PANEL_OUTPUTS) /* outputs that are computed together */

/* What becomes of 16 sums on their way into y. */
struct epilogue {
  const float *scales; /* per output, for int8; or null */
  const float *bias;   /* or null */
  int gated;           /* panels come in pairs of gate and up: y = silu(gate) * up */
  enum type type;      /* of y */
  int passes_by;       /* y goes to memory past the caches: lines of 64 bytes, in bfloat16 */
};

struct product {
  const bf16 *x;
  long m, k;
  const void *weights;
  long n;
  int is_int8;
  struct epilogue e;
  char *y;
  long y_stride; /* in bytes */
  bf16 *scratch;
};

INLINE vf scale_and_add_bias(vf sum, const struct epilogue *e, long n) {
  if (e->scales) sum *= load(e->scales, n, F32);
  if (e->bias) sum += load(e->bias, n, F32);
  return sum;
}

/* 32 numbers of y from the n-th on. */
INLINE void store_32_outputs(char *y_row, long n, vf first, vf second, const struct epilogue *e) {
#if defined(__AMX_BF16__)
  if (e->passes_by) {
    _mm512_stream_si512((__m512i *)((bf16 *)y_row + n), (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
    return;
  }
#endif
  store(y_row, n, first, e->type);
  store(y_row, n + PANEL_OUTPUTS, second, e->type);
}

/* The numbers of one gated pair. `sums` are those of its first panel and its second. */
INLINE vf gate_outputs(long pair, vf sums0, vf sums1, const struct epilogue *e) {
  return silu(scale_and_add_bias(sums0, e, pair * PAIR_OUTPUTS)) * scale_and_add_bias(sums1, e, pair * PAIR_OUTPUTS + PANEL_OUTPUTS);
}

INLINE void store_pair(char *y_row, long pair, vf sums0, vf sums1, const struct epilogue *e) {
  if (e->gated)
    store(y_row, pair * PANEL_OUTPUTS, gate_outputs(pair, sums0, sums1, e), e->type);
  else
    store_32_outputs(y_row, pair * PAIR_OUTPUTS, scale_and_add_bias(sums0, e, pair * PAIR_OUTPUTS), scale_and_add_bias(sums1, e, pair * PAIR_OUTPUTS + PANEL_OUTPUTS), e);
}

/* 32 int8 weights as bfloat16, exactly. */
INLINE void widen_32_weights(const int8_t *from, bf16 *to) {
  __m512 low = (__m512)load_i8(from), high = (__m512)load_i8(from + 16);
  __m512bh both = _mm512_cvtne2ps_pbh(high, low);
  memcpy(to, &both, 64);
}

#define X_NUMBERS_IN_L2 393216 /* numbers of x that stay in the second-level cache while the weights pass by */

/* More than 16 rows on the matrix unit. */
void multiply_many_rows(const struct product *g, struct team *team, int me);
