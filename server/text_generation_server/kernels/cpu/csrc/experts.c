/* A mixture of experts: which experts each token goes to, and what they compute.

   Token t goes to `chosen` of the experts; each (token, expert) is a pair, with number t * chosen + choice. `route`
   lists the pairs in the order of their experts, so that the weights of an expert are read once for all its tokens, and
   those of experts without tokens are not read at all. Weights lie as in the files: [outputs, inputs] for each expert.

   Each number is one dot product, added up in the same order whatever else is computed: a token's result has the same
   bits in any step and for any number of threads. */
#include "team.h"
#include "vectors.h"

#define PAIRS_AT_ONCE 4    /* tokens and ... */
#define SUMS_AT_ONCE 4     /* ... outputs whose sums fit the registers */
#define OUTPUTS_OF_ITEM 16 /* outputs of one expert that a thread takes at a time */

INLINE float number_at(const void *p, long i, enum type type) {
  if (type != BF16) return ((const float *)p)[i];
  uint32_t bits = (uint32_t)((const bf16 *)p)[i] << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

INLINE void store_number(void *p, long i, float x, enum type type) {
  if (type != BF16) {
    ((float *)p)[i] = x;
    return;
  }
  bf16 h[LANES];
  store_bf16(h, splat(x));
  ((bf16 *)p)[i] = h[0];
}

/* x, rounded to bfloat16 if the model computes in bfloat16. */
INLINE float rounded(float x, enum type type) {
  if (type != BF16) return x;
  bf16 h;
  store_number(&h, 0, x, BF16);
  return number_at(&h, 0, BF16);
}

/* Chooses the experts of one token: those with the largest logits, of equal ones the first. */
INLINE void choose_experts(const void *logits, enum type type, long experts, long chosen, int over_chosen, int32_t *ids,
                           float *scores) {
  float values[MAX_EXPERTS], largest = -INFINITY, total = 0.0f;
  for (long e = 0; e < experts; e++) {
    values[e] = number_at(logits, e, type);
    if (values[e] > largest) largest = values[e];
  }
  if (!over_chosen)
    for (long e = 0; e < experts; e++) total += expf(values[e] - largest);
  for (long k = 0; k < chosen; k++) {
    long best = 0;
    for (long e = 1; e < experts; e++)
      if (values[e] > values[best]) best = e;
    ids[k] = (int32_t)best;
    scores[k] = expf(values[best] - largest);
    if (over_chosen) total += scores[k];
    values[best] = -INFINITY;
  }
  for (long k = 0; k < chosen; k++) scores[k] = scores[k] / total;
}

EXPORT void route(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct route_arguments *a = arguments;
  const char *logits = a->logits;
  enum type type = a->type;
  long tokens = a->tokens, experts = a->experts, chosen = a->chosen, over_chosen = a->over_chosen;
  int32_t *ids = a->ids, *pairs = a->pairs, *offsets = a->offsets;
  float *scores = a->scores;
  long bytes = a->stride * bytes_of(type);
  FOR_EACH_ITEM(t, tokens, 8, team)
    choose_experts(logits + t * bytes, type, experts, chosen, over_chosen != 0, ids + t * chosen, scores + t * chosen);
  wait_for_team(team);
  /* One thread sorts the pairs by counting. */
  FOR_EACH_ITEM(once, 1, 1, team) {
    (void)once;
    memset(offsets, 0, (experts + 1) * sizeof *offsets);
    for (long p = 0; p < tokens * chosen; p++) offsets[ids[p] + 1]++;
    for (long e = 0; e < experts; e++) offsets[e + 1] += offsets[e];
    int32_t next[MAX_EXPERTS];
    memcpy(next, offsets, experts * sizeof *next);
    for (long p = 0; p < tokens * chosen; p++) pairs[next[ids[p]]++] = (int32_t)p;
  }
}

/* sums[i][j] = x[i] · w[j], for `pairs` vectors x and `outputs` vectors w of `size` numbers. */
INLINE void multiply(const char *const x[PAIRS_AT_ONCE], int pairs, const char *const w[SUMS_AT_ONCE], int outputs,
                     long size, enum type type, float sums[PAIRS_AT_ONCE][SUMS_AT_ONCE]) {
  vf parts[PAIRS_AT_ONCE][SUMS_AT_ONCE] = {};
  for (long i = 0; i < size; i += LANES) {
    vf weights[SUMS_AT_ONCE];
#pragma GCC unroll 4
    for (int j = 0; j < outputs; j++) weights[j] = load(w[j], i, type);
#pragma GCC unroll 4
    for (int p = 0; p < pairs; p++) {
      vf number = load(x[p], i, type);
#pragma GCC unroll 4
      for (int j = 0; j < outputs; j++) parts[p][j] = multiply_add(number, weights[j], parts[p][j]);
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < pairs; p++)
#pragma GCC unroll 4
    for (int j = 0; j < outputs; j++) sums[p][j] = lane_sum(parts[p][j]);
}

/* Calls multiply; the compiler makes a copy of it for each number of pairs. */
static void multiply_pairs(const char *const x[PAIRS_AT_ONCE], int pairs, const char *const w[SUMS_AT_ONCE], long size,
                           enum type type, float sums[PAIRS_AT_ONCE][SUMS_AT_ONCE]) {
#define MULTIPLY(count, t) multiply(x, count, w, SUMS_AT_ONCE, size, t, sums)
  if (type == BF16) switch (pairs) {
      case 1: MULTIPLY(1, BF16); return;
      case 2: MULTIPLY(2, BF16); return;
      case 3: MULTIPLY(3, BF16); return;
      default: MULTIPLY(4, BF16); return;
    }
  switch (pairs) {
    case 1: MULTIPLY(1, F32); return;
    case 2: MULTIPLY(2, F32); return;
    case 3: MULTIPLY(3, F32); return;
    default: MULTIPLY(4, F32); return;
  }
#undef MULTIPLY
}

/* What lies between the products: gate and up as they are stored. */
INLINE float opened(float gate, float up, float limit, float slope, enum type type) {
  if (limit == 0.0f) return rounded(gate / (1.0f + expf(-gate)), type) * up;
  if (gate > limit) gate = limit;
  if (up > limit) up = limit;
  if (up < -limit) up = -limit;
  return (up + 1.0f) * gate / (1.0f + expf(-slope * gate));
}

/* One item of experts_up: inner numbers first … first + OUTPUTS_OF_ITEM - 1 of one expert. */
INLINE void up_item(const struct experts_up_arguments *a, long expert, long first) {
  enum type type = a->type;
  long width = a->width, inner = a->inner, bytes = width * bytes_of(type);
  const int32_t *pairs = a->pairs, *offsets = a->offsets;
  const char *weights = (const char *)a->gate_up + expert * 2 * inner * bytes, *x = a->x;
  float limit = a->limit, slope = a->slope;
  for (long n = first; n < first + OUTPUTS_OF_ITEM && n < inner; n += SUMS_AT_ONCE / 2) {
    const char *w[SUMS_AT_ONCE];
    for (int j = 0; j < SUMS_AT_ONCE / 2; j++) {
      w[2 * j] = weights + (n + j) * bytes;
      w[2 * j + 1] = weights + (inner + n + j) * bytes;
    }
    for (long at = offsets[expert]; at < offsets[expert + 1]; at += PAIRS_AT_ONCE) {
      int count = offsets[expert + 1] - at < PAIRS_AT_ONCE ? (int)(offsets[expert + 1] - at) : PAIRS_AT_ONCE;
      const char *from[PAIRS_AT_ONCE];
      for (int p = 0; p < count; p++) from[p] = x + pairs[at + p] / a->chosen * bytes;
      float sums[PAIRS_AT_ONCE][SUMS_AT_ONCE];
      multiply_pairs(from, count, w, width, type, sums);
      for (int p = 0; p < count; p++)
        for (int j = 0; j < SUMS_AT_ONCE / 2; j++) {
          float gate = sums[p][2 * j], up = sums[p][2 * j + 1];
          if (a->bias) {
            gate += number_at(a->bias, expert * 2 * inner + n + j, type);
            up += number_at(a->bias, (expert * 2 + 1) * inner + n + j, type);
          }
          float out = opened(rounded(gate, type), rounded(up, type), limit, slope, type);
          store_number(a->out, (at + p) * inner + n + j, out, type);
        }
    }
  }
}

EXPORT void experts_up(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct experts_up_arguments *a = arguments;
  const int32_t *offsets = a->offsets;
  long blocks = (a->inner + OUTPUTS_OF_ITEM - 1) / OUTPUTS_OF_ITEM, items = a->experts * blocks;
  FOR_EACH_ITEM(item, items, 1, team) {
    long expert = item / blocks;
    if (offsets[expert] < offsets[expert + 1]) up_item(a, expert, item % blocks * OUTPUTS_OF_ITEM);
  }
}

/* One item of experts_down: outputs first … first + OUTPUTS_OF_ITEM - 1 of one expert. */
INLINE void down_item(const struct experts_down_arguments *a, long expert, long first) {
  enum type type = a->type;
  long width = a->width, inner = a->inner, bytes = inner * bytes_of(type);
  const int32_t *pairs = a->pairs, *offsets = a->offsets;
  const char *weights = (const char *)a->down + expert * width * bytes, *x = a->x;
  for (long n = first; n < first + OUTPUTS_OF_ITEM && n < width; n += SUMS_AT_ONCE) {
    const char *w[SUMS_AT_ONCE];
    for (int j = 0; j < SUMS_AT_ONCE; j++) w[j] = weights + (n + j) * bytes;
    for (long at = offsets[expert]; at < offsets[expert + 1]; at += PAIRS_AT_ONCE) {
      int count = offsets[expert + 1] - at < PAIRS_AT_ONCE ? (int)(offsets[expert + 1] - at) : PAIRS_AT_ONCE;
      const char *from[PAIRS_AT_ONCE];
      for (int p = 0; p < count; p++) from[p] = x + (at + p) * bytes;
      float sums[PAIRS_AT_ONCE][SUMS_AT_ONCE];
      multiply_pairs(from, count, w, inner, type, sums);
      for (int p = 0; p < count; p++) {
        float score = rounded(a->scores[pairs[at + p]], type);
        for (int j = 0; j < SUMS_AT_ONCE; j++) {
          float sum = a->bias ? sums[p][j] + number_at(a->bias, expert * width + n + j, type) : sums[p][j];
          store_number(a->out, pairs[at + p] * width + n + j, rounded(sum, type) * score, type);
        }
      }
    }
  }
}

EXPORT void experts_down(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct experts_down_arguments *a = arguments;
  const int32_t *offsets = a->offsets;
  long blocks = (a->width + OUTPUTS_OF_ITEM - 1) / OUTPUTS_OF_ITEM, items = a->experts * blocks;
  FOR_EACH_ITEM(item, items, 1, team) {
    long expert = item / blocks;
    if (offsets[expert] < offsets[expert + 1]) down_item(a, expert, item % blocks * OUTPUTS_OF_ITEM);
  }
}

EXPORT void experts_sum(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct experts_sum_arguments *a = arguments;
  enum type type = a->type;
  long tokens = a->tokens, chosen = a->chosen, width = a->width;
  const void *parts = a->parts;
  void *out = a->out;
  FOR_EACH_ITEM(t, tokens, 4, team) {
    for (long i = 0; i < width; i += LANES) {
      vf sum = {};
      for (long k = 0; k < chosen; k++) sum += load(parts, (t * chosen + k) * width + i, type);
      store(out, t * width + i, sum, type);
    }
  }
}

EXPORT void add_scored(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct add_scored_arguments *a = arguments;
  enum type type = a->type;
  long tokens = a->tokens, width = a->width;
  const void *y = a->y, *inputs = a->inputs, *weight = a->weight;
  void *x = a->x;
  FOR_EACH_ITEM(t, tokens, 4, team) {
    vf product = {};
    for (long i = 0; i < width; i += LANES)
      product = multiply_add(load(inputs, t * width + i, type), load(weight, i, type), product);
    float score = 1.0f / (1.0f + expf(-lane_sum(product)));
    for (long i = t * width; i < (t + 1) * width; i += LANES)
      store(x, i, load(x, i, type) + load(y, i, type) * score, type);
  }
}
