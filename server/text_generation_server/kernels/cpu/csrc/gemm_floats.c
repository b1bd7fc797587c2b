/* The same product on processors without a dot-product instruction for bfloat16: weights become float32 in registers,
   right before they are multiplied.

   Each sum begins with 0 and gets its inputs from first to last, one fused multiplication at a time. So a row of y has
   the same bits for any number of rows and of threads.

   x becomes float32 first. Each thread makes its own copy of a block of rows, of which it computes some outputs. A
   block is divided into groups, whose sums fit the registers; the numbers of a group are stored input by input,
   [inputs][rows of the group]. */
#include "vectors.h"

#if defined(__SSE2__) && !defined(__AVX512BF16__)

#include "product.h"
#include "words.h"

#define PANEL_VECTORS (PANEL_OUTPUTS / LANES)
#define GROUP_ROWS (LANES == 16 ? 12 : LANES == 8 ? 6 : 3) /* most rows of a group */
#define SQUARES ((GROUP_ROWS + LANES - 1) / LANES)         /* squares of LANES rows by LANES inputs in a group */
#define LEAST_BLOCK 24                                     /* rows of a block: at least, if there are as many ... */
#define MOST_BLOCK 96                                      /* ... and at most */
#define BLOCK_NUMBERS 65536                                /* numbers of x in a block, unless it is the smallest */
#define INPUTS_OF_PART 1024 /* inputs of some panels that all groups of a block use before the next inputs */
#define AHEAD_BYTES 2048    /* bytes between the weights in use and the weights that are prefetched */

/* Rows first … first + rows - 1 of x in groups of nearly equal sizes. */
struct row_block {
  long first, rows, groups;
  float *x;
};

INLINE long first_of_group(const struct row_block *b, long group) { return group * b->rows / b->groups; }

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

/* The number of vectors of a pair of panels, a power of two, whose sums fit the registers for `rows` rows. */
INLINE int vectors_at_once(int rows) {
  int count = 2 * PANEL_VECTORS;
  while (count > 1 && count * rows > SUM_VECTORS) count /= 2;
  return count;
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

/* Copies LANES inputs of `rows` rows of x, which are k apart, as float32: input by input. Writes up to LANES numbers
   past the last one. */
INLINE void widen_inputs(const bf16 *x, long k, long rows, float *to) {
  vf numbers[SQUARES][LANES] = {};
  for (long r = 0; r < rows; r++) numbers[r / LANES][r % LANES] = load_bf16(x + r * k);
  if (rows == 1) {
    store(to, 0, numbers[0][0], F32);
    return;
  }
  for (long square = 0; square * LANES < rows; square++) transpose(numbers[square]);
  for (long j = 0; j < LANES; j++)
    for (long square = 0; square * LANES < rows; square++)
      store(to, j * rows + square * LANES, numbers[square][j], F32);
}

/* Copies a block of x as float32, group by group. */
static void widen_block(const struct product *g, const struct row_block *b) {
  for (long group = 0; group < b->groups; group++) {
    long from = first_of_group(b, group), rows = first_of_group(b, group + 1) - from;
    for (long i = 0; i < g->k; i += LANES)
      widen_inputs(g->x + (b->first + from) * g->k + i, g->k, rows, b->x + from * g->k + i * rows);
  }
}

/* One item of the work: a block of rows and a pair of panels. `next` is the pair of the thread's next item. */
static void multiply_block(const struct product *g, const struct row_block *b, long pair, long next) {
  float sums[MOST_BLOCK][PAIR_OUTPUTS] __attribute__((aligned(64)));
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

/* The number of blocks of x, of nearly equal sizes. */
static long count_blocks(long m, long k) {
  long most = BLOCK_NUMBERS / k;
  most = most < LEAST_BLOCK ? LEAST_BLOCK : most > MOST_BLOCK ? MOST_BLOCK : most;
  return (m + most - 1) / most;
}

static struct row_block block_at(const struct product *g, long blocks, long block) {
  long first = block * g->m / blocks, rows = (block + 1) * g->m / blocks - first;
  return (struct row_block){first, rows, (rows + GROUP_ROWS - 1) / GROUP_ROWS, 0};
}

/* float32 numbers of scratch memory for each thread. */
static long widened_numbers(long m, long k) {
  long blocks = count_blocks(m, k);
  return (m + blocks - 1) / blocks * k + LANES;
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
