#include "masks.h"

#define WORD 32 /* tokens of a word of a mask */
/* Tokens are listed if at most one of LISTED can be chosen. To list more of them takes longer than to go over the whole
   row, most of all where a processor cannot compress a vector. */
#define LISTED (LANES == 16 ? 4 : 8)

/* The bits of the tokens from `first` on, a multiple of WORD, without bits behind the row. */
INLINE uint32_t word_of(const uint32_t *mask, long first, long size) {
  uint32_t word = mask[first / WORD];
  return size - first < WORD ? word & ((1u << (size - first)) - 1) : word;
}

static long count_tokens(const uint32_t *mask, long size) {
  long count = 0;
  for (long i = 0; i < size; i += WORD) count += __builtin_popcount(word_of(mask, i, size));
  return count;
}

static struct tokens list_tokens(float *row, long size, const uint32_t *mask, const struct cut_memory *memory) {
  vi lanes = lane_indices();
  long count = 0;
  for (long first = 0; first < size; first += WORD) {
    uint32_t word = word_of(mask, first, size);
    for (long i = first; word; i += LANES, word >>= LANES) {
      unsigned bits = word & ((1u << LANES) - 1);
      if (bits) count = keep_lanes(bits, logits_from(row, i, size), lanes + (int32_t)i, count, memory);
    }
  }
  return (struct tokens){memory->logits, memory->ids, count};
}

/* Replaces the lanes without a bit by minus infinity. */
INLINE void exclude_lanes(float *logits, unsigned bits) {
  vu bit_of_lane;
  for (int j = 0; j < LANES; j++) bit_of_lane[j] = 1u << j;
  vi stays = (bit_of_lane & bits) != 0;
  store(logits, 0, blend(stays, load(logits, 0, F32), splat(-INFINITY)), F32);
}

static void exclude_tokens(float *row, long size, const uint32_t *mask) {
  long first = 0;
  for (; first + WORD <= size; first += WORD) {
    uint32_t word = mask[first / WORD];
    if (word == UINT32_MAX) continue;
    for (int i = 0; i < WORD; i += LANES) exclude_lanes(row + first + i, word >> i & ((1u << LANES) - 1));
  }
  for (long i = first; i < size; i++)
    if (!(mask[first / WORD] >> (i - first) & 1)) row[i] = -INFINITY;
}

struct tokens mask_row(float *row, long size, const uint32_t *mask, int64_t *scratch) {
  struct cut_memory memory = divide_scratch(scratch, size);
  if (count_tokens(mask, size) * LISTED <= size) return list_tokens(row, size, mask, &memory);
  exclude_tokens(row, size, mask);
  return (struct tokens){row, NULL, size};
}
