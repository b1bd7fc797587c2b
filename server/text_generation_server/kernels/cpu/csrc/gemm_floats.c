/* The same product on processors without a dot-product instruction for bfloat16: weights become float32 in registers,
   right before they are multiplied.

   Each sum begins with 0 and gets its inputs from first to last, one fused multiplication at a time. So a row of y has
   the same bits for any number of rows and of threads.

   x becomes float32 first: see float_rows.h. */
#include "vectors.h"

#if defined(__SSE2__) && !defined(__AVX512BF16__)

#include "float_rows.h"

#define INPUTS_OF_PART 1024 /* inputs of some panels that all groups of a block use before the next inputs */
#define AHEAD_BYTES 2048    /* bytes between the weights in use and the weights that are prefetched */

/* LANES words of a line of a panel as float32: LANES weights of an even input, and of the odd input after it. */
INLINE void widen_words(const char *words, int is_int8, vf *even, vf *odd) {
  if (is_int8) {
    vi both = load_i16(words);
    *even = __builtin_convertvector(both << 24 >> 24, vf);
    *odd = __builtin_convertvector(both >> 8, vf);
  } else {
    vu both;
    memcpy(&both, words, sizeof both);
    *even = vf_bits(both << 16);
    *odd = vf_bits(both & 0xffff0000);
  }
}

/* sums += `inputs` inputs of `rows` rows of x times as many of `count` vectors of outputs, from the vector `first` of a
   pair of panels on, which are panel_bytes apart. The weights `ahead` bytes further are prefetched. */
INLINE void add_inputs_of_vectors(const float *x, int rows, const char *w, int first, int count, long panel_bytes,
                                  long inputs, int is_int8, long ahead, float sums[][PAIR_OUTPUTS]) {
  vf in_registers[GROUP_ROWS][2 * PANEL_VECTORS];
  long word = is_int8 ? 2 : 4, line = word * PANEL_OUTPUTS;
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < count; v++) in_registers[r][v] = load(sums[r], (first + v) * LANES, F32);
  for (long i = 0; i < inputs; i += 2, w += line, x += 2 * rows) {
    vf even[2 * PANEL_VECTORS], odd[2 * PANEL_VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < count; v++) {
      const char *panel = w + (first + v) / PANEL_VECTORS * panel_bytes;
      if ((first + v) % PANEL_VECTORS == 0) __builtin_prefetch(panel + ahead);
      widen_words(panel + (first + v) % PANEL_VECTORS * LANES * word, is_int8, &even[v], &odd[v]);
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
      for (int v = 0; v < count; v++) in_registers[r][v] = multiply_add(splat(x[r]), even[v], in_registers[r][v]);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
      for (int v = 0; v < count; v++) in_registers[r][v] = multiply_add(splat(x[rows + r]), odd[v], in_registers[r][v]);
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < count; v++) store(sums[r], (first + v) * LANES, in_registers[r][v], F32);
}

/* The same for a pair of panels and a known number of rows. */
INLINE void add_inputs_of_pair(const float *x, int rows, const char *w, long panel_bytes, long inputs, int is_int8,
                               long ahead, float sums[][PAIR_OUTPUTS]) {
  int count = vectors_at_once(rows);
#pragma GCC unroll 4
  for (int first = 0; first < 2 * PANEL_VECTORS; first += count)
    add_inputs_of_vectors(x, rows, w, first, count, panel_bytes, inputs, is_int8, ahead, sums);
}

/* Calls add_inputs_of_pair; the compiler makes a copy of it for each number of rows and each type of weights. */
static void add_inputs_of_group(const float *x, long rows, const char *w, long panel_bytes, long inputs, int is_int8,
                                long ahead, float sums[][PAIR_OUTPUTS]) {
#define ADD(ROWS)                                                          \
  case ROWS:                                                               \
    if (is_int8)                                                           \
      add_inputs_of_pair(x, ROWS, w, panel_bytes, inputs, 1, ahead, sums); \
    else                                                                   \
      add_inputs_of_pair(x, ROWS, w, panel_bytes, inputs, 0, ahead, sums); \
    break
  switch (rows) {
    ADD(1);
    EACH_GROUP(ADD);
  }
#undef ADD
}

/* Widens `inputs` inputs of a pair of panels of int8 into `kept`. */
static void keep_inputs(const char *w, long panel_bytes, long inputs, float *kept) {
  for (long i = 0; i < inputs; i += 2, w += 2 * PANEL_OUTPUTS, kept += 2 * PAIR_OUTPUTS)
#pragma GCC unroll 8
    for (int v = 0; v < 2 * PANEL_VECTORS; v++) {
      vf even, odd;
      widen_words(w + v / PANEL_VECTORS * panel_bytes + 2 * (v % PANEL_VECTORS * LANES), 1, &even, &odd);
      store(kept, v * LANES, even, F32);
      store(kept, PAIR_OUTPUTS + v * LANES, odd, F32);
    }
}

/* The same as add_inputs_of_pair, with weights that are kept. */
INLINE void add_kept_to_rows(const float *x, int rows, const float *kept, long inputs, const char *ahead, long line,
                             float sums[][PAIR_OUTPUTS]) {
  int count = vectors_at_once(rows);
#pragma GCC unroll 4
  for (int first = 0; first < 2 * PANEL_VECTORS; first += count) {
    vf in_registers[GROUP_ROWS][2 * PANEL_VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
      for (int v = 0; v < count; v++) in_registers[r][v] = load(sums[r], (first + v) * LANES, F32);
    add_kept(in_registers, x, rows, kept + first * LANES, count, inputs, 1, 0, ahead, line);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
      for (int v = 0; v < count; v++) store(sums[r], (first + v) * LANES, in_registers[r][v], F32);
  }
}

static void add_kept_to_group(const float *x, long rows, const float *kept, long inputs, const char *ahead, long line,
                              float sums[][PAIR_OUTPUTS]) {
#define ADD_KEPT(ROWS) \
  case ROWS: add_kept_to_rows(x, ROWS, kept, inputs, ahead, line, sums); break
  switch (rows) { EACH_GROUP(ADD_KEPT); }
#undef ADD_KEPT
}

/* sums = a block of rows times a pair of panels of int8, whose numbers are widened once for several groups. */
static void multiply_kept_block(const struct row_block *b, const char *w, long k, float sums[][PAIR_OUTPUTS]) {
  float kept[KEPT_INPUTS * PAIR_OUTPUTS] __attribute__((aligned(64)));
  for (long i = 0; i < k; i += KEPT_INPUTS, w += KEPT_INPUTS * PANEL_OUTPUTS) {
    long inputs = k - i < KEPT_INPUTS ? k - i : KEPT_INPUTS;
    keep_inputs(w, k * PANEL_OUTPUTS, inputs, kept);
    for (long group = 0; group < b->groups; group++) {
      long from = first_of_group(b, group), count = first_of_group(b, group + 1) - from;
      /* The first two groups prefetch the next part of one panel each. */
      const char *ahead = w + KEPT_INPUTS * PANEL_OUTPUTS + group * k * PANEL_OUTPUTS;
      add_kept_to_group(b->x + i * b->rows + from * inputs, count, kept, inputs, group < 2 ? ahead : (char *)kept,
                        group < 2 ? PANEL_OUTPUTS : 0, sums + from);
    }
  }
}

/* One item of the work: a block of rows and a pair of panels. `next` is the pair of the thread's next item. */
static void multiply_block(const struct product *g, const struct row_block *b, long pair, long next) {
  float sums[MAX_BLOCK][PAIR_OUTPUTS] __attribute__((aligned(64)));
  long number = g->is_int8 ? 1 : 2, panel_bytes = g->k * PANEL_OUTPUTS * number, pair_bytes = 2 * panel_bytes;
  const char *w = (const char *)g->weights + pair * pair_bytes;
  memset(sums, 0, b->rows * sizeof *sums);
  long part = b->groups == 1 ? g->k : INPUTS_OF_PART;
  if (g->is_int8 && b->groups > 1)
    multiply_kept_block(b, w, g->k, sums);
  else
    for (long i = 0; i < g->k; i += part) {
      long inputs = g->k - i < part ? g->k - i : part;
      for (long group = 0; group < b->groups; group++) {
        long from = first_of_group(b, group), count = first_of_group(b, group + 1) - from;
        /* The first group reads the weights; the second one prefetches those of the next item. */
        long ahead = group == 1 ? (next - pair) * pair_bytes : AHEAD_BYTES;
        add_inputs_of_group(b->x + i * b->rows + from * inputs, count, w + i * PANEL_OUTPUTS * number, panel_bytes,
                            inputs, g->is_int8, ahead, sums + from);
      }
    }
  for (long r = 0; r < b->rows; r++)
    for (long at = 0; at < PANEL_OUTPUTS; at += LANES)
      store_pair(g, b->first + r, pair, at, load(sums[r], at, F32), load(sums[r], PANEL_OUTPUTS + at, F32));
}

long numbers_for_floats(long m, long k, int threads) { return 2 * threads * widened_numbers(m, k); }

void multiply_in_floats(const struct product *g, struct team *team, int me) {
  long pairs = g->n / PAIR_OUTPUTS, blocks = count_blocks(g->m, g->k), count = blocks * pairs, widened = -1;
  float *own = (float *)g->scratch + me * widened_numbers(g->m, g->k);
  struct row_block b;
  /* Each thread takes its next item before it computes the current one, so that it knows which weights to prefetch. */
  for (long item = take_items(team, 1), next; item < count; item = next) {
    next = take_items(team, 1);
    if (item / pairs != widened) {
      widened = item / pairs;
      b = block_at(g, blocks, widened);
      b.x = own;
      widen_block(g, &b, b.groups == 1 ? g->k : g->is_int8 ? KEPT_INPUTS : INPUTS_OF_PART);
    }
    multiply_block(g, &b, item % pairs, next < count ? next % pairs : item % pairs);
  }
}

#endif
