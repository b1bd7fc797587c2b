/* Blocks of rows of x as float32, for products whose weights become float32 first. Each thread makes its own copy of a
   block, of which it computes some outputs. A block is divided into groups, whose sums fit the registers; the numbers
   of a group are stored input by input, [inputs][rows of the group].

   Weights of a few rows become float32 in registers. For more rows those of KEPT_INPUTS inputs of a pair of panels are
   kept in the nearest cache, [inputs][32 outputs]. */
#pragma once

#include "product.h"
#include "words.h"

#define PANEL_VECTORS (PANEL_OUTPUTS / LANES)
#define GROUP_ROWS (LANES == 16 ? 12 : LANES == 8 ? 6 : 3) /* most rows of a group */
#define SQUARES ((GROUP_ROWS + LANES - 1) / LANES)         /* squares of LANES rows by LANES inputs in a group */
#define KEPT_INPUTS 128                                    /* weights that are kept fill half of the nearest cache */
#define MIN_BLOCK 24                                       /* rows of a block: at least, if there are as many ... */
#define MAX_BLOCK 96                                       /* ... and at most */
#define BLOCK_NUMBERS 65536                                /* numbers of x in a block, unless it is the smallest */

/* Calls a macro for each number of rows of a group, if it has more than one. */
#if LANES == 16
#define EACH_GROUP(DO) \
  DO(2);               \
  DO(3);               \
  DO(4);               \
  DO(5);               \
  DO(6);               \
  DO(7);               \
  DO(8);               \
  DO(9);               \
  DO(10);              \
  DO(11);              \
  DO(12)
#elif LANES == 8
#define EACH_GROUP(DO) \
  DO(2);               \
  DO(3);               \
  DO(4);               \
  DO(5);               \
  DO(6)
#else
#define EACH_GROUP(DO) \
  DO(2);               \
  DO(3)
#endif

/* Rows first … first + rows - 1 of x in groups of nearly equal sizes. */
struct row_block {
  long first, rows, groups;
  float *x;
};

INLINE long count_groups(long rows) { return (rows + GROUP_ROWS - 1) / GROUP_ROWS; }

INLINE long first_of_group(const struct row_block *b, long group) { return group * b->rows / b->groups; }

/* The number of vectors of a pair of panels, a power of two, whose sums fit the registers for `rows` rows. */
INLINE int vectors_at_once(int rows) {
  int count = 2 * PANEL_VECTORS;
  while (count > 1 && count * rows > SUM_VECTORS) count /= 2;
  return count;
}

/* Copies LANES inputs of `rows` rows of x, which are `stride` bytes apart, as float32: input by input. Writes up to
   LANES numbers past the last one. */
INLINE void widen_inputs(const char *x, enum type type, long stride, long rows, float *to) {
  vf numbers[SQUARES][LANES] = {};
  for (long r = 0; r < rows; r++) numbers[r / LANES][r % LANES] = load(x + r * stride, 0, type);
  if (rows == 1) {
    store(to, 0, numbers[0][0], F32);
    return;
  }
  for (long square = 0; square * LANES < rows; square++) transpose(numbers[square]);
  for (long j = 0; j < LANES; j++)
    for (long square = 0; square * LANES < rows; square++)
      store(to, j * rows + square * LANES, numbers[square][j], F32);
}

/* sums[r][v] += `words` words of each of `rows` rows of x times `count` vectors of weights that are kept. The words are
   `step` inputs apart, and pairs of bfloat16 or, if `pairs` is 0, float32. For each word, the next `line` bytes of what
   is widened after this are prefetched: memory is read while rows are multiplied. Returns where these bytes end. */
INLINE const char *add_kept(vf sums[][2 * PANEL_VECTORS], const float *x, int rows, const float *w, int count,
                            long words, long step, int pairs, const char *ahead, long line) {
  for (; words > 0; words--, x += step * rows, w += step * PAIR_OUTPUTS, ahead += line) {
    __builtin_prefetch(ahead, 0, AHEAD_CACHE);
    vf weights[2 * PANEL_VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < count; v++) weights[v] = load(w, v * LANES, F32);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
      for (int v = 0; v < count; v++) sums[r][v] = add_word(sums[r][v], weights[v], x + r, pairs);
  }
  return ahead;
}

/* Copies a block of x as float32: all groups of the first `part` inputs, then those of the next ones, so that a product
   reads it from front to back. */
INLINE void widen_block(const struct product *g, const struct row_block *b, long part) {
  for (long start = 0; start < g->k; start += part)
    for (long group = 0; group < b->groups; group++) {
      long from = first_of_group(b, group), rows = first_of_group(b, group + 1) - from;
      long inputs = g->k - start < part ? g->k - start : part;
      float *to = b->x + start * b->rows + from * inputs;
      for (long i = 0; i < inputs; i += LANES)
        widen_inputs((const char *)(g->x + (b->first + from) * g->k + start + i), BF16, 2 * g->k, rows, to + i * rows);
    }
}

/* The number of blocks of x, of nearly equal sizes. */
INLINE long count_blocks(long m, long k) {
  long most = BLOCK_NUMBERS / k;
  most = most < MIN_BLOCK ? MIN_BLOCK : most > MAX_BLOCK ? MAX_BLOCK : most;
  return (m + most - 1) / most;
}

INLINE struct row_block block_at(const struct product *g, long blocks, long block) {
  long first = block * g->m / blocks, rows = (block + 1) * g->m / blocks - first;
  return (struct row_block){first, rows, count_groups(rows), 0};
}

/* float32 numbers of scratch memory for each thread. */
INLINE long widened_numbers(long m, long k) {
  long blocks = count_blocks(m, k);
  return (m + blocks - 1) / blocks * k + LANES;
}
