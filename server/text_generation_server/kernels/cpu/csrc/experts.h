/* What experts compute between their products, whatever form their weights have. */
#pragma once

#include "product.h"

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

/* The items of a call: blocks of rows and pairs of panels of the experts that have any. */
struct expert_items {
  long count;
  int32_t experts[MAX_EXPERTS];
  long ends[MAX_EXPERTS]; /* number of the item behind the last of each expert */
};

/* The number of items of an expert that has `rows` pairs. */
typedef long count_items(const struct experts_codes_arguments *a, long expert, long rows);

void list_items(const struct experts_codes_arguments *a, count_items *items_of, struct expert_items *items);

/* Makes what adapters add to the product of an expert its addend, whose rows are those of the pairs. */
void add_adapters(const struct experts_codes_arguments *a, struct epilogue *e);

/* Stores the sums of a pair of panels and row `at` of the pairs: of gates and ups, or of outputs times the score. */
void store_expert(const struct experts_codes_arguments *a, const struct epilogue *e, long at, long pair,
                  const float *sums);

/* The call for weights that are integers, with activations in 8 bits. */
void compute_experts_of_ints(const struct experts_codes_arguments *a, struct team *team, int me);

/* Lists the experts that have pairs. Returns their number. */
INLINE long list_experts(const int32_t *offsets, long experts, int32_t *used) {
  long count = 0;
  for (long e = 0; e < experts; e++)
    if (offsets[e] < offsets[e + 1]) used[count++] = (int32_t)e;
  return count;
}
