/* Makes float32 of scales, zero points and offsets of groups, which lie in memory in the fewest bits that hold them
   exactly. A product asks for the numbers of one part of the inputs at a time, for all rows. */
#pragma once

#include "product.h"

#define PART_INPUTS_OF_CODES 256 /* inputs of a part: widened, those of a pair of panels stay in the nearest cache */
#define MAX_SEGMENTS (PART_INPUTS_OF_CODES / CODES_STEP + 1) /* groups that a part has inputs of */

/* What belongs to the groups of a part, of a pair of panels. */
struct scales_of_part {
  float scales[MAX_SEGMENTS][PAIR_OUTPUTS] __attribute__((aligned(64)));
  float zeros[MAX_SEGMENTS][PAIR_OUTPUTS] __attribute__((aligned(64)));
  float offsets[MAX_SEGMENTS][PAIR_OUTPUTS] __attribute__((aligned(64)));
};

/* Numbers of `count` groups in a type that the compiler knows. */
INLINE void widen_numbers_of(const char *from, long count, enum type type, const float *table,
                             float to[][PAIR_OUTPUTS]) {
  for (long g = 0; g < count; g++)
    for (long o = 0; o < PAIR_OUTPUTS; o += LANES)
      if (type == TABLE8)
        for (long i = o; i < o + LANES; i++) to[g][i] = table[(uint8_t)from[g * PAIR_OUTPUTS + i]];
      else
        store(to[g], o, load(from, g * PAIR_OUTPUTS + o, type), F32);
}

static void widen_numbers(const char *from, long count, enum type type, const float *table, float to[][PAIR_OUTPUTS]) {
#define WIDEN(TYPE) \
  case TYPE: widen_numbers_of(from, count, TYPE, table, to); break
  switch (type) {
    WIDEN(F32);
    WIDEN(BF16);
    WIDEN(F16);
    WIDEN(F8);
    WIDEN(I8);
    WIDEN(U8);
    WIDEN(E8M0);
    WIDEN(TABLE8);
    default: break;
  }
#undef WIDEN
}

/* The same of numbers that belong to a panel each. */
static void widen_shared(const char *from, long count, enum type type, float to[][PAIR_OUTPUTS]) {
  char two[2 * 4 + 4 * LANES];
  long bytes = 2 * bytes_of(type);
  for (long g = 0; g < count; g++) {
    memcpy(two, from + g * bytes, bytes);
    vf numbers = load(two, 0, type);
    for (long o = 0; o < PAIR_OUTPUTS; o += LANES) store(to[g], o, splat(numbers[o / PANEL_OUTPUTS]), F32);
  }
}

/* Multiplies numbers of `count` groups, from group `first` on, by the factors of a pair of panels. */
static void multiply_by_factors(const char *factors, enum type type, long run, long first, long count,
                                float to[][PAIR_OUTPUTS]) {
  float numbers[1][PAIR_OUTPUTS] __attribute__((aligned(64)));
  long bytes = PAIR_OUTPUTS * bytes_of(type);
  for (long g = 0; g < count; g++) {
    if (g == 0 || (first + g) % run == 0) widen_numbers(factors + (first + g) / run * bytes, 1, type, 0, numbers);
    for (long o = 0; o < PAIR_OUTPUTS; o += LANES) store(to[g], o, load(to[g], o, F32) * load(numbers[0], o, F32), F32);
  }
}

INLINE void multiply_by_unit(float numbers[][PAIR_OUTPUTS], long count, float unit) {
  for (long g = 0; g < count; g++)
    for (long o = 0; o < PAIR_OUTPUTS; o += LANES) store(numbers[g], o, load(numbers[g], o, F32) * unit, F32);
}

/* Makes float32 of the numbers of `count` groups of a pair of panels, from group `first` of its `groups` on. */
static void widen_scales(struct scales_of_part *to, const struct gemm_codes_arguments *a, long pair, long groups,
                         long first, long count) {
  long place = pair * groups + first, factor = bytes_of((enum type)a->factor_type);
  long of_factors = pair * ((groups + a->groups_of_factor - 1) / a->groups_of_factor) * PAIR_OUTPUTS * factor;
  if (a->scales) {
    enum type type = (enum type)a->scale_type;
    const char *from = (const char *)a->scales + place * a->scale_width * bytes_of(type);
    if (a->scale_width == PAIR_OUTPUTS)
      widen_numbers(from, count, type, a->scale_table, to->scales);
    else
      widen_shared(from, count, type, to->scales);
  }
  if (a->factors)
    multiply_by_factors((const char *)a->factors + of_factors, (enum type)a->factor_type, a->groups_of_factor, first,
                        count, to->scales);
  if (a->extras)
    for (long g = 0; g < count; g++)
      for (long o = 0; o < PAIR_OUTPUTS; o += LANES)
        store(to->scales[g], o, load(to->scales[g], o, F32) + load(a->extras, pair * PAIR_OUTPUTS + o, F32), F32);
  if (a->zeros) widen_numbers((const char *)a->zeros + place * PAIR_OUTPUTS, count, I8, 0, to->zeros);
  if (!a->offsets) return;
  enum type type = (enum type)a->offset_type;
  widen_numbers((const char *)a->offsets + place * PAIR_OUTPUTS * bytes_of(type), count, type, 0, to->offsets);
  if (a->offset_factors)
    multiply_by_factors((const char *)a->offset_factors + of_factors, (enum type)a->factor_type, a->groups_of_factor,
                        first, count, to->offsets);
}
