/* y = x Wᵀ for weights that are integers with scales, where x becomes integers of 8 bits first, once for all threads:
   each row by itself, with a scale for 32 inputs, for 256, or for the row. int_dots.h multiplies them. */
#include "int_dots.h"

#define LARGEST_SMALL_INT 63       /* two products of codes up to this one and of x are a sum of 16 bits */
#define X_BLOCK 32                 /* inputs that become integers at a time */
#define SMALLEST_MAXIMUM 0x1p-100f /* numbers of x up to this one are 0 beside others */
#define BYTES_OF_BLOCK 1048576     /* bytes of rows of a block */
#define MIN_INT_ROWS 32            /* rows of a block: at least, if there are as many */
#define INFINITE_BITS 0x7f800000

typedef int8_t bytes16 __attribute__((vector_size(16)));
typedef int16_t halves16 __attribute__((vector_size(32)));

/* LANES numbers of a row of x from input i of W on; zeros for inputs that x does not have. */
INLINE vf numbers_of_row(const struct gemm_ints_arguments *a, const char *x, long i, enum type type) {
  if (!a->order && i + LANES <= a->x_inputs) return load(x, i, type);
  uint32_t bits[LANES] = {0};
  for (long n = 0; n < LANES; n++) {
    long from = a->order ? a->order[i + n] : i + n;
    if (from < a->x_inputs)
      bits[n] = type == F32 ? ((const uint32_t *)x)[from] : (uint32_t)((const bf16 *)x)[from] << 16;
  }
  vf numbers;
  memcpy(&numbers, bits, sizeof numbers);
  return numbers;
}

/* The largest magnitude of some inputs of a row, by its bits: those of NaN are above infinity's. */
INLINE float largest_of_row(const struct gemm_ints_arguments *a, const char *x, long from, long end, enum type type) {
  vi largest = {};
  for (long i = from; i < end; i += LANES) {
    vi bits = (vi)(vu_bits(numbers_of_row(a, x, i, type)) & 0x7fffffff), above = bits > largest;
    largest = (bits & above) | (largest & ~above);
  }
  int32_t most = lane_most(largest);
  float found;
  memcpy(&found, &most, sizeof found);
  return found;
}

/* Stores 16 integers, in words that are `to_next` bytes apart, in the order in which codes are multiplied. Codes of 4
   bits lie in words of 8, whose even ones are multiplied first; open_codes says in which order it makes bytes of
   planes. Numbers of 16 bits are multiplied by the even bytes of a word of codes, then by the odd ones. */
INLINE void store_integers(char *to, long to_next, const int8_t *from, int is_nibbles, int planes, int halves) {
  bytes16 q;
  memcpy(&q, from, sizeof q);
  if (planes) q = __builtin_shuffle(q, (bytes16){0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15});
  if (is_nibbles) q = __builtin_shuffle(q, (bytes16){0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15});
  if (halves) {
    q = __builtin_shuffle(q, (bytes16){0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15});
    halves16 wide = __builtin_convertvector(q, halves16);
    for (int n = 0; n < 8; n++) memcpy(to + n * to_next, (const char *)&wide + 4 * n, 4);
  } else {
    for (int n = 0; n < 4; n++) memcpy(to + n * to_next, (const char *)&q + 4 * n, 4);
  }
}

/* The sum of the lanes, which are integers, as what sums of products begin with or are corrected by; 0 for integers
   that are not used. */
INLINE int32_t sum_of_integers(const struct ints_product *p, vf sums, float inverse) {
  int32_t sum = inverse ? (int32_t)lane_sum(sums) : 0;
  return p->starts ? sum * -(int32_t)p->a->zero : sum;
}

INLINE void make_integers_of(const struct ints_product *p, long row, char *to, enum type type) {
  const struct gemm_ints_arguments *a = p->a;
  const char *x = (const char *)a->x + row * a->x_inputs * bytes_of(type);
  float *scales = (float *)(to + p->scales_at);
  int32_t *x_sums = (int32_t *)(to + p->sums_at);
  long next = p->together, words = (p->halves ? 2 : 1) * next; /* words to the next one, and bytes of a number */
  int is_nibbles = p->codes == NIBBLES || p->codes == NAMED, of_row = p->scaling == BY_ROW;
  long unit = 0, last_half = p->unit == 16 ? 0 : 16; /* the half of a block of x behind which a sum of a unit ends */
  vf sums = {};
  float inverse = 0;
  for (long from = 0, end; from < a->inputs; from = end) {
    end = from + a->x_block < a->inputs ? from + a->x_block : a->inputs;
    float largest = largest_of_row(a, x, from, end, type);
    inverse = 0;
    *scales = 0;
    if (!(largest < INFINITY))
      *scales = NAN;
    else if (largest > SMALLEST_MAXIMUM) {
      *scales = largest / 127;
      inverse = 127 / largest;
    }
    scales += next;
    for (long i = from; i < end; i += X_BLOCK, to += words * X_BLOCK) {
      int8_t q[X_BLOCK];
      for (long half = 0; half < X_BLOCK; half += 16) {
        for (long n = half; n < half + 16; n += LANES) {
          vf numbers = numbers_of_row(a, x, i + n, type) * inverse;
          sums += (numbers + ROUNDING) - ROUNDING;
          store_i8(q + n, numbers);
        }
        store_integers(to + words * half, 4 * next, q + half, is_nibbles, p->planes, p->halves);
        if (of_row || half < last_half) continue;
        int32_t sum = sum_of_integers(p, sums, inverse);
        sums = (vf){};
        if (p->pairs)
          ((int16_t *)(x_sums + unit / 2 * next))[unit % 2] = (int16_t)sum;
        else
          x_sums[unit * next] = sum;
        unit++;
      }
    }
  }
  if (of_row) *x_sums = sum_of_integers(p, sums, inverse);
}

void make_integers(const struct ints_product *p, long row, char *to) {
  if (p->a->x_type == F32)
    make_integers_of(p, row, to, F32);
  else
    make_integers_of(p, row, to, BF16);
}

/* Bytes in an odd number of lines, so that rows do not share places in the cache. */
static long in_odd_lines(long bytes) { return ((bytes + 63) / 64 | 1) * 64; }

/* The most bytes of a row: integers of up to 16 bits, a scale for 32 of them, and a sum of 16. */
static long bytes_of_int_row(long inputs) { return 2 * inputs + inputs / 32 * 4 + inputs / 16 * 4; }

/* A few rows do not lie as far apart as many, because they are read once for each pair of panels. */
static long rows_together(long rows) { return rows > 4 ? MOST_TOGETHER : rows > 2 ? 4 : rows; }

static long bytes_of_int_rows(long rows, long inputs) {
  long together = rows_together(rows);
  return (rows + together - 1) / together * in_odd_lines(together * bytes_of_int_row(inputs));
}

static long rows_of_int_block(long inputs) {
  long most = BYTES_OF_BLOCK / bytes_of_int_row(inputs) / MOST_TOGETHER * MOST_TOGETHER;
  return most < MIN_INT_ROWS ? MIN_INT_ROWS : most > MAX_INT_ROWS ? MAX_INT_ROWS : most;
}

/* The size of `scratch`, in bfloat16 numbers. */
EXPORT long gemm_ints_scratch(long rows, long inputs) { return bytes_of_int_rows(rows, inputs) / 2; }

/* The float32 numbers of scratch memory that each thread needs for the product of an expert. */
EXPORT long experts_ints_scratch(long tokens, long inputs) {
  long most = rows_of_int_block(inputs);
  return bytes_of_int_rows(tokens < most ? tokens : most, inputs) / 4;
}

static enum code_kind kind_of_codes(const struct gemm_ints_arguments *a) {
  switch (a->type) {
    case I4: return NIBBLES;
    case TABLE4: return NAMED;
    default: return a->largest <= LARGEST_SMALL_INT ? SMALL : BYTES;
  }
}

void begin_ints(struct ints_product *p, const struct gemm_ints_arguments *a, long rows) {
  enum code_kind codes = kind_of_codes(a);
  int at_once = 0, halves = 1;
#if defined(__AVX512VNNI__)
  at_once = 1;
#elif defined(CHOOSES_VNNI)
  at_once = a->has_vnni != 0;
#endif
#if defined(__AVX2__)
  halves = !at_once && codes != NIBBLES && codes != SMALL;
#endif
  long most = rows_of_int_block(a->inputs);
  *p = (struct ints_product){
      .a = a,
      .of_groups = {.scales = a->scales,
                    .scale_type = a->scale_type,
                    .scale_width = a->scale_width,
                    .factors = a->factors,
                    .factor_type = a->factor_type,
                    .groups_of_factor = a->groups_of_factor,
                    .offsets = a->offsets,
                    .offset_type = a->offset_type,
                    .offset_factors = a->offset_factors},
      .g = {.e = {.scales = a->output_scales,
                  .bias = a->bias,
                  .addend = a->addend,
                  .addend_stride = a->addend_stride * bytes_of((enum type)a->addend_type),
                  .addend_type = (enum type)a->addend_type,
                  .columns = a->columns,
                  .gated = a->gated,
                  .type = (enum type)a->y_type},
            .y = a->y,
            .y_stride = a->y_stride * bytes_of((enum type)a->y_type)},
      .codes = codes,
      .planes = has_bytes((int)a->type) ? (int)a->type : 0,
      .scaling = a->factors  ? BY_LEVELS
                 : a->scales ? BY_GROUP
                             : BY_ROW,
      .unit = a->group == 16 ? 16 : 32,
      .groups = (a->inputs + a->group - 1) / a->group,
      .blocks = (rows + most - 1) / most,
      .at_once = at_once,
      .starts = !a->zeros && !a->offsets,
      .pairs = a->factors && a->offsets,
      .halves = halves,
      .together = rows_together(rows),
  };
  p->scales_at = p->together * (halves ? 2 : 1) * a->inputs;
  p->sums_at = p->scales_at + p->together * (a->inputs + a->x_block - 1) / a->x_block * 4;
  p->bytes_together = in_odd_lines(p->sums_at + p->together * a->inputs / p->unit * 4);
}

long first_of_int_block(const struct ints_product *p, long rows, long block) {
  if (block == p->blocks) return rows;
  return (rows + p->together - 1) / p->together * block / p->blocks * p->together;
}

EXPORT void gemm_ints(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct gemm_ints_arguments *a = arguments;
  struct ints_product p;
  begin_ints(&p, a, a->rows);
  char *rows = a->scratch;
  FOR_EACH_ITEM(row, a->rows, 4, team) make_integers(&p, row, int_row(&p, rows, row));
  wait_for_team(team);
  float sums[MAX_INT_ROWS][PAIR_OUTPUTS] __attribute__((aligned(64)));
  long pairs = a->outputs / PAIR_OUTPUTS, items = p.blocks * pairs;
  FOR_EACH_ITEM(item, items, items_at_a_time(items, a->rows, a->outputs, team->threads), team) {
    long block = item / pairs, pair = item % pairs;
    long first = first_of_int_block(&p, a->rows, block), count = first_of_int_block(&p, a->rows, block + 1) - first;
    sum_ints_of(&p, int_row(&p, rows, first), count, pair, sums);
    for (long r = 0; r < count; r++)
      for (long at = 0; at < PANEL_OUTPUTS; at += LANES)
        store_pair(&p.g, first + r, pair, at, load(sums[r], at, F32), load(sums[r], PANEL_OUTPUTS + at, F32));
  }
}
