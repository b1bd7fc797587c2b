/* What adapters add to linear layers. The bits of a token depend on the token and its adapter only: every product is
   summed in an order of its own. */
#include "team.h"
#include "vectors.h"

#define RANKS_AT_ONCE 4      /* numbers of hidden that are computed together, so that x is read once for them */
#define COLUMNS_OF_ITEM 1024 /* outputs that a thread takes at a time */
#define VECTORS_AT_ONCE 4
/* Tokens of one adapter that are computed together, so that its numbers are read once for them. */
#define ADAPTED_AT_ONCE (LANES < 16 ? 2 : 4)
#define MOST_TOKENS 4

/* How many tokens the item of token t computes: a whole block, if t is its first token and all have one adapter; none,
   if t is another token of such a block. */
static int tokens_of_item(const int32_t *slots, long t, long tokens) {
  long first = t / ADAPTED_AT_ONCE * ADAPTED_AT_ONCE;
  if (first + ADAPTED_AT_ONCE > tokens) return 1;
  for (int i = 1; i < ADAPTED_AT_ONCE; i++)
    if (slots[first + i] != slots[first]) return 1;
  return t == first ? ADAPTED_AT_ONCE : 0;
}

/* Some rows of `down`, and what they are multiplied with: hidden[t][r] = x[t] times row r. */
struct token_ranks {
  const char *x[MOST_TOKENS];
  const char *down;
  float *hidden[MOST_TOKENS];
  long inputs;
};

INLINE void multiply_ranks(const struct token_ranks *of, enum type type, int ranks, int tokens) {
  long bytes = of->inputs * bytes_of(type);
  vf sums[MOST_TOKENS][RANKS_AT_ONCE] = {};
  for (long i = 0; i < of->inputs; i += LANES) {
    vf down[RANKS_AT_ONCE];
#pragma GCC unroll 4
    for (int r = 0; r < ranks; r++) down[r] = load(of->down + r * bytes, i, type);
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++) {
      vf x = load(of->x[t], i, type);
#pragma GCC unroll 4
      for (int r = 0; r < ranks; r++) sums[t][r] = multiply_add(x, down[r], sums[t][r]);
    }
  }
  for (int t = 0; t < tokens; t++)
    for (int r = 0; r < ranks; r++) of->hidden[t][r] = lane_sum(sums[t][r]);
}

INLINE void multiply_all(struct token_ranks of, enum type type, long ranks, int tokens) {
  if (ranks >= RANKS_AT_ONCE) {
    multiply_ranks(&of, type, RANKS_AT_ONCE, tokens);
    return;
  }
  for (long r = 0; r < ranks; r++) {
    multiply_ranks(&of, type, 1, tokens);
    of.down += of.inputs * bytes_of(type);
    for (int t = 0; t < tokens; t++) of.hidden[t]++;
  }
}

static void multiply_any(const struct token_ranks *of, enum type type, long ranks, int tokens) {
  if (type == F32)
    tokens > 1 ? multiply_all(*of, F32, ranks, ADAPTED_AT_ONCE) : multiply_all(*of, F32, ranks, 1);
  else
    tokens > 1 ? multiply_all(*of, BF16, ranks, ADAPTED_AT_ONCE) : multiply_all(*of, BF16, ranks, 1);
}

EXPORT void adapt_down(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct adapt_down_arguments *a = arguments;
  enum type type = (enum type)a->type;
  long rank = a->rank, parts = a->parts, bytes = a->inputs * bytes_of(type);
  long groups = (rank + RANKS_AT_ONCE - 1) / RANKS_AT_ONCE;
  FOR_EACH_ITEM(item, a->tokens * parts * groups, 1, team) {
    long first = item / (parts * groups), part = item / groups % parts, group = item % groups * RANKS_AT_ONCE;
    long slot = a->slots[first];
    int tokens = slot < 0 ? 0 : tokens_of_item(a->slots, first, a->tokens);
    if (!tokens) continue;
    long left = a->ranks[slot * parts + part] - group, at = part * rank + group;
    if (left <= 0) continue;
    struct token_ranks of = {.down = (const char *)a->down + (slot * parts * rank + at) * bytes, .inputs = a->inputs};
    for (int i = 0; i < tokens; i++) {
      long t = first + i, row = a->pairs ? a->pairs[t] / a->chosen : t;
      of.x[i] = (const char *)a->x + row * bytes;
      of.hidden[i] = a->hidden + t * parts * rank + at;
    }
    multiply_any(&of, type, left, tokens);
  }
}

EXPORT void pair_slots(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct pair_slots_arguments *a = arguments;
  FOR_EACH_ITEM(e, a->experts, 8, team) {
    for (long p = a->offsets[e]; p < a->offsets[e + 1]; p++) {
      int32_t slot = a->slots[a->pairs[p] / a->chosen];
      a->out[p] = slot < 0 ? -1 : slot * (int32_t)a->experts + (int32_t)e;
    }
  }
}

EXPORT void adapt_ids(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct adapt_ids_arguments *a = arguments;
  enum type type = (enum type)a->type;
  FOR_EACH_ITEM(t, a->tokens, 1, team) {
    if (a->slots[t] < 0) continue;
    const char *down = (const char *)a->down + (a->slots[t] * a->vocabulary + a->ids[t]) * a->rank * bytes_of(type);
    for (long r = 0; r < a->rank; r += LANES) store(a->hidden + t * a->rank, r, load(down, r, type), F32);
  }
}

/* What the columns of tokens of one adapter are made of. */
struct token_columns {
  const float *hidden[MOST_TOKENS]; /* the part's numbers */
  const void *base[MOST_TOKENS];    /* or null */
  void *out[MOST_TOKENS];
  const void *up;
  const float *bias; /* or null */
  long columns;
  long rank;
};

/* out[t][n …] = base[t] + (bias + sum over r of hidden[t][r] * up[r][n …]), for `vectors` vectors of columns. */
INLINE void multiply_columns(const struct token_columns *of, enum type type, long n, int vectors, int tokens) {
  vf sums[MOST_TOKENS][VECTORS_AT_ONCE];
#pragma GCC unroll 4
  for (int t = 0; t < tokens; t++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) sums[t][v] = of->bias ? load(of->bias, n + v * LANES, F32) : -(vf){};
  for (long r = 0; r < of->rank; r++) {
    vf up[VECTORS_AT_ONCE];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) up[v] = load(of->up, r * of->columns + n + v * LANES, type);
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) sums[t][v] = multiply_add(splat(of->hidden[t][r]), up[v], sums[t][v]);
  }
#pragma GCC unroll 4
  for (int t = 0; t < tokens; t++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
      if (of->base[t])
        store(of->out[t], n + v * LANES, load(of->base[t], n + v * LANES, type) + sums[t][v], type);
      else
        store(of->out[t], n + v * LANES, sums[t][v], F32);
    }
}

INLINE void adapt_columns(const struct adapt_up_arguments *a, long first, long from, long to, enum type type,
                          int tokens) {
  long slot = a->slots[first], parts = a->parts, columns = a->columns, part = 0, bytes = columns * bytes_of(type);
  struct token_columns of = {.columns = columns};
  for (int i = 0; i < tokens; i++) {
    long t = first + i;
    of.out[i] = (char *)a->out + t * (a->base ? bytes : columns * 4);
    if (a->base) of.base[i] = (const char *)a->base + t * bytes;
  }
  if (slot >= 0) {
    of.up = (const char *)a->up + slot * a->rank * bytes;
    if (a->bias) of.bias = a->bias + slot * columns;
  }
  for (long n = from; n < to;) {
    while (n >= a->ends[part]) part++;
    long end = a->ends[part] < to ? a->ends[part] : to;
    of.rank = slot < 0 ? 0 : a->ranks[slot * parts + part];
    for (int i = 0; i < tokens; i++) of.hidden[i] = a->hidden + ((first + i) * parts + part) * a->rank;
    for (; n + VECTORS_AT_ONCE * LANES <= end; n += VECTORS_AT_ONCE * LANES)
      multiply_columns(&of, type, n, VECTORS_AT_ONCE, tokens);
    for (; n < end; n += LANES) multiply_columns(&of, type, n, 1, tokens);
  }
}

EXPORT void adapt_up(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct adapt_up_arguments *a = arguments;
  long pieces = (a->columns + COLUMNS_OF_ITEM - 1) / COLUMNS_OF_ITEM;
  FOR_EACH_ITEM(item, a->tokens * pieces, 1, team) {
    long t = item / pieces, from = item % pieces * COLUMNS_OF_ITEM;
    long to = from + COLUMNS_OF_ITEM < a->columns ? from + COLUMNS_OF_ITEM : a->columns;
    int tokens = tokens_of_item(a->slots, t, a->tokens);
    if (tokens == 1)
      a->type == F32 ? adapt_columns(a, t, from, to, F32, 1) : adapt_columns(a, t, from, to, BF16, 1);
    else if (tokens)
      a->type == F32 ? adapt_columns(a, t, from, to, F32, ADAPTED_AT_ONCE)
                     : adapt_columns(a, t, from, to, BF16, ADAPTED_AT_ONCE);
  }
}
