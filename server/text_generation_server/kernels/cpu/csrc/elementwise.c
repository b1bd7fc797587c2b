/* What happens between the matrix products and attention, a token or a row at a time. */
#include "vectors.h"

/* From so many numbers on it pays to wake the other threads. */
#define WORTH_THREADS 32768

EXPORT void embed(const int32_t *ids, long tokens, const char *weight, long row_bytes, char *out, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * row_bytes > WORTH_THREADS)
  for (long t = 0; t < tokens; t++) memcpy(out + t * row_bytes, weight + ids[t] * row_bytes, row_bytes);
}

INLINE vf rounded(vf x, enum type type) {
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
      v = rounded(v + load(residual, i, type), type);
      store(residual, i, v, type);
    }
    squares += v * v;
  }
  float factor = 1.0f / sqrtf(sum_of(squares) / size + eps);
  for (long i = 0; i < size; i += LANES)
    store(out, i, rounded(load(from, i, type) * factor, type) * load(weight, i, type), type);
}

EXPORT void rms_norm(const char *x, char *residual, long tokens, long size, int type, const void *weight, float eps,
                     char *out, int threads) {
  long bytes = size * size_of(type);
#pragma omp parallel for num_threads(threads) if (tokens * size > WORTH_THREADS)
  for (long t = 0; t < tokens; t++) {
    char *r = residual ? residual + t * bytes : 0;
    if (type == BF16)
      norm_row(x + t * bytes, r, weight, size, BF16, eps, out + t * bytes);
    else
      norm_row(x + t * bytes, r, weight, size, F32, eps, out + t * bytes);
  }
}

EXPORT void silu_mul(const char *gate_up, long tokens, long size, int type, char *out, int threads) {
  long bytes = size * size_of(type);
#pragma omp parallel for num_threads(threads) if (tokens * size > WORTH_THREADS)
  for (long t = 0; t < tokens; t++) {
    const char *gate = gate_up + t * 2 * bytes;
    for (long i = 0; i < size; i += LANES) {
      vf g = rounded(silu(load(gate, i, type)), type);
      store(out + t * bytes, i, g * load(gate + bytes, i, type), type);
    }
  }
}

#define MAX_SIZE 256
#define SMALLEST_SCALE 1e-6f

INLINE void rotate(float *head, long half, const float *cos, const float *sin) {
  for (long i = 0; i < half; i++) {
    float first = head[i], second = head[half + i];
    head[i] = first * cos[i] - second * sin[i];
    head[half + i] = second * cos[i] + first * sin[i];
  }
}

/* Into the cache; in 8 bits with a scale that is the largest magnitude over the type's largest number. */
INLINE void store_head(const float *head, long size, char *to, float *scale, enum type type) {
  float factor = 1.0f;
  if (scale) {
    vf largest = {}, nan = {};
    for (long i = 0; i < size; i += LANES) {
      vf v = load(head, i, F32);
      largest = max_of(max_of(v, -v), largest);
      nan += v * 0.0f; /* stays 0 unless something is not finite */
    }
    float s = largest_of(largest) / (type == I8 ? 127.0f : 448.0f) + sum_of(nan);
    *scale = s < SMALLEST_SCALE ? SMALLEST_SCALE : s;
    factor = *scale;
  }
  for (long i = 0; i < size; i += LANES) {
    vf v = load(head, i, F32);
    store(to, i, scale ? v / factor : v, type);
  }
}

/* Turns queries and keys in qkv [tokens, heads + 2 * kv_heads, size], queries in place; keys and values go into their
   slots of the cache [slots, 2 * kv_heads, size]. */
EXPORT void rope_and_store(char *qkv, long tokens, long heads, long kv_heads, long size, int type, const float *cos,
                           const float *sin, const int32_t *positions, char *kv, float *scales, int kv_type,
                           const int32_t *slots, int threads) {
  long all = heads + 2 * kv_heads, bytes = size * size_of(type);
#pragma omp parallel for num_threads(threads) if (tokens * all * size > WORTH_THREADS)
  for (long t = 0; t < tokens; t++) {
    float head[MAX_SIZE] __attribute__((aligned(64)));
    const float *c = cos + positions[t] * (size / 2), *s = sin + positions[t] * (size / 2);
    for (long h = 0; h < all; h++) {
      char *from = qkv + (t * all + h) * bytes;
      for (long i = 0; i < size; i += LANES) store(head, i, load(from, i, type), F32);
      if (h < heads + kv_heads) rotate(head, size / 2, c, s);
      if (h < heads) {
        for (long i = 0; i < size; i += LANES) store(from, i, load(head, i, F32), type);
      } else {
        /* Through the model's own type, as if it had been written there. */
        for (long i = 0; i < size; i += LANES) store(head, i, rounded(load(head, i, F32), type), F32);
        long at = (long)slots[t] * 2 * kv_heads + h - heads;
        store_head(head, size, kv + at * size * size_of(kv_type), scales ? scales + at : 0, kv_type);
      }
    }
  }
}

/* table[row, length - 1] = slot; the newest token of each row, its position and its length come out. */
EXPORT void place(const int32_t *rows, const int32_t *slots, long count, const int32_t *history, int32_t *table, long width,
                  const int32_t *lengths, int32_t *ids, int32_t *positions, int32_t *row_lengths) {
  for (long i = 0; i < count; i++) {
    long row = rows[i], position = lengths[row] - 1;
    table[row * width + position] = slots[i];
    ids[i] = history[row * width + position];
    positions[i] = (int32_t)position;
    row_lengths[i] = (int32_t)position + 1;
  }
}

EXPORT void advance(int32_t *history, long width, int32_t *lengths, const int32_t *rows, const int32_t *ids, long count) {
  for (long i = 0; i < count; i++) {
    long row = rows[i];
    history[row * width + lengths[row]] = ids[i];
    lengths[row]++;
  }
}
