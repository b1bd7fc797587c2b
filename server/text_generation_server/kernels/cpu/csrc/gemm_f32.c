/* y = x Wᵀ + b in float32, where a row's numbers have the same bits whatever the number of rows, their order and the number
   of threads: each sum is taken over the inputs from first to last, in blocks, by one multiply-add after the other.

   Weights lie in panels of 32 outputs, [N / 32][K][32], the last one filled up with zeros. */
#include "team.h"
#include "vectors.h"

#define WIDE_PANEL 32
#define OUTPUTS_AT_ONCE (2 * LANES) /* outputs whose sums are in registers */
#define INPUTS_AT_ONCE 512         /* inputs of a block: its part of a panel stays in the second-level cache for all rows */
#define ROWS_AT_ONCE (LANES == 16 ? 8 : 4)

/* The compiler may or may not fuse a product and a sum, as it likes; here each way to the same number must be the same. */
INLINE vf multiply_add(vf a, vf b, vf sum) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX2__) && defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  vf product = a * b;
  __asm__("" : "+m"(product)); /* keeps them apart */
  return product + sum;
#endif
}

struct f32_panel {
  const float *x;
  long k;
  const float *w; /* of the panel */
  const float *bias;
  float *y;
  long n;
};

/* Adds the inputs [from, to) to `rows` rows of y, OUTPUTS_AT_ONCE outputs of it from `at` on in the panel, `there` of which exist. */
INLINE void add_inputs(const struct f32_panel *s, long row, long rows, long from, long to, long at, long there) {
  vf sums[ROWS_AT_ONCE][2] = {};
  const float *w = s->w + at, *x = s->x + row * s->k;
  for (long i = from; i < to; i++) {
    vf w0 = load(w, i * WIDE_PANEL, F32), w1 = load(w, i * WIDE_PANEL + LANES, F32);
#pragma GCC unroll 8
    for (long r = 0; r < rows; r++) {
      vf number = splat(x[r * s->k + i]);
      sums[r][0] = multiply_add(number, w0, sums[r][0]);
      sums[r][1] = multiply_add(number, w1, sums[r][1]);
    }
  }
#pragma GCC unroll 8
  for (long r = 0; r < rows; r++) {
    float *y = s->y + (row + r) * s->n + at, out[OUTPUTS_AT_ONCE];
    memcpy(out, sums[r], sizeof out);
    for (long j = 0; j < there; j++) y[j] = (from ? y[j] : s->bias ? s->bias[at + j] : 0.0f) + out[j];
  }
}

static void add_inputs_to_rows(const struct f32_panel *s, long row, long rows, long from, long to, long at, long there) {
  switch (rows) {
    case 1: add_inputs(s, row, 1, from, to, at, there); break;
    case 2: add_inputs(s, row, 2, from, to, at, there); break;
    case 3: add_inputs(s, row, 3, from, to, at, there); break;
    case 4: add_inputs(s, row, 4, from, to, at, there); break;
#if LANES == 16
    case 5: add_inputs(s, row, 5, from, to, at, there); break;
    case 6: add_inputs(s, row, 6, from, to, at, there); break;
    case 7: add_inputs(s, row, 7, from, to, at, there); break;
    case 8: add_inputs(s, row, 8, from, to, at, there); break;
#endif
  }
}

/* Words: x, m, k, weights, n, bias, y. x [m, k], weights in panels, bias [n] or null, y [m, n]. */
EXPORT void gemm_f32(const union word *w, struct team *team, int me) {
  (void)me;
  long m = w[1].i, k = w[2].i, n = w[4].i, panels = (n + WIDE_PANEL - 1) / WIDE_PANEL;
  FOR_EACH_ITEM(panel, panels, 1, team) {
    struct f32_panel s = {.x = w[0].p, .k = k, .w = (const float *)w[3].p + panel * WIDE_PANEL * k, .n = n};
    s.bias = w[5].p ? (const float *)w[5].p + panel * WIDE_PANEL : 0;
    s.y = (float *)w[6].p + panel * WIDE_PANEL;
    long here = n - panel * WIDE_PANEL < WIDE_PANEL ? n - panel * WIDE_PANEL : WIDE_PANEL;
    for (long from = 0; from < k; from += INPUTS_AT_ONCE) {
      long to = from + INPUTS_AT_ONCE < k ? from + INPUTS_AT_ONCE : k;
      for (long row = 0; row < m; row += ROWS_AT_ONCE)
        for (long at = 0; at < here; at += OUTPUTS_AT_ONCE)
          add_inputs_to_rows(&s, row, m - row < ROWS_AT_ONCE ? m - row : ROWS_AT_ONCE, from, to, at, here - at < OUTPUTS_AT_ONCE ? here - at : OUTPUTS_AT_ONCE);
    }
  }
}
