/* A matrix product y = x Wᵀ, and the epilogue: what is done to each sum before it is stored in y. */
#pragma once

#include "team.h"
#include "vectors.h"

#define PANEL_OUTPUTS 16                 /* number of outputs whose weights lie in one panel; README.md draws it */
#define PAIR_OUTPUTS (2 * PANEL_OUTPUTS) /* number of outputs that are computed together */

struct epilogue {
  const float *scales; /* scale of each output, for int8 weights; or null */
  const float *bias;   /* bias of each output, or null */
  int gated;           /* whether panels come in pairs, the first for gates, the second for ups: y = silu(gate) * up */
  enum type type;      /* type of y */
  int bypasses_caches; /* whether lines of y are written to memory directly: y is bfloat16 and aligned to 64 bytes */
};

/* The arguments of `gemm` under their usual names: m rows of x, k inputs, n outputs. */
struct product {
  const bf16 *x; /* [m, k] */
  long m, k;
  const void *weights; /* [n / 16, k / 2, 16, 2] */
  long n;
  int is_int8;
  struct epilogue e;
  char *y;       /* [m, n], or gated [m, n / 2] */
  long y_stride; /* bytes from one row of y to the next */
  bf16 *scratch;
};

/* The sums of LANES outputs, beginning with output n, after scaling and adding the bias. */
INLINE vf scale_and_add_bias(vf sum, const struct epilogue *e, long n) {
  if (e->scales) sum *= load(e->scales, n, F32);
  if (e->bias) sum += load(e->bias, n, F32);
  return sum;
}

/* Stores LANES outputs of a row of y, from output n on, and LANES from output n + PANEL_OUTPUTS on. */
INLINE void store_two_vectors(char *y_row, long n, vf first, vf second, const struct epilogue *e) {
#if defined(__AMX_BF16__)
  if (e->bypasses_caches) {
    _mm512_stream_si512((__m512i *)((bf16 *)y_row + n), (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
    return;
  }
#endif
  store(y_row, n, first, e->type);
  store(y_row, n + PANEL_OUTPUTS, second, e->type);
}

/* The outputs that a pair of gated panels makes, from output `at` of the panels on. sums0 belong to the gate panel,
   sums1 to the up panel. */
INLINE vf gate_outputs(long pair, long at, vf sums0, vf sums1, const struct epilogue *e) {
  return silu(scale_and_add_bias(sums0, e, pair * PAIR_OUTPUTS + at)) *
         scale_and_add_bias(sums1, e, pair * PAIR_OUTPUTS + PANEL_OUTPUTS + at);
}

/* Computes outputs at … at + LANES - 1 of both panels of a pair for one row from their sums, and stores them in that
   row of y. */
INLINE void store_pair(char *y_row, long pair, long at, vf sums0, vf sums1, const struct epilogue *e) {
  long n = pair * PAIR_OUTPUTS + at;
  if (e->gated)
    store(y_row, pair * PANEL_OUTPUTS + at, gate_outputs(pair, at, sums0, sums1, e), e->type);
  else
    store_two_vectors(y_row, n, scale_and_add_bias(sums0, e, n), scale_and_add_bias(sums1, e, n + PANEL_OUTPUTS), e);
}

#if defined(__AVX512BF16__)
/* Converts 32 int8 weights to bfloat16, which is exact. */
INLINE void widen_32_weights(const int8_t *from, bf16 *to) {
  __m512 low = (__m512)load_i8(from), high = (__m512)load_i8(from + 16);
  __m512bh both = _mm512_cvtne2ps_pbh(high, low);
  memcpy(to, &both, 64);
}
#endif

/* Number of bfloat16 numbers of x that are multiplied by all weights before the next numbers of x. They stay in the
   second-level cache while the weights are read once. */
#define X_NUMBERS_IN_L2 393216

/* The product for more than FEW_ROWS rows on the matrix unit. */
void multiply_many_rows(const struct product *g, struct team *team, int me);

/* The product on processors without a dot-product instruction for bfloat16, and the size of its scratch memory, in
   bfloat16 numbers. */
void multiply_in_floats(const struct product *g, struct team *team, int me);
long numbers_for_floats(long m, long k, int threads);

/* Prefetches the weights with which thread `me` begins the product. To be called before the threads meet, so that
   memory is read while they wait. */
void prefetch_product(const struct gemm_arguments *a, int me);
