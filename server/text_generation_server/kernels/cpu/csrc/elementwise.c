/* What happens between the matrix products and attention, a token or a row at a time. */
#include "team.h"
#include "vectors.h"

/* Tokens that a thread takes at a time. */
#define GRAIN 4

/* ids, tokens, weight, bytes of its rows, out */
EXPORT void embed(const union word *w, struct team *team, int me) {
  const int32_t *ids = w[0].p;
  long tokens = w[1].i, bytes = w[3].i;
  const char *weight = w[2].p;
  char *out = w[4].p;
  FOR_EACH_ITEM(t, tokens, GRAIN, team) memcpy(out + t * bytes, weight + ids[t] * bytes, bytes);
}

INLINE vf round_to_type(vf x, enum type type) {
  if (type != BF16) return x;
  bf16 h[LANES];
  store_bf16(h, x);
  return load_bf16(h);
}

/* With a residual: it becomes x + residual, which is what is normed. `out` may be x. */
INLINE void norm_row(const void *x, void *residual, const void *weight, long size, enum type type, float eps,
                     void *out) {
  vf squares = {};
  const void *from = residual ? residual : x;
  for (long i = 0; i < size; i += LANES) {
    vf v = load(x, i, type);
    if (residual) {
      v = round_to_type(v + load(residual, i, type), type);
      store(residual, i, v, type);
    }
    squares += v * v;
  }
  float factor = 1.0f / sqrtf(lane_sum(squares) / size + eps);
  for (long i = 0; i < size; i += LANES)
    store(out, i, round_to_type(load(from, i, type) * factor, type) * load(weight, i, type), type);
}

/* x [tokens, size], residual or null, tokens, size, type, weight, eps, out */
EXPORT void rms_norm(const union word *w, struct team *team, int me) {
  const char *x = w[0].p;
  char *residual = w[1].p, *out = w[7].p;
  long tokens = w[2].i, size = w[3].i;
  enum type type = w[4].i;
  const void *weight = w[5].p;
  float eps = w[6].f;
  long bytes = size * bytes_of(type);
  FOR_EACH_ITEM(t, tokens, GRAIN, team) {
    char *r = residual ? residual + t * bytes : 0;
    if (type == BF16)
      norm_row(x + t * bytes, r, weight, size, BF16, eps, out + t * bytes);
    else
      norm_row(x + t * bytes, r, weight, size, F32, eps, out + t * bytes);
  }
}

/* gate_up [tokens, 2 * size], tokens, size, type, out */
EXPORT void silu_mul(const union word *w, struct team *team, int me) {
  const char *gate_up = w[0].p;
  char *out = w[4].p;
  long tokens = w[1].i, size = w[2].i;
  enum type type = w[3].i;
  long bytes = size * bytes_of(type);
  FOR_EACH_ITEM(t, tokens, GRAIN, team) {
    const char *gate = gate_up + t * 2 * bytes;
    for (long i = 0; i < size; i += LANES) {
      vf g = round_to_type(silu(load(gate, i, type)), type);
      store(out + t * bytes, i, g * load(gate + bytes, i, type), type);
    }
  }
}

#define MAX_HEAD_SIZE 256
#define SMALLEST_SCALE 1e-6f

INLINE void rotate_head(float *head, long half, const float *cos, const float *sin) {
  long i = 0;
  for (; i + LANES <= half; i += LANES) {
    vf first = load(head, i, F32), second = load(head, half + i, F32), c = load(cos, i, F32), s = load(sin, i, F32);
    store(head, i, first * c - second * s, F32);
    store(head, half + i, second * c + first * s, F32);
  }
  for (; i < half; i++) {
    float first = head[i], second = head[half + i];
    head[i] = first * cos[i] - second * sin[i];
    head[half + i] = second * cos[i] + first * sin[i];
  }
}

/* Into the cache; in 8 bits with a scale that is the largest magnitude over the type's largest number. */
INLINE void store_kv_head(const float *head, long size, char *to, float *scale, enum type type) {
  float factor = 1.0f;
  if (scale) {
    vf largest = {}, nan = {};
    for (long i = 0; i < size; i += LANES) {
      vf v = load(head, i, F32);
      largest = larger(larger(v, -v), largest);
      nan += v * 0.0f; /* stays 0 unless something is not finite */
    }
    float s = lane_max(largest) / (type == I8 ? 127.0f : 448.0f) + lane_sum(nan);
    *scale = s < SMALLEST_SCALE ? SMALLEST_SCALE : s;
    factor = *scale;
  }
  for (long i = 0; i < size; i += LANES) {
    vf v = load(head, i, F32);
    store(to, i, scale ? v / factor : v, type);
  }
}

struct fused_heads {
  char *qkv; /* [tokens, heads + 2 * kv_heads, size] */
  long heads, kv_heads, size;
  char *kv; /* [slots, 2 * kv_heads, size] */
  float *scales;
  enum type kv_type;
};

INLINE void rope_and_store_token(const struct fused_heads *to, enum type type, long token, long slot, const float *cos,
                           const float *sin) {
  float head[MAX_HEAD_SIZE] __attribute__((aligned(64)));
  long all = to->heads + 2 * to->kv_heads, size = to->size, bytes = size * bytes_of(type);
  for (long h = 0; h < all; h++) {
    char *from = to->qkv + (token * all + h) * bytes;
    for (long i = 0; i < size; i += LANES) store(head, i, load(from, i, type), F32);
    if (h < to->heads + to->kv_heads) rotate_head(head, size / 2, cos, sin);
    if (h < to->heads) {
      for (long i = 0; i < size; i += LANES) store(from, i, load(head, i, F32), type);
    } else {
      /* Through the model's own type, as if it had been written there. */
      for (long i = 0; i < size; i += LANES) store(head, i, round_to_type(load(head, i, F32), type), F32);
      long at = slot * 2 * to->kv_heads + h - to->heads;
      store_kv_head(head, size, to->kv + at * size * bytes_of(to->kv_type), to->scales ? to->scales + at : 0, to->kv_type);
    }
  }
}

/* Turns queries and keys in qkv, queries in place; keys and values go into their slots of the cache.
   qkv, tokens, heads, kv_heads, size, type, cos, sin, positions, kv, scales or null, their type, slots */
EXPORT void rope_and_store(const union word *w, struct team *team, int me) {
  struct fused_heads to = {w[0].p, w[2].i, w[3].i, w[4].i, w[9].p, w[10].p, w[11].i};
  enum type type = w[5].i;
  const float *cos = w[6].p, *sin = w[7].p;
  const int32_t *positions = w[8].p, *slots = w[12].p;
  long tokens = w[1].i, half = to.size / 2;
  FOR_EACH_ITEM(t, tokens, GRAIN, team) {
    const float *c = cos + positions[t] * half, *s = sin + positions[t] * half;
    if (type == BF16)
      rope_and_store_token(&to, BF16, t, slots[t], c, s);
    else
      rope_and_store_token(&to, F32, t, slots[t], c, s);
  }
}

/* table[row, length - 1] = slot; the newest token of each row, its position and its length come out.
   rows, slots, count, history, table, width of both, lengths, ids, positions, row_lengths */
EXPORT void place(const union word *w, struct team *team, int me) {
  const int32_t *rows = w[0].p, *slots = w[1].p, *history = w[3].p, *lengths = w[6].p;
  int32_t *table = w[4].p, *ids = w[7].p, *positions = w[8].p, *row_lengths = w[9].p;
  long count = w[2].i, width = w[5].i;
  FOR_EACH_ITEM(i, count, count, team) {
    long row = rows[i], position = lengths[row] - 1;
    table[row * width + position] = slots[i];
    ids[i] = history[row * width + position];
    positions[i] = (int32_t)position;
    row_lengths[i] = (int32_t)position + 1;
  }
}

/* history, its width, lengths, rows, ids, count */
EXPORT void advance(const union word *w, struct team *team, int me) {
  int32_t *history = w[0].p, *lengths = w[2].p;
  const int32_t *rows = w[3].p, *ids = w[4].p;
  long width = w[1].i, count = w[5].i;
  FOR_EACH_ITEM(i, count, count, team) {
    long row = rows[i];
    history[row * width + lengths[row]] = ids[i];
    lengths[row]++;
  }
}
