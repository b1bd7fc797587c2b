/* Blocks of rows of x as float32, for products whose weights become float32 in registers. Each thread makes its own
   copy of a block, of which it computes some outputs. A block is divided into groups, whose sums fit the registers; the
   numbers of a group are stored input by input, [inputs][rows of the group]. */
#pragma once

#include "product.h"
#include "words.h"

#define PANEL_VECTORS (PANEL_OUTPUTS / LANES)
#define GROUP_ROWS (LANES == 16 ? 12 : LANES == 8 ? 6 : 3) /* most rows of a group */
#define SQUARES ((GROUP_ROWS + LANES - 1) / LANES)         /* squares of LANES rows by LANES inputs in a group */
#define MIN_BLOCK 24                                       /* rows of a block: at least, if there are as many ... */
#define MAX_BLOCK 96                                       /* ... and at most */
#define BLOCK_NUMBERS 65536                                /* numbers of x in a block, unless it is the smallest */

/* Rows first … first + rows - 1 of x in groups of nearly equal sizes. */
struct row_block {
  long first, rows, groups;
  float *x;
};

INLINE long first_of_group(const struct row_block *b, long group) { return group * b->rows / b->groups; }

/* The number of vectors of a pair of panels, a power of two, whose sums fit the registers for `rows` rows. */
INLINE int vectors_at_once(int rows) {
  int count = 2 * PANEL_VECTORS;
  while (count > 1 && count * rows > SUM_VECTORS) count /= 2;
  return count;
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

/* The number of blocks of x, of nearly equal sizes. */
static long count_blocks(long m, long k) {
  long most = BLOCK_NUMBERS / k;
  most = most < MIN_BLOCK ? MIN_BLOCK : most > MAX_BLOCK ? MAX_BLOCK : most;
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
