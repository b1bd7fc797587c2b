/* Copies weights, and what belongs to them, into panels when a model is loaded: README.md draws them. */
#include "product.h"

#define UNITS_AT_ONCE 64   /* what is written of a panel stays in the nearest cache */
#define GRAIN_OF_UNITS 512 /* units of a panel that a thread takes at a time */
#define UNROLLED _Pragma("GCC unroll 16")
#define READ_AHEAD 512     /* bytes */
#define UNITS_OF_COLUMNS 8 /* units that are packed in all panels before the next: a page has words of many outputs */
#define PANELS_AT_ONCE 8   /* panels of the same units that a thread takes at a time */
#define TILE_BYTES 16      /* bytes of a vector: every processor interleaves two of these by one instruction */

typedef uint8_t vu8_tile __attribute__((vector_size(TILE_BYTES)));
typedef uint16_t vu16_tile __attribute__((vector_size(TILE_BYTES)));
typedef uint32_t vu_tile __attribute__((vector_size(TILE_BYTES)));

/* The lower half of each word gets the 4 bits of its even places, the upper half those of the odd ones. */
INLINE vu_tile sorted_codes(vu_tile word) {
  vu_tile even = word & 0x0f0f0f0f, odd = word >> 4 & 0x0f0f0f0f;
  even = (even | even >> 4) & 0x00ff00ff;
  odd = (odd | odd >> 4) & 0x00ff00ff;
  return ((even | even >> 8) & 0xffff) | (odd | odd >> 8) << 16;
}

INLINE uint32_t swapped(uint32_t word) { return (word & 0x0f0f0f0f) << 4 | (word >> 4 & 0x0f0f0f0f); }

typedef uint64_t vu64_two __attribute__((vector_size(16)));

/* Makes the lowest `bits` bits of each byte neighbours, in two times 8 bytes. */
INLINE vu64_two neighbours(vu64_two bytes, int bits) {
  bytes &= 0x0101010101010101 * ((1ull << bits) - 1);
  bytes = (bytes | bytes >> (8 - bits)) & 0x0001000100010001 * ((1ull << 2 * bits) - 1);
  bytes = (bytes | bytes >> 2 * (8 - bits)) & 0x0000000100000001 * ((1ull << 4 * bits) - 1);
  return bytes | bytes >> 4 * (8 - bits);
}

/* NAME_read copies units of an output from where they lie in a file.

   NAME packs at most UNITS_AT_ONCE units of a panel; those of missing rows are 0. N rows with N units each are a tile.
   Row i of its first half is interleaved with row i of its second half; after log2(N) rounds, what was a row is a
   column. The list is the order in which units of two rows take turns. */
#define PACK(NAME, UNIT, VECTOR, SORTED, ...)                                                                    \
  static void NAME##_read(const struct pack_panels_arguments *a, const char *row, long u, long last, UNIT *to) { \
    for (long run = u / a->run, within = u % a->run; u < last; run++, within = 0) {                              \
      long bit = a->starts[run], count = a->run - within < last - u ? a->run - within : last - u;                \
      const char *from = row + bit / 8 + within * (a->spread ? 8 : sizeof(UNIT));                                \
      __builtin_prefetch(from + READ_AHEAD);                                                                     \
      if (!a->spread) memcpy(to, from, count * sizeof(UNIT));                                                    \
      for (long i = 0; a->spread && i < count; i += 2) {                                                         \
        vu64_two bytes;                                                                                          \
        memcpy(&bytes, from + 8 * i, sizeof bytes);                                                              \
        bytes = neighbours(bytes >> bit % 8, sizeof(UNIT));                                                      \
        to[i] = (UNIT)bytes[0], to[i + 1] = (UNIT)bytes[1];                                                      \
      }                                                                                                          \
      u += count, to += count;                                                                                   \
    }                                                                                                            \
  }                                                                                                              \
  INLINE void NAME##_tile(const char *const *rows, long u, long count, UNIT *to, long width) {                   \
    enum { N = TILE_BYTES / sizeof(UNIT) };                                                                      \
    const VECTOR first = {__VA_ARGS__}, second = first + N / 2;                                                  \
    VECTOR tile[N] = {0}, next[N];                                                                               \
    UNROLLED for (int i = 0; i < N; i++) {                                                                       \
      memcpy(&tile[i], rows[i] + u * sizeof(UNIT), count * sizeof(UNIT));                                        \
      tile[i] = SORTED(tile[i]);                                                                                 \
    }                                                                                                            \
    UNROLLED for (int round = 1; round < N; round *= 2) {                                                        \
      UNROLLED for (int i = 0; i < N / 2; i++) {                                                                 \
        next[2 * i] = __builtin_shuffle(tile[i], tile[N / 2 + i], first);                                        \
        next[2 * i + 1] = __builtin_shuffle(tile[i], tile[N / 2 + i], second);                                   \
      }                                                                                                          \
      UNROLLED for (int i = 0; i < N; i++) tile[i] = next[i];                                                    \
    }                                                                                                            \
    UNROLLED for (int i = 0; i < N; i++) if (i < count) memcpy(to + (u + i) * width, &tile[i], TILE_BYTES);      \
  }                                                                                                              \
  static void NAME(const struct pack_panels_arguments *a, long panel, long from, long count) {                   \
    enum { N = TILE_BYTES / sizeof(UNIT) };                                                                      \
    static const UNIT zeros[UNITS_AT_ONCE];                                                                      \
    UNIT read[N][UNITS_AT_ONCE];                                                                                 \
    for (long o = 0; o < a->width; o += N) {                                                                     \
      UNIT *to = (UNIT *)a->packed + (panel * a->units + from) * a->width + o;                                   \
      const char *rows[N];                                                                                       \
      for (int i = 0; i < N; i++) {                                                                              \
        const char *row = (const char *)(uintptr_t)a->rows[panel * a->width + o + i];                            \
        if (!row) {                                                                                              \
          rows[i] = (const char *)zeros;                                                                         \
        } else if (a->run == a->units && !a->swaps) {                                                            \
          rows[i] = row + a->starts[0] / 8 + from * sizeof(UNIT);                                                \
        } else {                                                                                                 \
          NAME##_read(a, row, from, from + count, read[i]);                                                      \
          if (a->swaps)                                                                                          \
            for (long u = 0; u < count; u++) read[i][u] = (UNIT)swapped(read[i][u]);                             \
          rows[i] = (const char *)read[i];                                                                       \
        }                                                                                                        \
      }                                                                                                          \
      long u = 0;                                                                                                \
      for (; u + N <= count; u += N) NAME##_tile(rows, u, N, to, a->width);                                      \
      if (u < count) NAME##_tile(rows, u, count - u, to, a->width);                                              \
    }                                                                                                            \
  }

PACK(pack_bytes, uint8_t, vu8_tile, , 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
PACK(pack_halves, uint16_t, vu16_tile, , 0, 8, 1, 9, 2, 10, 3, 11)
PACK(pack_words, uint32_t, vu_tile, , 0, 4, 1, 5)
PACK(pack_sorted_words, uint32_t, vu_tile, sorted_codes, 0, 4, 1, 5)
#undef PACK

EXPORT void pack_panels(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct pack_panels_arguments *a = arguments;
  long pieces = (a->units + GRAIN_OF_UNITS - 1) / GRAIN_OF_UNITS;
  FOR_EACH_ITEM(item, a->panels * pieces, 1, team) {
    long panel = item / pieces, from = item % pieces * GRAIN_OF_UNITS;
    long last = from + GRAIN_OF_UNITS < a->units ? from + GRAIN_OF_UNITS : a->units;
    for (; from < last; from += UNITS_AT_ONCE) {
      long count = from + UNITS_AT_ONCE < last ? UNITS_AT_ONCE : last - from;
      switch (a->unit) {
        case 1: pack_bytes(a, panel, from, count); break;
        case 2: pack_halves(a, panel, from, count); break;
        default:
          if (a->sorts)
            pack_sorted_words(a, panel, from, count);
          else
            pack_words(a, panel, from, count);
      }
    }
  }
}

enum lanes {
  APART,
  NEIGHBOURS,
  EIGHTS
}; /* outputs of a vector: any, with words that follow each other, 8 with a word */

/* The word of each of LANES outputs. */
INLINE vu words_of(const char *const *rows, const int64_t *strides, long word, enum lanes lanes) {
  vu found = {0};
  uint32_t own[LANES];
  if (lanes == NEIGHBOURS) {
    memcpy(&found, rows[0] + word * strides[0], sizeof found);
  } else if (lanes == EIGHTS) {
    memcpy(own, rows[0] + word * strides[0], LANES / 8 * sizeof *own);
    found += own[0];
#if LANES > 8
    vu other = (vu){0} + own[1];
    const vu upper = {0, 0, 0, 0, 0, 0, 0, 0, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};
    found = (found & ~upper) | (other & upper);
#endif
  } else {
    for (int i = 0; i < LANES; i++)
      if (rows[i]) {
        memcpy(own, rows[i] + word * strides[i], sizeof *own);
        found[i] = own[0];
      }
  }
  return found;
}

INLINE void pack_lanes(const struct pack_columns_arguments *a, long panel, long o, long from, long last) {
  const char *rows[LANES];
  const int64_t *strides = a->strides + panel * PAIR_OUTPUTS + o;
  const int in_words = a->in_word == 8 ? 3 : 0; /* bits */
  int neighbours = 1, eights = LANES >= 8;
  vu shifts;
  memcpy(&shifts, a->shifts + panel * PAIR_OUTPUTS + o, sizeof shifts);
  for (int i = 0; i < LANES; i++) {
    rows[i] = (const char *)(uintptr_t)a->rows[panel * PAIR_OUTPUTS + o + i];
    long after = rows[i] - rows[0];
    int alike = rows[i] && strides[i] == strides[0];
    neighbours &= alike && after == 4 * i, eights &= alike && after == 4 * (i / 8);
  }
  enum lanes lanes = neighbours ? NEIGHBOURS : eights ? EIGHTS : APART;
  for (long u = from; u < last; u++) {
    vu sum = {0};
    for (int i = 0; i < 8; i++) {
      long source = a->order ? a->order[8 * u + i] : 8 * u + i;
      vu words = words_of(rows, strides, source >> in_words, lanes);
      uint32_t within = 4 * (source & ((1 << in_words) - 1));
      sum |= (words >> (shifts + within) & 15) << (16 * (i % 2) + 4 * (i / 2));
    }
    memcpy(a->packed + (panel * a->units + u) * PAIR_OUTPUTS + o, &sum, sizeof sum);
  }
}

EXPORT void pack_columns(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct pack_columns_arguments *a = arguments;
  /* In an order of inputs a word is read up to 8 times: those of one panel are in the near cache then. */
  long piece = a->order ? a->units : UNITS_OF_COLUMNS, pieces = (a->units + piece - 1) / piece;
  FOR_EACH_ITEM(item, a->panels * pieces, a->order ? 1 : PANELS_AT_ONCE, team) {
    long panel = item % a->panels, from = item / a->panels * piece;
    long last = from + piece < a->units ? from + piece : a->units;
    for (long o = 0; o < PAIR_OUTPUTS; o += LANES) pack_lanes(a, panel, o, from, last);
  }
}
