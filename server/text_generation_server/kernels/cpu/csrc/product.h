/* A matrix product, and what becomes of its sums. */
#pragma once

#include "team.h"
#include "vectors.h"

#define PANEL 16
#define PAIR (2 * PANEL) /* outputs that are computed together */

/* What becomes of 16 sums on their way into y. */
struct epilogue {
  const float *scales; /* per output, for int8; or null */
  const float *bias;   /* or null */
  int gated;           /* panels come in pairs of gate and up: y = silu(gate) * up */
  enum type type;      /* of y */
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

INLINE vf finish(vf sum, const struct epilogue *e, long n) {
  if (e->scales) sum *= load(e->scales, n, F32);
  if (e->bias) sum += load(e->bias, n, F32);
  return sum;
}

/* `sums` are those of the pair's first panel and its second. */
INLINE void put(char *y_row, long pair, vf sums0, vf sums1, const struct epilogue *e) {
  vf first = finish(sums0, e, pair * PAIR), second = finish(sums1, e, pair * PAIR + PANEL);
  if (e->gated) {
    store(y_row, pair * PANEL, silu(first) * second, e->type);
  } else {
    store(y_row, pair * PAIR, first, e->type);
    store(y_row, pair * PAIR + PANEL, second, e->type);
  }
}

/* 32 int8 weights as bfloat16, exactly. */
INLINE void widen_line(const int8_t *from, bf16 *to) {
  __m512 low = (__m512)load_i8(from), high = (__m512)load_i8(from + 16);
  __m512bh both = _mm512_cvtne2ps_pbh(high, low);
  memcpy(to, &both, 64);
}

#define BLOCK 393216 /* numbers of x that stay in the second-level cache while the weights pass by */

/* More than 16 rows on the matrix unit. */
void multiply_many(const struct product *g, struct team *team, int me);
