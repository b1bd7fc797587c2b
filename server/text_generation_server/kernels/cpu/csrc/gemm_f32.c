/* y = x Wᵀ + bias in float32. A row of y has the same bits whatever the other rows of x are, and for any number of
   threads: the inputs are added in blocks of INPUTS_AT_ONCE, and within a block from first to last.

   Weights lie in panels of 32 outputs, [n / 32][k][32]. Zeros fill the last panel. */
#include "team.h"
#include "vectors.h"

#define WIDE_PANEL 32               /* outputs of a panel */
#define OUTPUTS_AT_ONCE (2 * LANES) /* outputs whose sums, for ROWS_AT_ONCE rows, fit the registers */
#define ROWS_AT_ONCE (LANES == 16 ? 8 : 4)
#define INPUTS_AT_ONCE 512 /* inputs of a block: its part of a panel stays in the second-level cache for all rows */

/* One panel of the product. */
struct f32_panel {
  const float *x; /* [rows, k] */
  long k;
  const float *w;    /* [k, 32] */
  const float *bias; /* bias of the panel's first output, or null */
  float *y;          /* address of the panel's first output in row 0 */
  long n;            /* number of outputs in a row of y */
};

/* Adds inputs [from, to) to rows [row, row + rows) of y. Computes OUTPUTS_AT_ONCE outputs, beginning with the
   panel's output `at`; only the first `there` of them exist. The first block of inputs is added to the bias. */
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

/* Calls add_inputs; the compiler makes a copy of it for each number of rows. */
static void add_inputs_to_rows(const struct f32_panel *s, long row, long rows, long from, long to, long at,
                               long there) {
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

EXPORT void gemm_f32(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct gemm_f32_arguments *a = arguments;
  long m = a->rows, k = a->inputs, n = a->outputs, panels = (n + WIDE_PANEL - 1) / WIDE_PANEL;
  FOR_EACH_ITEM(panel, panels, 1, team) {
    struct f32_panel s = {.x = a->x, .k = k, .w = a->weights + panel * WIDE_PANEL * k, .n = n};
    s.bias = a->bias ? a->bias + panel * WIDE_PANEL : 0;
    s.y = a->y + panel * WIDE_PANEL;
    long here = n - panel * WIDE_PANEL < WIDE_PANEL ? n - panel * WIDE_PANEL : WIDE_PANEL;
    for (long from = 0; from < k; from += INPUTS_AT_ONCE) {
      long to = from + INPUTS_AT_ONCE < k ? from + INPUTS_AT_ONCE : k;
      for (long row = 0; row < m; row += ROWS_AT_ONCE)
        for (long at = 0; at < here; at += OUTPUTS_AT_ONCE)
          add_inputs_to_rows(&s, row, m - row < ROWS_AT_ONCE ? m - row : ROWS_AT_ONCE, from, to, at,
                             here - at < OUTPUTS_AT_ONCE ? here - at : OUTPUTS_AT_ONCE);
    }
  }
}
