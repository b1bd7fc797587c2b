/* What products by codes share with those of experts: gemm_codes.c computes both. */
#pragma once

#include "product.h"

#define BLOCK_ROWS 96 /* most rows of x that a thread multiplies by a pair of panels */

/* What all items of a product share. */
struct codes_product {
  const struct gemm_codes_arguments *a;
  const int32_t *pairs_of_x; /* row r is row pairs_of_x[r] / chosen of x, or null: row r */
  long chosen;
  struct product g;
  float table[32]; /* 16 numbers or bytes of TABLE4 or, for pairs, the numbers of 64 codes as bfloat16 */
  int type;        /* type of the codes: that of the arguments, or BYTES4 */
  float unit;      /* what a widened code is divided by */
  float zero;      /* the zero point of all codes, if neither zeros nor offsets are given */
  int has_factors; /* whether any factor is not 1 */
  float x_factors[16], x_units[16]; /* factors of the inputs of x from a step's first one on, and their reciprocals */
  int pairs;                        /* whether pairs of bfloat16 are multiplied */
  int sums_x;                       /* whether segments need the sums of their x */
  long groups;
  long blocks, block; /* blocks of rows, and rows of the largest */
  const char *x;      /* this thread's block of x: float32 or, for pairs, bfloat16 */
  long x_stride;      /* bytes from a row to the next */
  float *x_sums;      /* [segments][block] */
  float *own;         /* this thread's scratch memory */
  float *x_in_groups; /* the block as float_rows.h has it, if it has more rows than multiply codes as they are read */
  float *kept;        /* the widened codes of a part of a pair of panels */
};

/* Begins the product of `rows` rows. `own`: scratch memory of codes_scratch_numbers float32 numbers. */
void begin_codes(struct codes_product *p, const struct gemm_codes_arguments *a, long rows, float *own);

/* The numbers of scratch memory of a thread, for products of up to `rows` rows; a multiple of 16. */
long codes_scratch_numbers(long rows, long inputs, long group);

/* The number of blocks that `rows` rows of x are divided into. */
long codes_row_blocks(long rows, long inputs);

/* Brings rows of x, from row `first` on, into the form in which they are multiplied. */
void prepare_block(struct codes_product *p, long first, long rows);

/* The sums of the rows that are prepared and a pair of panels. */
void sum_codes(const struct codes_product *p, long rows, long pair, float sums[][PAIR_OUTPUTS]);
