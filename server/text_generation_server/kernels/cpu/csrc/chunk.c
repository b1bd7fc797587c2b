/* Attention of a prompt chunk in bfloat16 on the matrix unit. Keys and values of the row are first laid out as its tiles want
   them, once for all queries; then blocks of 32 queries walk over them, 128 keys at a time, with a running softmax.

   A query's result does not depend on the chunk it came in. */
#include "team.h"
#include "vectors.h"

#if defined(__AMX_BF16__)

#include "tiles.h"

#define QUERIES 32
#define KEYS 128
#define MAX_SIZE 256

/* Of one key/value head of the row: keys [length / 16][size / 2][16][2], values [length / 32][size / 16][16][16][2], where the
   innermost pairs are neighbours in the head, and in the row; `length` is whole blocks of KEYS, with zeros at the end. */
struct laid_out {
  bf16 *keys, *values;
};

struct chunk {
  const bf16 *q;
  long q_stride, heads, kv_heads, size, start, end;
  bf16 *out;
  float scale;
  const struct laid_out *rows;
};

static long padded(long length) { return (length + KEYS - 1) / KEYS * KEYS; }

/* A head of the cache as bfloat16. */
INLINE void fetch_head(const void *heads, const float *scales, enum type type, long at, long size, bf16 *to) {
  if (type == BF16) {
    memcpy(to, (const bf16 *)heads + at * size, size * sizeof(bf16));
  } else {
    for (long d = 0; d < size; d += LANES) store_bf16(to + d, load(heads, at * size + d, type) * scales[at]);
  }
}

INLINE vu halves(const bf16 *p) {
  vu16 h;
  memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, vu);
}

/* 32 positions from `first` on. */
static void lay_out(const void *heads, const float *scales, enum type type, long kv_heads, long kv_head, long size,
                    const int32_t *slots, long first, long end, struct laid_out *to) {
  bf16 states[2][MAX_SIZE];
  bf16 *keys = to->keys + first * size, *values = to->values + first * size;
  for (int i = 0; i < 32; i += 2) {
    for (int which = 0; which < 2; which++) { /* keys, then values */
      for (int j = 0; j < 2; j++) {
        if (first + i + j < end)
          fetch_head(heads, scales, type, (slots[first + i + j] * 2L + which) * kv_heads + kv_head, size, states[j]);
        else
          memset(states[j], 0, size * sizeof(bf16));
      }
      if (which == 0) {
        for (int j = 0; j < 2; j++) {
          uint32_t *column = (uint32_t *)(keys + (i + j) / 16 * 16 * size) + (i + j) % 16;
          for (long d = 0; d < size / 2; d++) memcpy(column + d * 16, states[j] + 2 * d, 4);
        }
      } else {
        for (long d = 0; d < size; d += 16) {
          vu pairs = halves(states[0] + d) | halves(states[1] + d) << 16;
          memcpy(values + d * 32 + i / 2 * 32, &pairs, sizeof pairs);
        }
      }
    }
  }
}

/* Tiles in the order of their columns, each with rows of 64 bytes one behind the other: far apart, as rows of a matrix, they
   would drive each other out of the cache. */
struct block {
  bf16 q[MAX_SIZE / 32][QUERIES][32], weights[KEYS / 32][QUERIES][32];
  float scores[KEYS / 16][QUERIES][16], out[MAX_SIZE / 16][QUERIES][16], peaks[QUERIES], sums[QUERIES];
} __attribute__((aligned(64)));

static void score(struct block *b, const bf16 *keys, long size) {
  MEMORY_IS_WRITTEN;
  for (int k = 0; k < KEYS; k += 32) {
    const bf16 *first = keys + k * size, *second = first + 16 * size;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long d = 0; d < size; d += 32) {
      _tile_loadd(4, b->q[d / 32][0], 64);
      _tile_loadd(5, b->q[d / 32][16], 64);
      _tile_loadd(6, first + d * 16, 64);
      _tile_loadd(7, second + d * 16, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, b->scores[k / 16][0], 64);
    _tile_stored(1, b->scores[k / 16 + 1][0], 64);
    _tile_stored(2, b->scores[k / 16][16], 64);
    _tile_stored(3, b->scores[k / 16 + 1][16], 64);
  }
  MEMORY_IS_WRITTEN;
}

/* One query sees the first `visible` keys of the tile. */
INLINE void weigh(struct block *b, int i, long visible, float scale, long size) {
  const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  vf scores[KEYS / LANES], peaks = splat(-INFINITY), sums = {};
  for (int k = 0; k < KEYS / LANES; k++) {
    vf s = load(b->scores[k][i], 0, F32) * scale;
    scores[k] = choose(lanes + k * LANES < (int)visible, s, splat(-INFINITY));
    peaks = max_of(peaks, scores[k]);
  }
  float peak = largest_of(peaks);
  if (!(peak <= b->peaks[i])) {
    vf shrink = exp2_of(splat(b->peaks[i] - peak));
    b->sums[i] *= shrink[0];
    for (long d = 0; d < size / LANES; d++) store(b->out[d][i], 0, load(b->out[d][i], 0, F32) * shrink, F32);
    b->peaks[i] = peak;
  }
  for (int k = 0; k < KEYS / LANES; k++) {
    vf w = weight_of(scores[k] - b->peaks[i]);
    store_bf16(b->weights[k / 2][i] + k % 2 * LANES, w);
    sums += w;
  }
  b->sums[i] += sum_of(sums);
}

static void add_values(struct block *b, const bf16 *values, long size) {
  MEMORY_IS_WRITTEN;
  for (long d = 0; d < size; d += 32) {
    int second = d + 16 < size;
    _tile_loadd(0, b->out[d / 16][0], 64);
    _tile_loadd(2, b->out[d / 16][16], 64);
    if (second) {
      _tile_loadd(1, b->out[d / 16 + 1][0], 64);
      _tile_loadd(3, b->out[d / 16 + 1][16], 64);
    }
    for (int k = 0; k < KEYS; k += 32) {
      const bf16 *v = values + k * size + d * 32;
      _tile_loadd(4, b->weights[k / 32][0], 64);
      _tile_loadd(5, b->weights[k / 32][16], 64);
      _tile_loadd(6, v, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
      if (second) {
        _tile_loadd(7, v + 16 * 32, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, b->out[d / 16][0], 64);
    _tile_stored(2, b->out[d / 16][16], 64);
    if (second) {
      _tile_stored(1, b->out[d / 16 + 1][0], 64);
      _tile_stored(3, b->out[d / 16 + 1][16], 64);
    }
  }
  MEMORY_IS_WRITTEN;
}

/* Queries `first` … of one key/value head: its group's heads of one position, then those of the next. */
static void attend_block(const struct chunk *c, long kv_head, long first, struct block *b) {
  long group = c->heads / c->kv_heads, size = c->size, all = (c->end - c->start) * group;
  long count = all - first < QUERIES ? all - first : QUERIES;
  for (long i = 0; i < QUERIES; i++) {
    long query = first + (i < count ? i : 0), token = query / group, head = kv_head * group + query % group;
    for (long d = 0; d < size; d += 32) memcpy(b->q[d / 32][i], c->q + token * c->q_stride + head * size + d, 64);
    for (long d = 0; d < size; d += LANES) memset(b->out[d / 16][i], 0, 64);
    b->peaks[i] = -INFINITY;
    b->sums[i] = 0;
  }
  long last = c->start + (first + count - 1) / group; /* the position of the last query */
  for (long key = 0; key <= last; key += KEYS) {
    score(b, c->rows[kv_head].keys + key * size, size);
    for (int i = 0; i < QUERIES; i++) {
      long visible = c->start + (first + (i < count ? i : 0)) / group - key + 1;
      weigh(b, i, visible < KEYS ? visible : KEYS, c->scale, size);
    }
    add_values(b, c->rows[kv_head].values + key * size, size);
  }
  for (long i = 0; i < count; i++) {
    long token = (first + i) / group, head = kv_head * group + (first + i) % group;
    for (long d = 0; d < size; d += LANES)
      store_bf16(c->out + (token * c->heads + head) * size + d, load(b->out[d / 16][i], 0, F32) / b->sums[i]);
  }
}

/* Queries q [end - start, heads, size] at positions start … end - 1 of a row with these slots, each over the row's
   positions up to its own; out is like q, without gaps. size is a multiple of 32. `scratch` has room for keys and values
   of the row, rounded up to whole blocks of KEYS positions. */
EXPORT void attend_chunk(const union word *w, struct team *team, int me) {
  const bf16 *q = w[0].p;
  long q_stride = w[1].i, heads = w[3].i, kv_heads = w[6].i, size = w[7].i, start = w[10].i, end = w[11].i;
  bf16 *out = w[2].p, *scratch = w[13].p;
  const void *kv = w[4].p;
  const float *scales = w[5].p;
  enum type kv_type = w[8].i;
  const int32_t *slots = w[9].p;
  struct laid_out rows[kv_heads];
  long length = padded(end), group = heads / kv_heads;
  long blocks = ((end - start) * group + QUERIES - 1) / QUERIES;
  for (long h = 0; h < kv_heads; h++) {
    rows[h].keys = scratch + 2 * h * size * length;
    rows[h].values = rows[h].keys + size * length;
  }
  struct chunk c = {q, q_stride, heads, kv_heads, size, start, end, out, (float)w[12].f * LOG2E, rows};
  SHARE(item, kv_heads * (length / 32), 1, team)
    lay_out(kv, scales, kv_type, kv_heads, item % kv_heads, size, slots, item / kv_heads * 32, end, &rows[item % kv_heads]);
  meet(team);
  struct block b;
  configure_tiles(16, 16);
  /* The last queries have the most keys: they begin. */
  SHARE(item, kv_heads * blocks, 1, team)
    attend_block(&c, item % kv_heads, (blocks - 1 - item / kv_heads) * QUERIES, &b);
  _tile_release();
}

#endif
