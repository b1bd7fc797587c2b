/* Rows of a weight of codes as numbers: the embeddings of tokens. Each number is what the forms' formulas give in
   float32 (quantized/values.py), and is rounded once more to the type of the embedding. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off") /* a product and a difference in one rounding would give other bits */
#endif
#include "scales.h"
#include "widen.h"

/* An output of a pair of panels. */
struct row_place {
  long pair, output;
};

/* The code of an input, where codes of fewer than 8 bits lie in words. */
static uint32_t code_in_word(const struct gemm_codes_arguments *a, long layout, struct row_place p, long input) {
  long step = (p.pair * a->inputs + input) / CODES_STEP * PAIR_OUTPUTS + p.output, i = input % CODES_STEP;
  if (layout == IN_WORDS) return ((const uint32_t *)a->codes)[step] >> 4 * i & 15;
  if (a->type == PLANES2) return ((const uint16_t *)a->codes)[step] >> 2 * i & 3;
  uint32_t code = ((const uint32_t *)a->codes)[step] >> (16 * (i % 2) + 4 * (i / 2)) & 15;
  if (a->type == PLANES5) code |= (uint32_t)(((const uint8_t *)a->high)[step] >> i & 1) << 4;
  if (a->type == PLANES6) code |= (uint32_t)(((const uint16_t *)a->high)[step] >> 2 * i & 3) << 4;
  return code;
}

/* The place of a number among those of whole bytes. */
static long place_of_number(const struct gemm_codes_arguments *a, long layout, struct row_place p, long input) {
  long panel = 2 * p.pair + p.output / PANEL_OUTPUTS, output = p.output % PANEL_OUTPUTS;
  switch (layout) {
    case IN_PAIRS: return (panel * a->inputs / 2 + input / 2) * 2 * PANEL_OUTPUTS + 2 * output + input % 2;
    case IN_WORDS: return ((p.pair * a->inputs + input) / 4 * PAIR_OUTPUTS + p.output) * 4 + input % 4;
    default: return (p.pair * a->inputs + input) * PAIR_OUTPUTS + p.output;
  }
}

/* LANES numbers before scales and zero points, from an input on; 0 behind the last one. */
static vf numbers_from(const struct gemm_codes_arguments *a, long layout, struct row_place p, long input) {
  long count = a->inputs - input < LANES ? a->inputs - input : LANES, size = bytes_of((enum type)a->type);
  if (low_bits((int)a->type)) {
    vf numbers = {};
    for (long i = 0; i < count; i++) {
      uint32_t code = code_in_word(a, layout, p, input + i);
      numbers[i] = a->type == TABLE4 ? a->table[code] : (float)code;
    }
    return numbers;
  }
  char units[4 * LANES] = {0};
  for (long i = 0; i < count; i++)
    memcpy(units + i * size, (const char *)a->codes + place_of_number(a, layout, p, input + i) * size, size);
  vf numbers = load(units, 0, (enum type)a->type);
  for (long i = 0; a->type == F8 && i < count; i++)
    if ((units[i] & 0x7f) == 0x7f) numbers[i] = NAN;
  return numbers;
}

static void embed_row(const struct embed_codes_arguments *e, long token) {
  const struct gemm_codes_arguments *a = e->product;
  long id = ((const int32_t *)e->ids)[token], size = bytes_of((enum type)e->type);
  struct row_place p = {id / PAIR_OUTPUTS, id % PAIR_OUTPUTS};
  struct scales_of_part numbers;
  char *to = (char *)e->out + token * e->width * size;
  for (long part = 0; part < a->inputs; part += PART_INPUTS_OF_CODES) {
    long end = part + PART_INPUTS_OF_CODES < a->inputs ? part + PART_INPUTS_OF_CODES : a->inputs;
    long first = part / a->group, count = (end - 1) / a->group + 1 - first;
    widen_scales(&numbers, a, p.pair, (a->inputs + a->group - 1) / a->group, first, count);
    for (long i = part; i < end; i += LANES) {
      vf scales = splat(1), zeros = splat((float)e->zero), offsets = {};
      for (long j = 0; j < LANES && i + j < end; j++) {
        long g = (i + j) / a->group - first;
        if (a->scales) scales[j] = numbers.scales[g][p.output];
        if (a->zeros) zeros[j] += numbers.zeros[g][p.output];
        if (a->offsets) offsets[j] = numbers.offsets[g][p.output];
      }
      vf row = (numbers_from(a, e->layout, p, i) - zeros) * scales;
      if (a->offsets) row -= offsets;
      char found[4 * LANES];
      e->type == BF16 ? store_any_bf16((bf16 *)found, row) : store(found, 0, row, (enum type)e->type);
      for (long j = 0; j < LANES && i + j < end; j++) {
        long input = a->order ? a->order[i + j] : i + j;
        if (input < e->width) memcpy(to + input * size, found + j * size, size);
      }
    }
  }
}

EXPORT void embed_codes(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct embed_codes_arguments *e = arguments;
  FOR_EACH_ITEM(token, e->tokens, 1, team) embed_row(e, token);
}
