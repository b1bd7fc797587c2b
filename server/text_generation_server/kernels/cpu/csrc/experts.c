/* A mixture of experts: which experts each token goes to, and what they compute.

   Token t goes to `chosen` of the experts; each (token, expert) is a pair, with number t * chosen + choice. `route`
   lists the pairs in the order of their experts, so that the weights of an expert are read once for all its tokens, and
   those of experts without tokens are not read at all. Weights lie as in the files: [outputs, inputs] for each expert.

   Each number is one dot product, added up in the same order whatever else is computed: a token's result has the same
   bits in any step and for any number of threads. */
#include "experts.h"

#define PAIRS_AT_ONCE (LANES == 16 ? 4 : 2) /* tokens and ... */
#define SUMS_AT_ONCE 4                      /* ... outputs whose sums fit the registers */
#define OUTPUTS_OF_ITEM 16 /* outputs of one expert that a thread takes at a time; all sizes are multiples of it */

INLINE float number_at(const void *p, long i, enum type type) {
  if (type != BF16) return ((const float *)p)[i];
  uint32_t bits = (uint32_t)((const bf16 *)p)[i] << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
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

#if defined(__AVX2__) && !defined(__AVX512BF16__)
/* LANES words of two bfloat16 numbers; zeros after the last `bytes`. */
INLINE vu load_pairs(const char *p, long bytes) {
#if defined(__AVX512F__)
  return (vu)_mm512_maskz_loadu_epi32(bytes < 64 ? 0xff : 0xffff, p);
#else
  (void)bytes;
  vu words;
  memcpy(&words, p, sizeof words);
  return words;
#endif
}
#endif

/* Up to PAIRS_AT_ONCE vectors, and the vectors of OUTPUTS_OF_ITEM outputs: LANES partial sums of each product. */
typedef vf partial_sums[PAIRS_AT_ONCE][OUTPUTS_OF_ITEM];

/* parts[p][first + j] = x[p] · w[j], for `pairs` vectors x and SUMS_AT_ONCE vectors w that follow each other in memory,
   all of `size` numbers. Meanwhile as many vectors are prefetched from `next` on, unless it is null. */
INLINE void multiply(const char *const x[PAIRS_AT_ONCE], int pairs, const char *w, const char *next, long size,
                     enum type type, partial_sums parts, int first) {
  vf sums[PAIRS_AT_ONCE][SUMS_AT_ONCE] = {};
  long bytes = size * bytes_of(type);
#if defined(__AVX512BF16__)
  /* A dot-product instruction multiplies 32 numbers. The last 32 may be 16. */
  for (long i = 0; type == BF16 && i < bytes; i += 64) {
    __mmask32 there = bytes - i < 64 ? 0xffff : 0xffffffff;
    __m512bh weights[SUMS_AT_ONCE];
#pragma GCC unroll 4
    for (int j = 0; j < SUMS_AT_ONCE; j++) {
      weights[j] = (__m512bh)_mm512_maskz_loadu_epi16(there, w + j * bytes + i);
      if (next) _mm_prefetch(next + j * bytes + i, _MM_HINT_T0);
    }
#pragma GCC unroll 4
    for (int p = 0; p < pairs; p++) {
      __m512bh number = (__m512bh)_mm512_maskz_loadu_epi16(there, x[p] + i);
#pragma GCC unroll 4
      for (int j = 0; j < SUMS_AT_ONCE; j++) sums[p][j] = (vf)_mm512_dpbf16_ps((__m512)sums[p][j], number, weights[j]);
    }
  }
  if (type == BF16) size = 0;
#elif defined(__AVX2__)
  /* A word holds two numbers: the even one becomes float32 by a shift, the odd one by a mask. */
  for (long i = 0; type == BF16 && i < bytes; i += 4 * LANES) {
    vf even[PAIRS_AT_ONCE], odd[PAIRS_AT_ONCE];
#pragma GCC unroll 4
    for (int p = 0; p < pairs; p++) {
      vu words = load_pairs(x[p] + i, bytes - i);
      even[p] = vf_bits(words << 16);
      odd[p] = vf_bits(words & 0xffff0000);
    }
#pragma GCC unroll 4
    for (int j = 0; j < SUMS_AT_ONCE; j++) {
      vu words = load_pairs(w + j * bytes + i, bytes - i);
      vf first = vf_bits(words << 16), second = vf_bits(words & 0xffff0000);
      if (next) _mm_prefetch(next + j * bytes + i, _MM_HINT_T0);
#pragma GCC unroll 4
      for (int p = 0; p < pairs; p++)
        sums[p][j] = multiply_add(odd[p], second, multiply_add(even[p], first, sums[p][j]));
    }
  }
  if (type == BF16) size = 0;
#else
  (void)next;
#endif
  for (long i = 0; i < size; i += LANES) {
    vf weights[SUMS_AT_ONCE];
#pragma GCC unroll 4
    for (int j = 0; j < SUMS_AT_ONCE; j++) weights[j] = load(w + j * bytes, i, type);
#pragma GCC unroll 4
    for (int p = 0; p < pairs; p++) {
      vf number = load(x[p], i, type);
#pragma GCC unroll 4
      for (int j = 0; j < SUMS_AT_ONCE; j++) sums[p][j] = multiply_add(number, weights[j], sums[p][j]);
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < pairs; p++)
#pragma GCC unroll 4
    for (int j = 0; j < SUMS_AT_ONCE; j++) parts[p][first + j] = sums[p][j];
}

/* Calls multiply for the OUTPUTS_OF_ITEM vectors w, and adds up the partial sums. `next`: what the thread reads after
   them, or null to prefetch nothing. */
INLINE void multiply_outputs(const char *const x[PAIRS_AT_ONCE], int pairs, const char *w, const char *next, long size,
                             enum type type, float sums[PAIRS_AT_ONCE][OUTPUTS_OF_ITEM]) {
  long bytes = SUMS_AT_ONCE * size * bytes_of(type);
  partial_sums parts;
  for (int j = 0; j < OUTPUTS_OF_ITEM; j += SUMS_AT_ONCE, w += bytes)
    multiply(x, pairs, w, next && j + SUMS_AT_ONCE < OUTPUTS_OF_ITEM ? w + bytes : next, size, type, parts, j);
#pragma GCC unroll 4
  for (int p = 0; p < pairs; p++)
    for (int j = 0; j < OUTPUTS_OF_ITEM; j += LANES) store(sums[p], j, lane_sums(&parts[p][j]), F32);
}

/* The compiler makes a copy of multiply_outputs for each number of pairs. */
static void multiply_pairs(const char *const x[PAIRS_AT_ONCE], int pairs, const char *w, const char *next, long size,
                           enum type type, float sums[PAIRS_AT_ONCE][OUTPUTS_OF_ITEM]) {
#define MULTIPLY(count, t) multiply_outputs(x, count, w, next, size, t, sums)
  if (type == BF16) switch (pairs) {
      case 1: MULTIPLY(1, BF16); return;
      case 2: MULTIPLY(2, BF16); return;
#if LANES == 16
      case 3: MULTIPLY(3, BF16); return;
      default: MULTIPLY(4, BF16); return;
#endif
    }
  switch (pairs) {
    case 1: MULTIPLY(1, F32); return;
    case 2: MULTIPLY(2, F32); return;
#if LANES == 16
    case 3: MULTIPLY(3, F32); return;
    default: MULTIPLY(4, F32); return;
#endif
  }
#undef MULTIPLY
}

/* A thread takes items in turn with the others, so its next item is likely as many items later as there are threads. */
INLINE const char *likely_next(const char *w, long bytes, const struct team *team) {
  return w + team->threads * OUTPUTS_OF_ITEM * bytes;
}

/* One item of experts_up: inner numbers first … first + OUTPUTS_OF_ITEM - 1 of one expert. */
INLINE void up_item(const struct experts_up_arguments *a, long expert, long first, const struct team *team) {
  enum type type = a->type;
  long width = a->width, inner = a->inner, bytes = width * bytes_of(type), bias = expert * 2 * inner + first;
  const int32_t *pairs = a->pairs, *offsets = a->offsets;
  const char *gates = (const char *)a->gate_up + (expert * 2 * inner + first) * bytes, *ups = gates + inner * bytes;
  const char *x = a->x;
  for (long at = offsets[expert]; at < offsets[expert + 1]; at += PAIRS_AT_ONCE) {
    int count = offsets[expert + 1] - at < PAIRS_AT_ONCE ? (int)(offsets[expert + 1] - at) : PAIRS_AT_ONCE;
    int is_first = at == offsets[expert]; /* later pairs find the weights in the cache */
    const char *from[PAIRS_AT_ONCE];
    for (int p = 0; p < count; p++) from[p] = x + pairs[at + p] / a->chosen * bytes;
    float of_gates[PAIRS_AT_ONCE][OUTPUTS_OF_ITEM], of_ups[PAIRS_AT_ONCE][OUTPUTS_OF_ITEM];
    multiply_pairs(from, count, gates, is_first ? ups : 0, width, type, of_gates);
    multiply_pairs(from, count, ups, is_first ? likely_next(gates, bytes, team) : 0, width, type, of_ups);
    for (int p = 0; p < count; p++)
      for (long j = 0; j < OUTPUTS_OF_ITEM; j += LANES) {
        vf gate = load(of_gates[p], j, F32), up = load(of_ups[p], j, F32);
        if (__builtin_expect(a->addend != 0, 0)) {
          const float *addend = a->addend + (at + p) * 2 * inner + first + j;
          gate += load(addend, 0, F32);
          up += load(addend, inner, F32);
        }
        if (a->bias) {
          gate += load(a->bias, bias + j, type);
          up += load(a->bias, bias + inner + j, type);
        }
        vf out = opened(rounded(gate, type), rounded(up, type), a->limit, a->slope, type);
        store(a->out, (at + p) * inner + first + j, out, type);
      }
  }
}

EXPORT void experts_up(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct experts_up_arguments *a = arguments;
  int32_t used[MAX_EXPERTS];
  long blocks = a->inner / OUTPUTS_OF_ITEM, items = list_experts(a->offsets, a->experts, used) * blocks;
  FOR_EACH_ITEM(item, items, 1, team) up_item(a, used[item / blocks], item % blocks * OUTPUTS_OF_ITEM, team);
}

/* One item of experts_down: outputs first … first + OUTPUTS_OF_ITEM - 1 of one expert. */
INLINE void down_item(const struct experts_down_arguments *a, long expert, long first, const struct team *team) {
  enum type type = a->type;
  long width = a->width, inner = a->inner, bytes = inner * bytes_of(type);
  const int32_t *pairs = a->pairs, *offsets = a->offsets;
  const char *w = (const char *)a->down + (expert * width + first) * bytes, *x = a->x;
  for (long at = offsets[expert]; at < offsets[expert + 1]; at += PAIRS_AT_ONCE) {
    int count = offsets[expert + 1] - at < PAIRS_AT_ONCE ? (int)(offsets[expert + 1] - at) : PAIRS_AT_ONCE;
    const char *from[PAIRS_AT_ONCE];
    for (int p = 0; p < count; p++) from[p] = x + (at + p) * bytes;
    float sums[PAIRS_AT_ONCE][OUTPUTS_OF_ITEM];
    multiply_pairs(from, count, w, at == offsets[expert] ? likely_next(w, bytes, team) : 0, inner, type, sums);
    for (int p = 0; p < count; p++) {
      vf score = rounded(splat(a->scores[pairs[at + p]]), type);
      for (long j = 0; j < OUTPUTS_OF_ITEM; j += LANES) {
        vf sum = load(sums[p], j, F32);
        if (__builtin_expect(a->addend != 0, 0)) sum += load(a->addend, (at + p) * width + first + j, F32);
        if (a->bias) sum += load(a->bias, expert * width + first + j, type);
        store(a->out, pairs[at + p] * width + first + j, rounded(sum, type) * score, type);
      }
    }
  }
}

EXPORT void experts_down(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct experts_down_arguments *a = arguments;
  int32_t used[MAX_EXPERTS];
  long blocks = a->width / OUTPUTS_OF_ITEM, items = list_experts(a->offsets, a->experts, used) * blocks;
  FOR_EACH_ITEM(item, items, 1, team) down_item(a, used[item / blocks], item % blocks * OUTPUTS_OF_ITEM, team);
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
    float sum = lane_sum(product);
    if (a->addend) sum += a->addend[t * a->addend_stride];
    float score = 1.0f / (1.0f + expf(-sum));
    for (long i = t * width; i < (t + 1) * width; i += LANES)
      store(x, i, load(x, i, type) + load(y, i, type) * score, type);
  }
}
