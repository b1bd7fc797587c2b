/* The matrix unit's registers: 8 tiles of 16 rows of 64 bytes. */
#pragma once

#include "vectors.h"

/* The tile instructions do not tell the compiler which memory they read and write. */
#define MEMORY_IS_WRITTEN __asm__ volatile("" ::: "memory")

struct __attribute__((packed)) tile_config {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

/* Tiles 0, 1 and 4 get `first` rows; 2, 3 and 5 `second`; 6 and 7 are whole. */
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
