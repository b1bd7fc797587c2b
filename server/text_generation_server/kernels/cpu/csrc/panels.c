/* Copies weights, and what belongs to them, into panels when a model is loaded: README.md draws them. */
#include "team.h"
#include "vectors.h"

#define UNITS_AT_ONCE 64   /* what is written of a panel stays in the nearest cache */
#define GRAIN_OF_UNITS 512 /* units of a panel that a thread takes at a time */
#define UNROLLED _Pragma("GCC unroll 16")
#define TILE_BYTES 16 /* bytes of a vector: every processor interleaves two of these by one instruction */

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

/* NAME packs at most UNITS_AT_ONCE units of a panel; those of missing rows are 0. N rows with N units each are a tile.
   Row i of its first half is interleaved with row i of its second half; after log2(N) rounds, what was a row is a
   column. The list is the order in which units of two rows take turns. */
#define PACK(NAME, UNIT, VECTOR, SORTED, ...)                                                               \
  INLINE void NAME##_tile(const UNIT *const *rows, long u, long count, UNIT *to, long width) {              \
    enum { N = TILE_BYTES / sizeof(UNIT) };                                                                 \
    const VECTOR first = {__VA_ARGS__}, second = first + N / 2;                                             \
    VECTOR tile[N] = {0}, next[N];                                                                          \
    UNROLLED for (int i = 0; i < N; i++) {                                                                  \
      memcpy(&tile[i], rows[i] + u, count * sizeof(UNIT));                                                  \
      tile[i] = SORTED(tile[i]);                                                                            \
    }                                                                                                       \
    UNROLLED for (int round = 1; round < N; round *= 2) {                                                   \
      UNROLLED for (int i = 0; i < N / 2; i++) {                                                            \
        next[2 * i] = __builtin_shuffle(tile[i], tile[N / 2 + i], first);                                   \
        next[2 * i + 1] = __builtin_shuffle(tile[i], tile[N / 2 + i], second);                              \
      }                                                                                                     \
      UNROLLED for (int i = 0; i < N; i++) tile[i] = next[i];                                               \
    }                                                                                                       \
    UNROLLED for (int i = 0; i < N; i++) if (i < count) memcpy(to + (u + i) * width, &tile[i], TILE_BYTES); \
  }                                                                                                         \
  static void NAME(const struct pack_panels_arguments *a, long panel, long from, long count) {              \
    enum { N = TILE_BYTES / sizeof(UNIT) };                                                                 \
    static const UNIT zeros[UNITS_AT_ONCE];                                                                 \
    for (long o = 0; o < a->width; o += N) {                                                                \
      UNIT *to = (UNIT *)a->packed + (panel * a->units + from) * a->width + o;                              \
      const UNIT *rows[N];                                                                                  \
      for (int i = 0; i < N; i++) {                                                                         \
        long row = a->rows[panel * a->width + o + i];                                                       \
        rows[i] = row < 0 ? zeros : (const UNIT *)a->numbers + row * a->units + from;                       \
      }                                                                                                     \
      long u = 0;                                                                                           \
      for (; u + N <= count; u += N) NAME##_tile(rows, u, N, to, a->width);                                 \
      if (u < count) NAME##_tile(rows, u, count - u, to, a->width);                                         \
    }                                                                                                       \
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
