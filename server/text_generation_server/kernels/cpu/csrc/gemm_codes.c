/* y = x Wᵀ for bfloat16 x and codes of 4 or 8 bits in groups: W = scale * (code - zero), with a scale and a zero point
   for each group of neighbouring inputs of an output. Codes become float32 in registers.

   A segment is inputs of one group within one part of the inputs: parts begin at the same inputs for any number of
   rows. In a segment, products of even inputs have one sum and those of odd inputs another, both without the scale. The
   scale multiplies the two together when they are added to the output. So a row of y has the same bits for any number
   of rows and of threads. */
#include "float_rows.h"

#define CODES_OF_PART 1024 /* inputs of a pair of panels that all row groups of a block use before the next inputs */
#define CODES_AHEAD 1024   /* bytes between the codes in use and the codes that are prefetched */

/* A segment of a pair of panels. */
struct segment {
  const char *codes;      /* the codes of the first panel */
  long panel_bytes;       /* from a panel to the next */
  long inputs;            /* an even number */
  const float *scales[2]; /* [16] of each panel */
  const int8_t *zeros[2]; /* [16] of each panel, or null */
  int32_t zero;           /* the zero point of every code, if no group has a zero point of its own */
};

/* LANES outputs of a line of a panel: codes of an even input, and of the odd input after it, less zero points. */
INLINE void widen_codes(const char *line, int is_int4, vi zeros, vf *even, vf *odd) {
  if (is_int4) {
    vi both = load_u8(line);
    *even = __builtin_convertvector((both & 15) - zeros, vf);
    *odd = __builtin_convertvector((both >> 4) - zeros, vf);
  } else {
    vi both = load_i16(line);
    *even = __builtin_convertvector((both << 24 >> 24) - zeros, vf);
    *odd = __builtin_convertvector((both >> 8) - zeros, vf);
  }
}

INLINE vi zeros_of(const struct segment *s, int panel, int at) {
  vi8 zeros;
  if (!s->zeros[panel]) return (vi){} + s->zero;
  memcpy(&zeros, s->zeros[panel] + at, sizeof zeros);
  return __builtin_convertvector(zeros, vi);
}

/* sums += a segment of `rows` rows of x times that of `count` vectors of outputs, from the vector `first` of the pair
   on. */
INLINE void add_segment_of_vectors(const float *x, int rows, const struct segment *s, int first, int count, int is_int4,
                                   float sums[][PAIR_OUTPUTS]) {
  vf evens[GROUP_ROWS][2 * PANEL_VECTORS] = {}, odds[GROUP_ROWS][2 * PANEL_VECTORS] = {};
  long word = is_int4 ? 1 : 2, line = word * PANEL_OUTPUTS;
  vi zeros[2 * PANEL_VECTORS];
  const char *w = s->codes;
#pragma GCC unroll 8
  for (int v = 0; v < count; v++)
    zeros[v] = zeros_of(s, (first + v) / PANEL_VECTORS, (first + v) % PANEL_VECTORS * LANES);
  for (long i = 0; i < s->inputs; i += 2, w += line, x += 2 * rows) {
#pragma GCC unroll 8
    for (int v = 0; v < count; v++) {
      const char *panel = w + (first + v) / PANEL_VECTORS * s->panel_bytes;
      vf even, odd;
      if ((first + v) % PANEL_VECTORS == 0) __builtin_prefetch(panel + CODES_AHEAD);
      widen_codes(panel + (first + v) % PANEL_VECTORS * LANES * word, is_int4, zeros[v], &even, &odd);
#pragma GCC unroll 12
      for (int r = 0; r < rows; r++) {
        evens[r][v] = multiply_add(splat(x[r]), even, evens[r][v]);
        odds[r][v] = multiply_add(splat(x[rows + r]), odd, odds[r][v]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < count; v++) {
      vf scale = load(s->scales[(first + v) / PANEL_VECTORS], (first + v) % PANEL_VECTORS * LANES, F32);
      long at = (first + v) * LANES;
      store(sums[r], at, multiply_add(scale, evens[r][v] + odds[r][v], load(sums[r], at, F32)), F32);
    }
}

INLINE void add_segment_of_rows(const float *x, int rows, const struct segment *s, int is_int4,
                                float sums[][PAIR_OUTPUTS]) {
  int count = vectors_at_once(2 * rows);
#pragma GCC unroll 8
  for (int first = 0; first < 2 * PANEL_VECTORS; first += count)
    add_segment_of_vectors(x, rows, s, first, count, is_int4, sums);
}

/* The compiler makes a copy of add_segment_of_rows for each number of rows and bits. */
static void add_segment(const float *x, long rows, const struct segment *s, int is_int4, float sums[][PAIR_OUTPUTS]) {
#define ADD_CODES(ROWS)                         \
  case ROWS:                                    \
    if (is_int4)                                \
      add_segment_of_rows(x, ROWS, s, 1, sums); \
    else                                        \
      add_segment_of_rows(x, ROWS, s, 0, sums); \
    break
  switch (rows) {
    ADD_CODES(1);
    ADD_CODES(2);
    ADD_CODES(3);
#if LANES >= 8
    ADD_CODES(4);
    ADD_CODES(5);
    ADD_CODES(6);
#endif
#if LANES == 16
    ADD_CODES(7);
    ADD_CODES(8);
    ADD_CODES(9);
    ADD_CODES(10);
    ADD_CODES(11);
    ADD_CODES(12);
#endif
  }
#undef ADD_CODES
}

/* Segment `from` … `end` - 1 of a pair of panels. */
static struct segment segment_at(const struct gemm_codes_arguments *a, long pair, long from, long end) {
  long groups = (a->inputs + a->group - 1) / a->group, bytes = a->is_int4 ? PANEL_OUTPUTS : 2 * PANEL_OUTPUTS;
  struct segment s = {.panel_bytes = a->inputs / 2 * bytes, .inputs = end - from, .zero = a->zero};
  s.codes = (const char *)a->codes + 2 * pair * s.panel_bytes + from / 2 * bytes;
  for (int panel = 0; panel < 2; panel++) {
    long at = ((2 * pair + panel) * groups + from / a->group) * PANEL_OUTPUTS;
    s.scales[panel] = a->scales + at;
    s.zeros[panel] = a->zeros ? a->zeros + at : 0;
  }
  return s;
}

/* One item of the work: a block of rows and a pair of panels. */
static void multiply_codes(const struct gemm_codes_arguments *a, const struct product *g, const struct row_block *b,
                           long pair) {
  float sums[MOST_BLOCK][PAIR_OUTPUTS] __attribute__((aligned(64)));
  memset(sums, 0, b->rows * sizeof *sums);
  for (long part = 0; part < g->k; part += CODES_OF_PART) {
    long last = g->k - part < CODES_OF_PART ? g->k : part + CODES_OF_PART;
    for (long rows = 0; rows < b->groups; rows++) {
      long first = first_of_group(b, rows), count = first_of_group(b, rows + 1) - first;
      for (long i = part, end; i < last; i = end) {
        end = (i / a->group + 1) * a->group < last ? (i / a->group + 1) * a->group : last;
        struct segment s = segment_at(a, pair, i, end);
        add_segment(b->x + first * g->k + i * count, count, &s, a->is_int4, sums + first);
      }
    }
  }
  for (long r = 0; r < b->rows; r++)
    for (long at = 0; at < PANEL_OUTPUTS; at += LANES)
      store_pair(g, b->first + r, pair, at, load(sums[r], at, F32), load(sums[r], PANEL_OUTPUTS + at, F32));
}

/* Copies a block of x as float32, with inputs in the order of the codes. */
static void sort_block(const struct product *g, const struct row_block *b, const int32_t *order) {
  for (long group = 0; group < b->groups; group++) {
    long from = first_of_group(b, group), rows = first_of_group(b, group + 1) - from;
    for (long r = 0; r < rows; r++) {
      const bf16 *x = g->x + (b->first + from + r) * g->k;
      uint32_t *to = (uint32_t *)(b->x + from * g->k) + r;
      for (long i = 0; i < g->k; i++) to[i * rows] = (uint32_t)x[order[i]] << 16;
    }
  }
}

/* The size of `scratch`, in bfloat16 numbers. */
EXPORT long gemm_codes_scratch(long rows, long inputs, int threads) {
  return 2 * threads * widened_numbers(rows, inputs);
}

EXPORT void gemm_codes(const void *arguments, struct team *team, int me) {
  const struct gemm_codes_arguments *a = arguments;
  struct product g = {
      .x = a->x,
      .m = a->rows,
      .k = a->inputs,
      .n = a->outputs,
      .e = {.bias = a->bias,
            .addend = a->addend,
            .addend_stride = a->addend_stride * bytes_of(a->addend_type),
            .addend_type = a->addend_type,
            .columns = a->columns,
            .gated = a->gated,
            .type = a->y_type},
      .y = a->y,
      .y_stride = a->y_stride * bytes_of(a->y_type),
  };
  long pairs = g.n / PAIR_OUTPUTS, blocks = count_blocks(g.m, g.k), widened = -1;
  struct row_block b;
  FOR_EACH_ITEM(item, blocks * pairs, 1, team) {
    if (item / pairs != widened) {
      widened = item / pairs;
      b = block_at(&g, blocks, widened);
      b.x = (float *)a->scratch + me * widened_numbers(g.m, g.k);
      if (a->order)
        sort_block(&g, &b, a->order);
      else
        widen_block(&g, &b);
    }
    multiply_codes(a, &g, &b, item % pairs);
  }
}
