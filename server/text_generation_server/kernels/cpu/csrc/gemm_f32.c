/* y = x Wᵀ + addend + bias in float32. A row of y has the same bits whatever the other rows of x are, and for any
   number of threads: the inputs are added in blocks of INPUTS_AT_ONCE, and within a block from first to last.

   Weights lie in panels of 32 outputs, [n / 32][k][32]. Zeros fill the last panel. */
#include "team.h"
#include "vectors.h"

#define WIDE_PANEL 32 /* outputs of a panel */
#define ROWS_AT_ONCE (LANES == 16 ? 12 : LANES == 8 ? 6 : 3)
#define INPUTS_AT_ONCE 512 /* inputs of a block: its part of a panel stays in the second-level cache for all rows */

/* One panel of the product. */
struct f32_panel {
  const float *x; /* [rows, k] */
  long k;
  const float *w;     /* [k, 32] */
  const float *bias;  /* bias of the panel's first output, or null */
  const char *addend; /* address of what is added to the panel's first output in row 0, or null */
  long addend_stride; /* bytes from one row of the addend to the next */
  enum type addend_type;
  float *y;      /* address of the panel's first output in row 0 */
  long y_stride; /* numbers from one row of y to the next */
};

/* What is added to output n of a row of the panel, beside the product. */
INLINE float start_of_sum(const struct f32_panel *s, long row, long n) {
  float bias = s->bias ? s->bias[n] : 0.0f, number;
  if (!s->addend) return bias;
  const char *addend = s->addend + row * s->addend_stride;
  uint32_t bits = s->addend_type == BF16 ? (uint32_t)((const bf16 *)addend)[n] << 16 : ((const uint32_t *)addend)[n];
  memcpy(&number, &bits, sizeof number);
  return number + bias;
}

/* The number of outputs whose sums for `rows` rows fit the registers. They fill 1, 2, 4 … vectors. */
INLINE int outputs_at_once(int rows) {
  int count = WIDE_PANEL / LANES;
  while (count * rows > SUM_VECTORS) count /= 2;
  return count * LANES;
}

/* Adds inputs [from, to) to rows [row, row + rows) of y. Computes outputs_at_once(rows) outputs, beginning with the
   panel's output `at`; only the first `there` of them exist. The first block of inputs is added to the bias. */
INLINE void add_inputs(const struct f32_panel *s, long row, int rows, long from, long to, long at, long there) {
  int vectors = outputs_at_once(rows) / LANES;
  vf sums[ROWS_AT_ONCE][WIDE_PANEL / LANES] = {};
  const float *w = s->w + at, *x = s->x + row * s->k;
  for (long i = from; i < to; i++) {
    vf weights[WIDE_PANEL / LANES];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) weights[v] = load(w, i * WIDE_PANEL + v * LANES, F32);
#pragma GCC unroll 12
    for (long r = 0; r < rows; r++) {
      vf number = splat(x[r * s->k + i]);
#pragma GCC unroll 8
      for (int v = 0; v < vectors; v++) sums[r][v] = multiply_add(number, weights[v], sums[r][v]);
    }
  }
#pragma GCC unroll 12
  for (long r = 0; r < rows; r++) {
    float *y = s->y + (row + r) * s->y_stride + at, out[WIDE_PANEL];
    /* Copied vector by vector: the compiler would keep an array that is copied as a whole in memory. */
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) store(out, v * LANES, sums[r][v], F32);
    for (long j = 0; j < there; j++) y[j] = (from ? y[j] : start_of_sum(s, row + r, at + j)) + out[j];
  }
}

/* Adds inputs [from, to) to rows [row, row + rows) of y, for the first `here` outputs of the panel. */
INLINE void add_inputs_of_panel(const struct f32_panel *s, long row, int rows, long from, long to, long here) {
  int each = outputs_at_once(rows);
  for (long at = 0; at < here; at += each) add_inputs(s, row, rows, from, to, at, here - at < each ? here - at : each);
}

/* Calls add_inputs_of_panel; the compiler makes a copy of it for each number of rows. */
static void add_inputs_to_rows(const struct f32_panel *s, long row, long rows, long from, long to, long here) {
#define ADD_TO(ROWS) \
  case ROWS: add_inputs_of_panel(s, row, ROWS, from, to, here); break
  switch (rows) {
    ADD_TO(1);
    ADD_TO(2);
    ADD_TO(3);
#if LANES >= 8
    ADD_TO(4);
    ADD_TO(5);
    ADD_TO(6);
#endif
#if LANES == 16
    ADD_TO(7);
    ADD_TO(8);
    ADD_TO(9);
    ADD_TO(10);
    ADD_TO(11);
    ADD_TO(12);
#endif
  }
#undef ADD_TO
}

EXPORT void gemm_f32(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct gemm_f32_arguments *a = arguments;
  long m = a->rows, k = a->inputs, n = a->outputs, panels = (n + WIDE_PANEL - 1) / WIDE_PANEL;
  FOR_EACH_ITEM(panel, panels, 1, team) {
    struct f32_panel s = {.x = a->x, .k = k, .w = a->weights + panel * WIDE_PANEL * k, .y_stride = a->y_stride};
    s.bias = a->bias ? a->bias + panel * WIDE_PANEL : 0;
    s.addend_type = a->addend_type;
    s.addend_stride = a->addend_stride * bytes_of(s.addend_type);
    s.addend = a->addend ? (const char *)a->addend + panel * WIDE_PANEL * bytes_of(s.addend_type) : 0;
    s.y = a->y + panel * WIDE_PANEL;
    long here = n - panel * WIDE_PANEL < WIDE_PANEL ? n - panel * WIDE_PANEL : WIDE_PANEL;
    for (long from = 0; from < k; from += INPUTS_AT_ONCE) {
      long to = from + INPUTS_AT_ONCE < k ? from + INPUTS_AT_ONCE : k;
      for (long row = 0; row < m; row += ROWS_AT_ONCE)
        add_inputs_to_rows(&s, row, m - row < ROWS_AT_ONCE ? m - row : ROWS_AT_ONCE, from, to, here);
    }
  }
}
