/* y = x Wᵀ for bfloat16 x, and weights in bfloat16 or int8. With few rows, reading the weights takes most of the time;
   with many rows, multiplying does.

   Weights lie in panels of 16 outputs (README.md draws one). A panel is read from front to back, for any number of
   rows. Its 64 bytes are two inputs of 16 outputs, the operand of one dot-product instruction; 1 KiB is one tile of the
   matrix unit.

   A row of y depends on no other row of x. With a matrix unit, products of up to 4 rows use other instructions than
   products of more rows, so the last bits of a row may differ between the two. */
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "vectors.h"

#if defined(__SSE2__)

#include "product.h"
#if defined(__AMX_BF16__)
#include "tiles.h"
#endif

#if defined(__AVX512BF16__)

#define INPUTS_AHEAD 64  /* inputs between the weights in use and the weights that are prefetched */
#define FIRST_BYTES 8192 /* bytes of a panel that are prefetched before a product begins */
#define PREFETCH_BYTES (INPUTS_AHEAD * PANEL_OUTPUTS * (long)sizeof(bf16))
#define INT8_INPUTS 128 /* inputs of int8 weights that are widened for more than 4 rows, and ... */
#define INT8_ROWS 48    /* ... the most rows, which are multiplied by them, all within the nearest cache */

/* Sums of up to 4 rows and the two panels of a pair, over alternating inputs, so that the instructions are independent
   of each other: [panel][row][input % 4 / 2]. */
typedef __m512 pair_sums[2][4][2];

/* Two inputs of a panel's weights, which become bfloat16 exactly. */
INLINE __m512bh line_of(const char *w, int is_int8) {
  __m512bh line;
  if (is_int8)
    widen_32_weights((const int8_t *)w, (bf16 *)&line);
  else
    memcpy(&line, w, 64);
  return line;
}

/* Adds the products of inputs [from, to) to the sums of `rows` (1 to 4) rows of x. For each line of w0 and w1 it
   prefetches a line of ahead0 and ahead1; of bfloat16 only where ROWS_READ_AHEAD is 0. */
INLINE void add_dot_products(pair_sums sums, const bf16 *x, long k, long rows, int is_int8, const char *w0,
                             const char *w1, const char *ahead0, const char *ahead1, long from, long to) {
  long input = PANEL_OUTPUTS * (is_int8 ? 1 : 2);
  for (long i = from; i < to; i += 4) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      long at = i + 2 * half;
      if (is_int8 ? !half : !ROWS_READ_AHEAD) {
        _mm_prefetch(ahead0 + (at - from) * input, _MM_HINT_T0);
        _mm_prefetch(ahead1 + (at - from) * input, _MM_HINT_T0);
      }
      __m512bh a = line_of(w0 + at * input, is_int8), b = line_of(w1 + at * input, is_int8);
#pragma GCC unroll 4
      for (long r = 0; r < rows; r++) {
        int two;
        memcpy(&two, x + r * k + at, 4);
        __m512bh xs = (__m512bh)_mm512_set1_epi32(two);
        sums[0][r][half] = _mm512_dpbf16_ps(sums[0][r][half], a, xs);
        sums[1][r][half] = _mm512_dpbf16_ps(sums[1][r][half], b, xs);
      }
    }
  }
}

/* Stores outputs of row `row` of y, whose sums are those of row r. */
INLINE void store_dot_products(const struct product *g, pair_sums sums, long r, long row, long pair) {
  store_pair(g, row, pair, 0, (vf)(sums[0][r][0] + sums[0][r][1]), (vf)(sums[1][r][0] + sums[1][r][1]));
}

/* Multiplies `rows` (1 to 4) rows of x by a pair of panels with dot-product instructions. `w` is the first panel, and
   `next` the first panel of the pair that follows: its first lines are prefetched towards the end of this pair. */
INLINE void dot_1_to_4_rows(const struct product *g, long first, long rows, int is_int8, const char *w,
                            const char *next, long pair) {
  long k = g->k, input = PANEL_OUTPUTS * (is_int8 ? 1 : 2), panel = k * input;
  long last = k > INPUTS_AHEAD ? k - INPUTS_AHEAD : 0;
  pair_sums sums = {};
  const bf16 *x = g->x + first * k;
  const char *ahead = w + INPUTS_AHEAD * input;
  add_dot_products(sums, x, k, rows, is_int8, w, w + panel, ahead, ahead + panel, 0, last);
  add_dot_products(sums, x, k, rows, is_int8, w, w + panel, next, next + panel, last, k);
#pragma GCC unroll 4
  for (long r = 0; r < rows; r++) store_dot_products(g, sums, r, first + r, pair);
}

/* Multiplies rows [first, end), four at a time. The compiler makes a copy of dot_1_to_4_rows for each number of rows
   and each type of weights. */
static void dot_rows_by_pair(const struct product *g, long first, long end, const char *w, const char *next,
                             long pair) {
#define DOT(ROWS) \
  (g->is_int8 ? dot_1_to_4_rows(g, first, ROWS, 1, w, next, pair) : dot_1_to_4_rows(g, first, ROWS, 0, w, next, pair))
  for (; first + 4 <= end; first += 4) DOT(4);
  switch (end - first) {
    case 1: DOT(1); break;
    case 2: DOT(2); break;
    case 3: DOT(3); break;
  }
#undef DOT
}

static void widen_weights(const int8_t *from, bf16 *to, long count) {
  for (long i = 0; i < count; i += 32) widen_32_weights(from + i, to + i);
}

/* add_dot_products for sums that lie in memory. */
INLINE void add_widened_products(pair_sums in_memory, const bf16 *x, long k, long rows, const bf16 *w0, const bf16 *w1,
                                 const char *ahead0, const char *ahead1, long inputs) {
  pair_sums sums;
  memcpy(sums, in_memory, sizeof sums);
  add_dot_products(sums, x, k, rows, 0, (const char *)w0, (const char *)w1, ahead0, ahead1, 0, inputs);
  memcpy(in_memory, sums, sizeof sums);
}

/* The same for up to INT8_ROWS rows and int8 weights: some inputs of the pair are widened for all rows, before the next
   ones. The sums get the same products in the same order. */
static void dot_rows_by_int8_pair(const struct product *g, long first, long rows, const int8_t *w, long pair) {
  long k = g->k, groups = (rows + 3) / 4;
  pair_sums sums[INT8_ROWS / 4];
  bf16 own[2][INT8_INPUTS * PANEL_OUTPUTS] __attribute__((aligned(64)));
  memset(sums, 0, groups * sizeof *sums);
  for (long i = 0; i < k; i += INT8_INPUTS) {
    long inputs = k - i < INT8_INPUTS ? k - i : INT8_INPUTS;
    for (int panel = 0; panel < 2; panel++)
      widen_weights(w + (panel * k + i) * PANEL_OUTPUTS, own[panel], inputs * PANEL_OUTPUTS);
    for (long group = 0; group < groups; group++) {
      const bf16 *x = g->x + (first + 4 * group) * k + i;
      const char *ahead = (const char *)(w + i * PANEL_OUTPUTS) + 2 * INT8_INPUTS * PANEL_OUTPUTS;
#define ADD_WIDENED(ROWS) \
  add_widened_products(sums[group], x, k, ROWS, own[0], own[1], ahead, ahead + k * PANEL_OUTPUTS, inputs)
      switch (rows - 4 * group) {
        case 1: ADD_WIDENED(1); break;
        case 2: ADD_WIDENED(2); break;
        case 3: ADD_WIDENED(3); break;
        default: ADD_WIDENED(4);
      }
#undef ADD_WIDENED
    }
  }
  for (long r = 0; r < rows; r++) store_dot_products(g, sums[r / 4], r % 4, first + r, pair);
}

#if defined(__AMX_BF16__)
/* The weights of a pair of panels in bfloat16: the weights themselves or, for int8, a converted copy. */
INLINE const bf16 *weights_of_pair(const struct product *g, long pair, int me) {
  long count = PAIR_OUTPUTS * g->k;
  if (!g->is_int8) return (const bf16 *)g->weights + pair * count;
  bf16 *own = g->scratch + me * count; /* this thread's buffer for converted copies; stays in its cache */
  widen_weights((const int8_t *)g->weights + pair * count, own, count);
  return own;
}
#endif

static void multiply_by_dot_products(const struct product *g, struct team *team, int me) {
  long block = X_NUMBERS_IN_L2 / g->k / 4 * 4 /* rows */, pairs = g->n / PAIR_OUTPUTS;
  if (block < 4) block = 4;
  long items = (g->m + block - 1) / block * pairs, grain = g->m > 64 ? 1 : pairs_at_a_time(g->n);
  /* Each thread takes its next items before it computes the current ones, to prefetch their weights. */
  for (long from = me * grain, after; from < items; from = after) {
    after = take_items(team, grain) + team->threads * grain;
    for (long item = from; item < from + grain && item < items; item++) {
      long first = item / pairs * block, end = first + block < g->m ? first + block : g->m, pair = item % pairs;
      long next = item + 1 < from + grain ? item + 1 : after, bytes = PAIR_OUTPUTS * g->k * (g->is_int8 ? 1 : 2);
      const char *w = (const char *)g->weights + pair * bytes, *ahead = w;
      if (next < items) ahead = (const char *)g->weights + next % pairs * bytes;
      if (!g->is_int8 || end - first <= 4) {
        dot_rows_by_pair(g, first, end, w, ahead, pair);
        continue;
      }
      for (long count; first < end; first += count) {
        count = end - first < INT8_ROWS ? end - first : INT8_ROWS;
        dot_rows_by_int8_pair(g, first, count, (const int8_t *)w, pair);
      }
    }
  }
}

/* Prefetches the weights with which thread `me` begins a product, into the second-level cache. */
void prefetch_product(const struct gemm_arguments *a, int me) {
#if defined(__AMX_BF16__)
  if (a->rows > 4) return; /* items are taken in another order */
#endif
  long panel = a->inputs * PANEL_OUTPUTS * (a->is_int8 ? 1 : (long)sizeof(bf16)),
       pair = me * pairs_at_a_time(a->outputs);
  if (pair >= a->outputs / PAIR_OUTPUTS) return;
  const char *w = (const char *)a->weights + 2 * pair * panel;
  for (long line = 0; line < FIRST_BYTES && line < panel; line += 64) {
    _mm_prefetch(w + line, _MM_HINT_T1);
    _mm_prefetch(w + panel + line, _MM_HINT_T1);
  }
}

#endif

#if defined(__AMX_BF16__)

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

/* Linux lets a process use the matrix unit after this request: https://docs.kernel.org/arch/x86/xstate.html. Returns 0
   if the request was granted. */
EXPORT int request_matrix_unit(void) { return (int)syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA); }

/* Multiplies up to 16 rows of x, read where they lie, by a pair of panels. Tiles 0 and 1 are the sums of the two
   panels, 4 is x, 6 and 7 are weights. */
INLINE void multiply_pair_in_tiles(const struct product *g, const bf16 *w, long pair) {
  const bf16 *w1 = w + g->k * PANEL_OUTPUTS;
  float sums[2][16][16];
  MEMORY_IS_WRITTEN;
  _tile_zero(0);
  _tile_zero(1);
  for (long i = 0; i < g->k; i += 32, w += 512, w1 += 512) {
    for (long line = PREFETCH_BYTES; line < PREFETCH_BYTES + 1024; line += 64) {
      _mm_prefetch((const char *)w + line, _MM_HINT_T0);
      _mm_prefetch((const char *)w1 + line, _MM_HINT_T0);
    }
    _tile_loadd(4, g->x + i, 2 * g->k);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w1, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  MEMORY_IS_WRITTEN;
  for (long r = 0; r < g->m; r++) store_pair(g, r, pair, 0, load(sums[0][r], 0, F32), load(sums[1][r], 0, F32));
}

static void multiply_few_rows(const struct product *g, struct team *team, int me) {
  FOR_EACH_ITEM(pair, g->n / PAIR_OUTPUTS, pairs_at_a_time(g->n), team)
    multiply_pair_in_tiles(g, weights_of_pair(g, pair, me), pair);
}

#endif

/* The size of `scratch`, in bfloat16 numbers. It is fastest on huge pages. */
EXPORT long gemm_scratch(long rows, long inputs, long outputs, int is_int8, int threads) {
#if defined(__AVX512BF16__)
  long numbers = 0;
#if defined(__AMX_BF16__)
  if (is_int8) numbers = 4L * PAIR_OUTPUTS * inputs * threads; /* converted weights */
  long filled = (rows + 31) / 32 * 32;
  if (rows > FEW_ROWS) {
    numbers += filled * inputs; /* x in tiles */
    if (inputs > UNDIVIDED_INPUTS) numbers += 2 * outputs * (filled < MAX_SUMMED_ROWS ? filled : MAX_SUMMED_ROWS);
  }
#endif
  (void)rows, (void)inputs, (void)outputs, (void)is_int8, (void)threads;
  return numbers;
#else
  (void)outputs, (void)is_int8;
  return numbers_for_floats(rows, inputs, threads);
#endif
}

EXPORT void gemm(const void *arguments, struct team *team, int me) {
  const struct gemm_arguments *a = arguments;
  struct product g = {
      .x = a->x,
      .m = a->rows,
      .k = a->inputs,
      .weights = a->weights,
      .n = a->outputs,
      .is_int8 = a->is_int8,
      .e = {.scales = a->scales,
            .bias = a->bias,
            .addend = a->addend,
            .addend_stride = a->addend_stride * bytes_of(a->addend_type),
            .addend_type = a->addend_type,
            .columns = a->columns,
            .gated = a->gated,
            .type = a->y_type},
      .y = a->y,
      .y_stride = a->y_stride * bytes_of(a->y_type),
      .scratch = a->scratch,
  };
#if defined(__AMX_BF16__)
  if (g.m > 4) {
    if (g.m > FEW_ROWS) {
      g.e.bypasses_caches = g.e.type == BF16 && ((uintptr_t)g.y | g.y_stride) % 64 == 0;
      configure_tiles(16, 16);
      multiply_many_rows(&g, team, me);
    } else {
      configure_tiles(g.m, 16);
      multiply_few_rows(&g, team, me);
    }
    _tile_release();
    return;
  }
#endif
#if defined(__AVX512BF16__)
  multiply_by_dot_products(&g, team, me);
#else
  multiply_in_floats(&g, team, me);
#endif
}

#endif
