/* The matrix unit (Intel AMX): 8 registers, called tiles 0 to 7, of up to 16 rows of up to 64 bytes. README.md
   explains its instructions and the use of each tile. */
#pragma once

#include "vectors.h"

/* To be placed before tile loads and after tile stores: GCC does not know which memory the tile instructions read
   and write. */
#define MEMORY_IS_WRITTEN __asm__ volatile("" ::: "memory")

struct __attribute__((packed)) tile_config {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

/* Sets the number of rows: `first` for tiles 0, 1 and 4, `second` for tiles 2, 3 and 5, 16 for tiles 6 and 7. */
static inline void configure_tiles(int first, int second) {
  struct tile_config c = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    c.bytes[i] = 64;
    c.rows[i] = 16;
  }
  c.rows[0] = c.rows[1] = c.rows[4] = first;
  c.rows[2] = c.rows[3] = c.rows[5] = second;
  MEMORY_IS_WRITTEN;
  _tile_loadconfig(&c);
}
