/* What products of integers have in common: gemm_ints.c makes integers of x, and int_dots.h multiplies. */
#pragma once

#include "product.h"

#define PART_INPUTS_OF_INTS 256 /* inputs of which a thread multiplies all rows of a block, before the next inputs */
#define MAX_INT_ROWS 256        /* most rows of a block */
#define MOST_TOGETHER 8         /* most rows of x that lie together */

/* Whether products are compiled twice, and the processor says which one is made. */
#if !defined(__AVX512VNNI__) && (defined(__AVX512F__) || defined(CAN_AVX_VNNI))
#define CHOOSES_VNNI
#endif

/* How codes lie in memory. NIBBLES and NAMED (numbers of a table) have 4 bits; SMALL are bytes up to 63. */
enum code_kind { BYTES, SMALL, NIBBLES, NAMED };

/* Where scales are applied: to the sum of all inputs, of 32 inputs, or of 256, with integers for the groups within. */
enum scaling { BY_ROW, BY_GROUP, BY_LEVELS };

/* What all items of a product share. */
struct ints_product {
  const struct gemm_ints_arguments *a;
  struct gemm_codes_arguments of_groups; /* what scales.h reads */
  struct product g;
  enum code_kind codes;
  int planes; /* the type of planes, which become bytes before they are multiplied; or 0 */
  enum scaling scaling;
  long unit;   /* inputs of a sum of x: 32, or 16 where groups have 16 inputs */
  long groups; /* groups of an output */
  long blocks; /* blocks of rows */
  int at_once; /* whether VPDPBUSD is used */
  int starts;  /* whether sums of x are multiplied by minus the zero point: sums of products begin with them */
  int pairs; /* whether two sums of x are 16-bit numbers of one word: offsets have levels, and no zero point is there */
  int halves; /* whether integers of x have 16 bits */
  /* Rows of x lie together, word by word: how many, their bytes, and where their scales and sums are. */
  long together, bytes_together, scales_at, sums_at;
};

/* Where the integers of row `row` begin, of those at `rows`. */
INLINE char *int_row(const struct ints_product *p, char *rows, long row) {
  long before = row & -p->together; /* a power of 2 */
  return rows + (before >> __builtin_ctzl(p->together)) * p->bytes_together + (row - before) * 4;
}

/* Begins the product of `rows` rows. */
void begin_ints(struct ints_product *p, const struct gemm_ints_arguments *a, long rows);

/* The first row of a block of rows; `rows` for the block behind the last. */
long first_of_int_block(const struct ints_product *p, long rows, long block);

/* Makes integers of row `row` of x, which begin at `to`. */
void make_integers(const struct ints_product *p, long row, char *to);

/* The sums of `count` rows of integers and a pair of panels. `rows`: where rows that lie together begin, the first of
   which is the first of these. The second function is for processors with VPDPBUSD. */
void sum_ints(const struct ints_product *p, char *rows, long count, long pair, float sums[][PAIR_OUTPUTS]);
void sum_ints_at_once(const struct ints_product *p, char *rows, long count, long pair, float sums[][PAIR_OUTPUTS]);

INLINE void sum_ints_of(const struct ints_product *p, char *rows, long count, long pair, float sums[][PAIR_OUTPUTS]) {
#if defined(__AVX512VNNI__)
  sum_ints_at_once(p, rows, count, pair, sums);
#elif defined(CHOOSES_VNNI)
  (p->at_once ? sum_ints_at_once : sum_ints)(p, rows, count, pair, sums);
#else
  sum_ints(p, rows, count, pair, sums);
#endif
}
