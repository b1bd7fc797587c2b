/* y = x Wᵀ for bfloat16 activations and weights in bfloat16 or int8, at the speed of the memory for few rows and of the
   matrix unit for many.

   Weights lie in panels of 16 outputs: [N / 16][K / 2][16][2], so that a panel is read from front to back whatever the
   number of rows is: 64 bytes are two inputs of 16 outputs, which is what one dot-product instruction eats, and 1 KiB is
   one tile of the matrix unit. No row's numbers reach another row's; between up to 4 rows and more, last bits differ. */
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#else
#define omp_get_thread_num() 0
#endif

#include "vectors.h"

#if defined(__AVX512BF16__)

#if defined(__AMX_BF16__)
#include "tiles.h"
#endif

#define PANEL 16
#define BLOCK_BYTES 786432 /* rows of x that stay in the second-level cache while the weights pass by */

/* What becomes of 16 sums on their way into y. */
struct epilogue {
  const float *scales; /* per output, for int8; or null */
  const float *bias;   /* or null */
  int gated;           /* panels come in pairs of gate and up: y = silu(gate) * up */
  enum type type;      /* of y */
};

INLINE vf finish(vf sum, const struct epilogue *e, long n) {
  if (e->scales) sum *= load(e->scales, n, F32);
  if (e->bias) sum += load(e->bias, n, F32);
  return sum;
}

/* `sums` are those of panels p and p + 1. */
INLINE void put(char *y_row, long p, const vf *sums, const struct epilogue *e) {
  vf first = finish(sums[0], e, p * PANEL), second = finish(sums[1], e, (p + 1) * PANEL);
  if (e->gated) {
    store(y_row, p / 2 * PANEL, silu(first) * second, e->type);
  } else {
    store(y_row, p * PANEL, first, e->type);
    store(y_row, (p + 1) * PANEL, second, e->type);
  }
}

/* int8 panels become bfloat16 ones, exactly, in memory that stays in the first-level cache. */
static void widen(const int8_t *from, bf16 *to, long count) {
  for (long i = 0; i < count; i += 32) {
    __m512 low = (__m512)load_i8(from + i), high = (__m512)load_i8(from + i + 16);
    __m512bh both = _mm512_cvtne2ps_pbh(high, low);
    memcpy(to + i, &both, 64);
  }
}

#define PREFETCH_AHEAD 2048

/* One to four rows by dot products, two panels at a time. */
INLINE void dot_rows(const bf16 *x, long rows, long k, const bf16 *w, char *y, long y_stride, long p,
                     const struct epilogue *e) {
  __m512 sums[2][4][2] = {};
  const bf16 *w0 = w, *w1 = w + k * PANEL;
  for (long i = 0; i < k; i += 4) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      long at = i + 2 * half;
      _mm_prefetch((const char *)(w0 + at * PANEL) + PREFETCH_AHEAD, _MM_HINT_T0);
      _mm_prefetch((const char *)(w1 + at * PANEL) + PREFETCH_AHEAD, _MM_HINT_T0);
      __m512bh a, b;
      memcpy(&a, w0 + at * PANEL, 64);
      memcpy(&b, w1 + at * PANEL, 64);
#pragma GCC unroll 4
      for (long r = 0; r < rows; r++) {
        int pair;
        memcpy(&pair, x + r * k + at, 4);
        __m512bh xs = (__m512bh)_mm512_set1_epi32(pair);
        sums[0][r][half] = _mm512_dpbf16_ps(sums[0][r][half], a, xs);
        sums[1][r][half] = _mm512_dpbf16_ps(sums[1][r][half], b, xs);
      }
    }
  }
#pragma GCC unroll 4
  for (long r = 0; r < rows; r++) {
    vf both[2] = {(vf)(sums[0][r][0] + sums[0][r][1]), (vf)(sums[1][r][0] + sums[1][r][1])};
    put(y + r * y_stride, p, both, e);
  }
}

static void dot_panels(const bf16 *x, long rows, long k, const bf16 *w, char *y, long y_stride, long p,
                       const struct epilogue *e) {
  for (; rows >= 4; rows -= 4, x += 4 * k, y += 4 * y_stride) dot_rows(x, 4, k, w, y, y_stride, p, e);
  switch (rows) {
    case 1: dot_rows(x, 1, k, w, y, y_stride, p, e); break;
    case 2: dot_rows(x, 2, k, w, y, y_stride, p, e); break;
    case 3: dot_rows(x, 3, k, w, y, y_stride, p, e); break;
  }
}

#if defined(__AMX_BF16__)

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

/* The system lends the matrix unit to whoever asks. 0: granted. */
EXPORT int request_tiles(void) { return (int)syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA); }

INLINE void fetch_ahead(const bf16 *w0, const bf16 *w1) {
  for (long i = PREFETCH_AHEAD; i < PREFETCH_AHEAD + 1024; i += 64) {
    _mm_prefetch((const char *)w0 + i, _MM_HINT_T0);
    _mm_prefetch((const char *)w1 + i, _MM_HINT_T0);
  }
}

/* Up to 32 rows of x by two panels. `stride` is that of x's rows in bytes. Tiles 0-3: sums. 4, 5: rows of x. 6, 7:
   weights. */
INLINE void tile_rows(const bf16 *x, long stride, int rows, int streams, long k, const bf16 *w, char *y, long y_stride, long p,
                      const struct epilogue *e) {
  const bf16 *w1 = w + k * PANEL, *second = (const bf16 *)((const char *)x + 16 * stride);
  MEMORY_IS_WRITTEN;
  _tile_zero(0);
  _tile_zero(1);
  if (rows > 16) {
    _tile_zero(2);
    _tile_zero(3);
    for (long i = 0; i < k; i += 32) {
      if (streams) fetch_ahead(w + i * PANEL, w1 + i * PANEL);
      _tile_loadd(4, x + i, stride);
      _tile_loadd(6, w + i * PANEL, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w1 + i * PANEL, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, second + i, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  } else {
    for (long i = 0; i < k; i += 32) {
      fetch_ahead(w + i * PANEL, w1 + i * PANEL);
      _tile_loadd(4, x + i, stride);
      _tile_loadd(6, w + i * PANEL, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w1 + i * PANEL, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
  }
  float sums[4][16][16];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  if (rows > 16) {
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
  }
  MEMORY_IS_WRITTEN;
  for (int r = 0; r < rows; r++) {
    int tile = r / 16 * 2;
    vf both[2] = {load(sums[tile][r % 16], 0, F32), load(sums[tile + 1][r % 16], 0, F32)};
    put(y + r * y_stride, p, both, e);
  }
}

static void tile_panels(const bf16 *x, long rows, long k, const bf16 *w, char *y, long y_stride, long p,
                        const struct epilogue *e) {
  int streams = 1; /* the first rows read the weights from memory, the others from the cache */
  for (; rows >= 32; rows -= 32, streams = 0, x += 32 * k, y += 32 * y_stride)
    tile_rows(x, 2 * k, 32, streams, k, w, y, y_stride, p, e);
  if (rows > 0) {
    configure_tiles(rows < 16 ? rows : 16, rows > 16 ? rows - 16 : 16);
    tile_rows(x, 2 * k, rows, streams, k, w, y, y_stride, p, e);
    configure_tiles(16, 16);
  }
}

#endif

/* x [m, k], weights [n, k] in panels, y [m, n] or, gated, [m, n / 2]. k and n are multiples of 32. `scratch`, for int8, has
   room for two panels in bfloat16 for each thread. */
EXPORT void gemm(const bf16 *x, long m, long k, const void *weights, long n, int is_int8, const float *scales,
                 const float *bias, int gated, int y_type, char *y, bf16 *scratch, int threads) {
  struct epilogue e = {scales, bias, gated, y_type};
  long y_stride = (gated ? n / 2 : n) * size_of(y_type), block = BLOCK_BYTES / (2 * k) / 32 * 32;
  if (block < 32) block = 32;
  long blocks = (m + block - 1) / block, pairs = n / (2 * PANEL);
#pragma omp parallel num_threads(threads)
  {
#if defined(__AMX_BF16__)
    configure_tiles(16, 16);
#endif
    /* Dynamic, because a core may be lent to somebody else in the middle. */
#pragma omp for schedule(dynamic, m > 64 ? 1 : 4) nowait
    for (long item = 0; item < blocks * pairs; item++) {
      long first = item / pairs * block, rows = m - first < block ? m - first : block, pair = item % pairs;
      const bf16 *w = (const bf16 *)weights + pair * 2 * PANEL * k;
      if (is_int8) {
        bf16 *own = scratch + omp_get_thread_num() * 2 * PANEL * k;
        widen((const int8_t *)weights + pair * 2 * PANEL * k, own, 2 * PANEL * k);
        w = own;
      }
#if defined(__AMX_BF16__)
      if (rows > 4) {
        tile_panels(x + first * k, rows, k, w, y + first * y_stride, y_stride, 2 * pair, &e);
        continue;
      }
#endif
      dot_panels(x + first * k, rows, k, w, y + first * y_stride, y_stride, 2 * pair, &e);
    }
#if defined(__AMX_BF16__)
    _tile_release();
#endif
  }
}

#endif
