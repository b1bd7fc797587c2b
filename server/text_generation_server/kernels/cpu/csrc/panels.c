/* Copies weights, and what belongs to them, into panels when a model is loaded: README.md draws them. */
#include "team.h"
#include "vectors.h"

#define UNITS_AT_ONCE 64   /* what is written of a panel stays in the nearest cache */
#define GRAIN_OF_UNITS 512 /* units of a panel that a thread takes at a time */

/* The lower half of a word gets the 4 bits of its even places, the upper half those of the odd ones. */
INLINE uint32_t sorted_codes(uint32_t word) {
  uint32_t even = word & 0x0f0f0f0f, odd = word >> 4 & 0x0f0f0f0f;
  even = (even | even >> 4) & 0x00ff00ff;
  odd = (odd | odd >> 4) & 0x00ff00ff;
  return ((even | even >> 8) & 0xffff) | (odd | odd >> 8) << 16;
}

/* Units [from, end) of a panel; those of missing rows are 0. */
#define PACK(NAME, UNIT, CHANGED)                                                            \
  static void NAME(const struct pack_panels_arguments *a, long panel, long from, long end) { \
    UNIT *to = (UNIT *)a->packed + panel * a->units * a->width;                              \
    for (long o = 0; o < a->width; o++) {                                                    \
      long row = a->rows[panel * a->width + o];                                              \
      const UNIT *units = (const UNIT *)a->numbers + row * a->units;                         \
      if (row < 0)                                                                           \
        for (long u = from; u < end; u++) to[u * a->width + o] = 0;                          \
      else                                                                                   \
        for (long u = from; u < end; u++) to[u * a->width + o] = CHANGED(units[u]);          \
    }                                                                                        \
  }

PACK(pack_bytes, uint8_t, )
PACK(pack_halves, uint16_t, )
PACK(pack_words, uint32_t, )
PACK(pack_sorted_words, uint32_t, sorted_codes)
#undef PACK

EXPORT void pack_panels(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct pack_panels_arguments *a = arguments;
  long pieces = (a->units + GRAIN_OF_UNITS - 1) / GRAIN_OF_UNITS;
  FOR_EACH_ITEM(item, a->panels * pieces, 1, team) {
    long panel = item / pieces, from = item % pieces * GRAIN_OF_UNITS;
    long last = from + GRAIN_OF_UNITS < a->units ? from + GRAIN_OF_UNITS : a->units;
    for (; from < last; from += UNITS_AT_ONCE) {
      long end = from + UNITS_AT_ONCE < last ? from + UNITS_AT_ONCE : last;
      switch (a->unit) {
        case 1: pack_bytes(a, panel, from, end); break;
        case 2: pack_halves(a, panel, from, end); break;
        default:
          if (a->sorts)
            pack_sorted_words(a, panel, from, end);
          else
            pack_words(a, panel, from, end);
      }
    }
  }
}
