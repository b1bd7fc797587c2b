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
    ADD(2);
    ADD(3);
#if LANES >= 8
    ADD(4);
    ADD(5);
    ADD(6);
#endif
#if LANES == 16
    ADD(7);
    ADD(8);
    ADD(9);
    ADD(10);
    ADD(11);
    ADD(12);
#endif
  }
#undef ADD
}

/* One item of the work: a block of rows and a pair of panels. `next` is the pair of the thread's next item. */
static void multiply_block(const struct product *g, const struct row_block *b, long pair, long next) {
  float sums[MAX_BLOCK][PAIR_OUTPUTS] __attribute__((aligned(64)));
  long number = g->is_int8 ? 1 : 2, panel_bytes = g->k * PANEL_OUTPUTS * number, pair_bytes = 2 * panel_bytes;
  const char *w = (const char *)g->weights + pair * pair_bytes;
  memset(sums, 0, b->rows * sizeof *sums);
  long part = b->groups == 1 ? g->k : INPUTS_OF_PART;
  for (long i = 0; i < g->k; i += part) {
    long inputs = g->k - i < part ? g->k - i : part;
    for (long group = 0; group < b->groups; group++) {
      long from = first_of_group(b, group), count = first_of_group(b, group + 1) - from;
      /* The first group reads the weights; the second one prefetches those of the next item. */
      long ahead = group == 1 ? (next - pair) * pair_bytes : AHEAD_BYTES;
      add_inputs_of_group(b->x + from * g->k + i * count, count, w + i * PANEL_OUTPUTS * number, panel_bytes, inputs,
                          g->is_int8, ahead, sums + from);
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
      widen_block(g, &b);
    }
    multiply_block(g, &b, item % pairs, next < count ? next % pairs : item % pairs);
  }
}

#endif
