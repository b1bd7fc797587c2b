/* What a layer does with the scores of its keys, besides their scale: the arguments of `attend` and `attend_chunk`.

   All scores are those of a softmax in base 2, which are multiplied by log2(e). */
#pragma once

#include "vectors.h"

/* For functions that alter scores: the common case keeps its code. */
#define NOT_INLINED static __attribute__((noinline))

struct score_rule {
  float scale;         /* multiplies q · k. With a cap, the product is the argument of tanh */
  float cap;           /* scores are cap * tanh(scale * q · k); 0: there is no cap */
  const float *slopes; /* [heads]: scores grow by slope * (position of the key - position of the query), or null */
  const float *sinks;  /* [heads]: the score of a further key, whose value is 0, or null */
  long window;         /* a query sees this many positions, its own included; 0: all positions up to its own */
};

/* `scale` is multiplied by log2(e) already. */
INLINE struct score_rule make_rule(float scale, double softcap, const float *slopes, const float *sinks, long window) {
  float cap = (float)softcap * LOG2E;
  return (struct score_rule){softcap != 0 ? scale / cap : scale, cap, slopes, sinks, window};
}

/* The first position that a query at `position` sees. */
INLINE long first_seen(const struct score_rule *r, long position) {
  return r->window && position >= r->window ? position - r->window + 1 : 0;
}

/* Whether `altered` changes scores. */
INLINE int alters(const struct score_rule *r) { return r->cap != 0 || r->slopes; }

INLINE float slope_of(const struct score_rule *r, long head) { return r->slopes ? r->slopes[head] * LOG2E : 0; }

/* (e^2x - 1) / (e^2x + 1); near 0, where the difference would cancel, the polynomial of Cephes' tanhf. NaN stays NaN.
 */
INLINE vf tanh_of(vf x) {
  vf z = x * x, y = splat(-5.70498872745e-3f);
  y = y * z + 2.06390887954e-2f;
  y = y * z - 5.37397155531e-2f;
  y = y * z + 1.33314422036e-1f;
  y = y * z - 3.33332819422e-1f;
  vf size = larger(x, -x);
  vf outside = 1.0f - 2.0f / (exp2_of(-larger(size * (-2 * LOG2E), splat(-64.0f))) + 1.0f);
  vf result = blend(size < 0.625f, y * z * x + x, blend(x < 0.0f, -outside, outside));
  return blend(x == x, result, x);
}

/* Scores of LANES keys, at these distances from the query (position of the key - position of the query). */
INLINE vf altered(vf scores, const struct score_rule *r, vf slopes, vf distances) {
  if (r->cap != 0) scores = tanh_of(scores) * r->cap;
  return scores + distances * slopes;
}

/* 0, 1 … LANES - 1 */
INLINE vf lane_numbers(void) {
  vf x = {};
  for (int i = 0; i < LANES; i++) x[i] = (float)i;
  return x;
}
