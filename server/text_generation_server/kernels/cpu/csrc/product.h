/* A matrix product y = x Wᵀ, and the epilogue: what is done to each sum before it is stored in y. */
#pragma once

#include "team.h"
#include "vectors.h"

#define PANEL_OUTPUTS 16                 /* number of outputs whose weights lie in one panel; README.md draws it */
#define PAIR_OUTPUTS (2 * PANEL_OUTPUTS) /* number of outputs that are computed together */

struct epilogue {
  const float *scales; /* scale of each output, for int8 weights; or null */
  const float *bias;   /* bias of each output, or null */
  const char *addend;  /* what is added to each sum before the bias, or null */
  long addend_stride;  /* bytes from one row of the addend to the next */
  enum type addend_type;
  long columns;        /* numbers of a row of y */
  int gated;           /* whether panels come in pairs, the first for gates, the second for ups: y = silu(gate) * up */
  enum type type;      /* type of y */
  int bypasses_caches; /* whether lines of y are written to memory directly: y is bfloat16 and aligned to 64 bytes */
};

/* The arguments of `gemm` under their usual names: m rows of x, k inputs, n outputs. */
struct product {
  const bf16 *x; /* [m, k] */
  long m, k;
  const void *weights; /* [n / 16, k / 2, 16, 2] */
  long n;
  int is_int8;
  struct epilogue e;
  char *y;       /* [m, columns] */
  long y_stride; /* bytes from one row of y to the next */
  bf16 *scratch;
};

/* Numbers n … n + LANES - 1 of a row of the addend; zeros behind its `count` numbers. */
static __attribute__((noinline)) vf load_addend(const struct epilogue *e, long row, long n, long count) {
  const char *addend = e->addend + row * e->addend_stride;
  if (n + LANES <= count) return load(addend, n, e->addend_type);
  char numbers[4 * LANES] = {0};
  long size = bytes_of(e->addend_type);
  if (n < count) memcpy(numbers, addend + n * size, (count - n) * size);
  return load(numbers, 0, e->addend_type);
}

/* The sums of LANES outputs of a row of y, after scaling and adding addend and bias. They begin with output n of the
   panels, which is number `from` of a row of the addend. */
INLINE vf finish_sums(vf sum, const struct epilogue *e, long row, long n, long from) {
  if (e->scales) sum *= load(e->scales, n, F32);
  if (__builtin_expect(e->addend != 0, 0)) sum += load_addend(e, row, from, e->gated ? 2 * e->columns : e->columns);
  if (e->bias) sum += load(e->bias, n, F32);
  return sum;
}

/* Stores LANES outputs of a row of y, from output n on, up to the row's end. */
INLINE void store_outputs(char *y_row, long n, vf x, const struct epilogue *e) {
  if (__builtin_expect(n + LANES <= e->columns, 1)) {
    store(y_row, n, x, e->type);
  } else if (n < e->columns) {
    char numbers[4 * LANES];
    store(numbers, 0, x, e->type);
    memcpy(y_row + n * bytes_of(e->type), numbers, (e->columns - n) * bytes_of(e->type));
  }
}

/* Stores LANES outputs of a row of y, from output n on, and LANES from output n + PANEL_OUTPUTS on. */
INLINE void store_two_vectors(char *y_row, long n, vf first, vf second, const struct epilogue *e) {
#if defined(__AMX_BF16__)
  if (e->bypasses_caches && n + PAIR_OUTPUTS <= e->columns) {
    _mm512_stream_si512((__m512i *)((bf16 *)y_row + n), (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
    return;
  }
#endif
  store_outputs(y_row, n, first, e);
  store_outputs(y_row, n + PANEL_OUTPUTS, second, e);
}

/* The outputs of a row that a pair of gated panels makes, from output `at` of the panels on. sums0 belong to the gate
   panel, sums1 to the up panel. */
INLINE vf gate_outputs(long row, long pair, long at, vf sums0, vf sums1, const struct epilogue *e) {
  long n = pair * PAIR_OUTPUTS + at, from = pair * PANEL_OUTPUTS + at;
  return silu(finish_sums(sums0, e, row, n, from)) * finish_sums(sums1, e, row, n + PANEL_OUTPUTS, e->columns + from);
}

/* Computes outputs at … at + LANES - 1 of both panels of a pair for one row from their sums, and stores them in that
   row of y. */
INLINE void store_pair(const struct product *g, long row, long pair, long at, vf sums0, vf sums1) {
  const struct epilogue *e = &g->e;
  long n = pair * PAIR_OUTPUTS + at, m = n + PANEL_OUTPUTS;
  char *y_row = g->y + row * g->y_stride;
  if (e->gated)
    store_outputs(y_row, pair * PANEL_OUTPUTS + at, gate_outputs(row, pair, at, sums0, sums1, e), e);
  else
    store_two_vectors(y_row, n, finish_sums(sums0, e, row, n, n), finish_sums(sums1, e, row, m, m), e);
}

/* How weights are read ahead of a product. Into AHEAD_CACHE, as __builtin_prefetch names it: 3 is the nearest one, 2
   the second. Up to ROWS_READ_AHEAD rows, bytes that are only loaded and multiplied are not prefetched at all. Both
   were measured on a Zen 4, where prefetches make loads wait, most of all those into the nearest cache. amx and avx512,
   the targets of other processors, prefetch all into the nearest one. */
#if defined(__AMX_BF16__) || (defined(__AVX512F__) && !defined(__AVX512BF16__))
#define AHEAD_CACHE 3
#define ROWS_READ_AHEAD 0
#else
#define AHEAD_CACHE 2
#define ROWS_READ_AHEAD (LANES == 16 ? 4 : 1)
#endif

/* Number of pairs of panels that a thread takes at a time. With more pairs, reads are longer and therefore faster;
   with fewer pairs, the threads finish at about the same time. */
INLINE long pairs_at_a_time(long outputs) { return outputs > 4096 ? 4 : outputs > 2048 ? 2 : 1; }

#define ROWS_OF_LONG_READS 8
#define MOST_ITEMS_AT_A_TIME 16

/* The same for the items of products whose weights are codes, with about `rows` rows each. Few rows take as long as it
   takes to read the codes. A thread prefetches what follows an item, so its next item should be the one that follows:
   a thread takes half of its share of the items at a time, up to MOST_ITEMS_AT_A_TIME. */
INLINE long items_at_a_time(long items, long rows, long outputs, int threads) {
  if (rows > 64) return 1;
  if (rows > ROWS_OF_LONG_READS) return pairs_at_a_time(outputs);
  long each = items / (2 * threads);
  return each < 1 ? 1 : each > MOST_ITEMS_AT_A_TIME ? MOST_ITEMS_AT_A_TIME : each;
}

#if defined(__AVX512BF16__)
/* Converts 32 int8 weights to bfloat16, which is exact. */
INLINE void widen_32_weights(const int8_t *from, bf16 *to) {
  __m512 low = (__m512)load_i8(from), high = (__m512)load_i8(from + 16);
  __m512bh both = _mm512_cvtne2ps_pbh(high, low);
  memcpy(to, &both, 64);
}
#endif

/* Number of bfloat16 numbers of x that are multiplied by all weights before the next numbers of x. They stay in the
   second-level cache while the weights are read once. */
#define X_NUMBERS_IN_L2 393216

/* The product for more than FEW_ROWS rows on the matrix unit. */
void multiply_many_rows(const struct product *g, struct team *team, int me);

/* The product on processors without a dot-product instruction for bfloat16, and the size of its scratch memory, in
   bfloat16 numbers. */
void multiply_in_floats(const struct product *g, struct team *team, int me);
long numbers_for_floats(long m, long k, int threads);

/* Prefetches the weights with which thread `me` begins the product. To be called before the threads meet, so that
   memory is read while they wait. */
void prefetch_product(const struct gemm_arguments *a, int me);
