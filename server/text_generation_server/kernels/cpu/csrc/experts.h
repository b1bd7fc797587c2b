/* What experts compute between their products, whatever form their weights have. */
#pragma once

#include "team.h"
#include "vectors.h"

/* x, rounded to bfloat16 if the model computes in bfloat16. */
INLINE vf rounded(vf x, enum type type) {
  if (type != BF16) return x;
  bf16 h[LANES];
  store_bf16(h, x);
  return load_bf16(h);
}

/* What lies between the products: gate and up as they are stored. */
INLINE vf opened(vf gate, vf up, float limit, float slope, enum type type) {
  if (limit == 0.0f) return rounded(silu(gate), type) * up;
  gate = blend(gate > limit, splat(limit), gate);
  up = blend(up > limit, splat(limit), up);
  up = blend(up < -limit, splat(-limit), up);
  return (up + 1.0f) * silu(gate * slope) / slope;
}

/* Lists the experts that have pairs. Returns their number. */
INLINE long list_experts(const int32_t *offsets, long experts, int32_t *used) {
  long count = 0;
  for (long e = 0; e < experts; e++)
    if (offsets[e] < offsets[e + 1]) used[count++] = (int32_t)e;
  return count;
}
