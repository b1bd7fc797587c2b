/* What adapters add to linear layers. The bits of a token depend on the token and its adapter only: every product is
   summed in an order of its own. */
#include "team.h"
#include "vectors.h"

#define RANKS_AT_ONCE 4      /* numbers of hidden that are computed together, so that x is read once for them */
#define COLUMNS_OF_ITEM 1024 /* outputs that a thread takes at a time */
#define VECTORS_AT_ONCE 4

/* hidden[0 … count - 1] = the products of x with as many rows of `down`. */
INLINE void multiply_ranks(const void *x, const char *down, long inputs, enum type type, int count, float *hidden) {
  long bytes = inputs * bytes_of(type);
  vf sums[RANKS_AT_ONCE] = {};
  for (long i = 0; i < inputs; i += LANES) {
    vf v = load(x, i, type);
#pragma GCC unroll 4
    for (int r = 0; r < count; r++) sums[r] = multiply_add(v, load(down + r * bytes, i, type), sums[r]);
  }
  for (int r = 0; r < count; r++) hidden[r] = lane_sum(sums[r]);
}

static void multiply_any(const void *x, const char *down, long inputs, enum type type, long count, float *hidden) {
  long bytes = inputs * bytes_of(type);
  if (count >= RANKS_AT_ONCE) {
    if (type == F32)
      multiply_ranks(x, down, inputs, F32, RANKS_AT_ONCE, hidden);
    else
      multiply_ranks(x, down, inputs, BF16, RANKS_AT_ONCE, hidden);
    return;
  }
  for (long r = 0; r < count; r++) {
    if (type == F32)
      multiply_ranks(x, down + r * bytes, inputs, F32, 1, hidden + r);
    else
      multiply_ranks(x, down + r * bytes, inputs, BF16, 1, hidden + r);
  }
}

EXPORT void adapt_down(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct adapt_down_arguments *a = arguments;
  enum type type = (enum type)a->type;
  long rank = a->rank, parts = a->parts, bytes = a->inputs * bytes_of(type);
  long groups = (rank + RANKS_AT_ONCE - 1) / RANKS_AT_ONCE;
  FOR_EACH_ITEM(item, a->tokens * parts * groups, 1, team) {
    long t = item / (parts * groups), part = item / groups % parts, first = item % groups * RANKS_AT_ONCE;
    long slot = a->slots[t];
    if (slot < 0) continue;
    long left = a->ranks[slot * parts + part] - first, at = part * rank + first;
    if (left <= 0) continue;
    long row = a->pairs ? a->pairs[t] / a->chosen : t;
    multiply_any((const char *)a->x + row * bytes, (const char *)a->down + (slot * parts * rank + at) * bytes,
                 a->inputs, type, left, a->hidden + t * parts * rank + at);
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

/* What the columns of one token are made of. */
struct token_columns {
  const float *hidden; /* the part's numbers */
  const void *up;
  const float *bias; /* or null */
  const void *base;  /* or null */
  long columns;
  long rank;
  void *out;
};

/* out[n …] = base + (bias + sum over r of hidden[r] * up[r][n …]), for `vectors` vectors of columns. */
INLINE void multiply_columns(const struct token_columns *of, enum type type, long n, int vectors) {
  vf sums[VECTORS_AT_ONCE];
  for (int v = 0; v < vectors; v++) sums[v] = of->bias ? load(of->bias, n + v * LANES, F32) : -(vf){};
  for (long r = 0; r < of->rank; r++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
      sums[v] = multiply_add(splat(of->hidden[r]), load(of->up, r * of->columns + n + v * LANES, type), sums[v]);
  for (int v = 0; v < vectors; v++) {
    if (of->base)
      store(of->out, n + v * LANES, load(of->base, n + v * LANES, type) + sums[v], type);
    else
      store(of->out, n + v * LANES, sums[v], F32);
  }
}

INLINE void adapt_columns(const struct adapt_up_arguments *a, long t, long from, long to, enum type type) {
  long slot = a->slots[t], parts = a->parts, columns = a->columns, part = 0, bytes = columns * bytes_of(type);
  const float *hidden = a->hidden + t * parts * a->rank;
  struct token_columns of = {.columns = columns, .out = (char *)a->out + t * (a->base ? bytes : columns * 4)};
  if (a->base) of.base = (const char *)a->base + t * bytes;
  if (slot >= 0) {
    of.up = (const char *)a->up + slot * a->rank * bytes;
    if (a->bias) of.bias = a->bias + slot * columns;
  }
  for (long n = from; n < to;) {
    while (n >= a->ends[part]) part++;
    long end = a->ends[part] < to ? a->ends[part] : to;
    of.rank = slot < 0 ? 0 : a->ranks[slot * parts + part];
    of.hidden = hidden + part * a->rank;
    for (; n + VECTORS_AT_ONCE * LANES <= end; n += VECTORS_AT_ONCE * LANES)
      multiply_columns(&of, type, n, VECTORS_AT_ONCE);
    for (; n < end; n += LANES) multiply_columns(&of, type, n, 1);
  }
}

EXPORT void adapt_up(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct adapt_up_arguments *a = arguments;
  long pieces = (a->columns + COLUMNS_OF_ITEM - 1) / COLUMNS_OF_ITEM;
  FOR_EACH_ITEM(item, a->tokens * pieces, 1, team) {
    long t = item / pieces, from = item % pieces * COLUMNS_OF_ITEM;
    long to = from + COLUMNS_OF_ITEM < a->columns ? from + COLUMNS_OF_ITEM : a->columns;
    if (a->type == F32)
      adapt_columns(a, t, from, to, F32);
    else
      adapt_columns(a, t, from, to, BF16);
  }
}
