/* The kernels between matrix products and attention. Each works on one token or one row at a time. */
#include "team.h"
#include "vectors.h"

#define TOKENS_AT_ONCE 4 /* number of tokens that a thread takes at a time */

EXPORT void embed(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct embed_arguments *a = arguments;
  const int32_t *ids = a->ids;
  long tokens = a->tokens, bytes = a->row_bytes;
  const char *weight = a->weight;
  char *out = a->out;
  FOR_EACH_ITEM(t, tokens, TOKENS_AT_ONCE, team) memcpy(out + t * bytes, weight + ids[t] * bytes, bytes);
}

EXPORT void embed_panels(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct embed_panels_arguments *a = arguments;
  const int32_t *ids = a->ids;
  long tokens = a->tokens, outputs = a->outputs, words = a->words;
  const uint32_t *panels = a->panels;
  uint32_t *out = a->out;
  FOR_EACH_ITEM(t, tokens, TOKENS_AT_ONCE, team) {
    const uint32_t *from = panels + ids[t] / outputs * words * outputs + ids[t] % outputs;
    for (long i = 0; i < words; i++) out[t * words + i] = from[i * outputs];
  }
}

/* x, rounded to bfloat16 if the model computes in bfloat16. */
INLINE vf round_to_type(vf x, enum type type) {
  if (type != BF16) return x;
  bf16 h[LANES];
  store_bf16(h, x);
  return load_bf16(h);
}

/* One token of rms_norm. Intermediate results are rounded to the model's type where torch rounds them. */
INLINE void norm_row(const void *x, void *residual, const void *weight, enum type weight_type, long size,
                     enum type type, float eps, void *out) {
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
    store(out, i, round_to_type(load(from, i, type) * factor, weight_type) * load(weight, i, weight_type), type);
}

EXPORT void rms_norm(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct rms_norm_arguments *a = arguments;
  const char *x = a->x;
  char *residual = a->residual, *out = a->out;
  long tokens = a->tokens, size = a->width;
  enum type type = a->type;
  const void *weight = a->weight;
  float eps = a->eps;
  long bytes = size * bytes_of(type);
  FOR_EACH_ITEM(t, tokens, TOKENS_AT_ONCE, team) {
    char *r = residual ? residual + t * bytes : 0;
    if (type == F32)
      norm_row(x + t * bytes, r, weight, F32, size, F32, eps, out + t * bytes);
    else if (a->weight_type == BF16)
      norm_row(x + t * bytes, r, weight, BF16, size, BF16, eps, out + t * bytes);
    else
      norm_row(x + t * bytes, r, weight, F32, size, BF16, eps, out + t * bytes);
  }
}

EXPORT void rms_norm_part(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct rms_norm_part_arguments *a = arguments;
  char *x = a->x;
  long tokens = a->tokens, size = a->width;
  enum type type = a->type;
  const void *weight = a->weight;
  float eps = a->eps;
  long bytes = a->stride * bytes_of(type);
  FOR_EACH_ITEM(t, tokens, TOKENS_AT_ONCE, team) {
    char *row = x + t * bytes;
    if (type == F32)
      norm_row(row, 0, weight, F32, size, F32, eps, row);
    else if (a->weight_type == BF16)
      norm_row(row, 0, weight, BF16, size, BF16, eps, row);
    else
      norm_row(row, 0, weight, F32, size, BF16, eps, row);
  }
}

/* One token of layer_norm. */
INLINE void layer_norm_row(const void *x, void *residual, const void *weight, const void *bias, long size,
                           enum type type, float eps, void *out) {
  vf sum = {}, squares = {};
  const void *from = residual ? residual : x;
  for (long i = 0; i < size; i += LANES) {
    vf v = load(x, i, type);
    if (residual) {
      v = round_to_type(v + load(residual, i, type), type);
      store(residual, i, v, type);
    }
    sum += v;
  }
  float mean = lane_sum(sum) / size;
  for (long i = 0; i < size; i += LANES) {
    vf v = load(from, i, type) - mean;
    squares += v * v;
  }
  float factor = 1.0f / sqrtf(lane_sum(squares) / size + eps);
  for (long i = 0; i < size; i += LANES) {
    vf v = (load(from, i, type) - mean) * factor * load(weight, i, type);
    store(out, i, bias ? v + load(bias, i, type) : v, type);
  }
}

EXPORT void layer_norm(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct layer_norm_arguments *a = arguments;
  const char *x = a->x;
  char *residual = a->residual, *out = a->out;
  long tokens = a->tokens, size = a->width;
  enum type type = a->type;
  const void *weight = a->weight, *bias = a->bias;
  float eps = a->eps;
  long bytes = size * bytes_of(type);
  FOR_EACH_ITEM(t, tokens, TOKENS_AT_ONCE, team) {
    char *r = residual ? residual + t * bytes : 0;
    if (type == BF16)
      layer_norm_row(x + t * bytes, r, weight, bias, size, BF16, eps, out + t * bytes);
    else
      layer_norm_row(x + t * bytes, r, weight, bias, size, F32, eps, out + t * bytes);
  }
}

EXPORT void add(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct add_arguments *a = arguments;
  char *x = a->x;
  const char *y = a->y;
  long tokens = a->tokens, size = a->width;
  enum type type = a->type;
  long bytes = size * bytes_of(type);
  FOR_EACH_ITEM(t, tokens, TOKENS_AT_ONCE, team) {
    for (long i = 0; i < size; i += LANES)
      store(x + t * bytes, i, load(x + t * bytes, i, type) + load(y + t * bytes, i, type), type);
  }
}

/* One token of activate. `up` is null where nothing is gated. */
INLINE void activate_row(const void *x, const void *up, long size, enum type type, enum activation activation,
                         void *out) {
  for (long i = 0; i < size; i += LANES) {
    vf y = activated(load(x, i, type), activation);
    store(out, i, up ? round_to_type(y, type) * load(up, i, type) : y, type);
  }
}

EXPORT void activate(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct activate_arguments *a = arguments;
  const char *x = a->x;
  char *out = a->out;
  long tokens = a->tokens, size = a->width, gated = a->gated;
  enum type type = a->type;
  enum activation activation = a->activation;
  long bytes = size * bytes_of(type);
  FOR_EACH_ITEM(t, tokens, TOKENS_AT_ONCE, team) {
    const char *from = x + t * bytes * (gated ? 2 : 1);
    const char *up = gated ? from + bytes : 0;
    if (type == BF16)
      activate_row(from, up, size, BF16, activation, out + t * bytes);
    else
      activate_row(from, up, size, F32, activation, out + t * bytes);
  }
}

EXPORT void silu_mul(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct silu_mul_arguments *a = arguments;
  const char *gate_up = a->gate_up;
  char *out = a->out;
  long tokens = a->tokens, size = a->width;
  enum type type = a->type;
  long bytes = size * bytes_of(type);
  FOR_EACH_ITEM(t, tokens, TOKENS_AT_ONCE, team) {
    const char *gate = gate_up + t * 2 * bytes;
    for (long i = 0; i < size; i += LANES) {
      vf g = round_to_type(silu(load(gate, i, type)), type);
      store(out + t * bytes, i, g * load(gate + bytes, i, type), type);
    }
  }
}

#define SMALLEST_SCALE 1e-6f /* smallest scale of a head in 8 bits, so that no number is divided by 0 */

/* Rotates each pair of numbers (i, half + i) of a head by the angle with this cosine and sine. */
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

/* The RMS norm of a head, in place. Intermediate results are rounded to the model's type where torch rounds them. */
INLINE void norm_head(float *head, long size, const void *weight, enum type weight_type, float eps, enum type type) {
  vf squares = {};
  for (long i = 0; i < size; i += LANES) {
    vf v = load(head, i, F32);
    squares += v * v;
  }
  float factor = 1.0f / sqrtf(lane_sum(squares) / size + eps);
  for (long i = 0; i < size; i += LANES) {
    vf v = round_to_type(load(head, i, F32) * factor, weight_type);
    store(head, i, round_to_type(v * load(weight, i, weight_type), type), F32);
  }
}

/* Stores a head in the cache. For 8-bit types, its numbers are divided by a scale: the head's largest magnitude
   divided by the type's largest number. A head that is not finite gets the scale NaN. */
INLINE void store_kv_head(const float *head, long size, char *to, float *scale, enum type type) {
  float factor = 1.0f;
  if (scale) {
    vf largest = {}, nan = {};
    for (long i = 0; i < size; i += LANES) {
      vf v = load(head, i, F32);
      largest = larger(larger(v, -v), largest);
      nan += v * 0.0f; /* stays 0 if all numbers are finite */
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

/* Where rope_and_store reads heads and where it stores them. */
struct fused_heads {
  char *qkv; /* [tokens, heads + 2 * kv_heads, size] */
  long heads, kv_heads, size;
  char *kv;      /* [slots, 2 * kv_heads, size] */
  float *scales; /* [slots, 2 * kv_heads], or null */
  enum type kv_type;
  const void *query_norm, *key_norm; /* [size], or null */
  enum type norm_type;
  float eps;
};

/* Rotates and stores the heads of one token. `type` is the type of qkv. */
INLINE void rope_and_store_token(const struct fused_heads *to, enum type type, long token, long slot, const float *cos,
                                 const float *sin) {
  float head[MAX_HEAD_SIZE] __attribute__((aligned(64)));
  long all = to->heads + 2 * to->kv_heads, size = to->size, bytes = size * bytes_of(type);
  for (long h = 0; h < all; h++) {
    char *from = to->qkv + (token * all + h) * bytes;
    for (long i = 0; i < size; i += LANES) store(head, i, load(from, i, type), F32);
    if (h < to->heads + to->kv_heads) {
      const void *norm = h < to->heads ? to->query_norm : to->key_norm;
      if (norm && to->norm_type == BF16)
        norm_head(head, size, norm, BF16, to->eps, type);
      else if (norm)
        norm_head(head, size, norm, F32, to->eps, type);
      rotate_head(head, size / 2, cos, sin);
    }
    if (h < to->heads) {
      for (long i = 0; i < size; i += LANES) store(from, i, load(head, i, F32), type);
    } else {
      /* The key is rounded to the model's type first, as if it had been written to qkv and read again. */
      for (long i = 0; i < size; i += LANES) store(head, i, round_to_type(load(head, i, F32), type), F32);
      long at = slot * 2 * to->kv_heads + h - to->heads;
      store_kv_head(head, size, to->kv + at * size * bytes_of(to->kv_type), to->scales ? to->scales + at : 0,
                    to->kv_type);
    }
  }
}

EXPORT void rope_and_store(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct rope_and_store_arguments *a = arguments;
  struct fused_heads to = {.qkv = a->qkv,
                           .heads = a->heads,
                           .kv_heads = a->kv_heads,
                           .size = a->head_size,
                           .kv = a->kv,
                           .scales = a->kv_scales,
                           .kv_type = a->kv_type,
                           .query_norm = a->query_norm,
                           .key_norm = a->key_norm,
                           .norm_type = a->norm_type,
                           .eps = a->eps};
  enum type type = a->type;
  const float *cos = a->cos, *sin = a->sin;
  const int32_t *positions = a->positions, *slots = a->slots;
  long tokens = a->tokens, half = to.size / 2;
  FOR_EACH_ITEM(t, tokens, TOKENS_AT_ONCE, team) {
    const float *c = cos + positions[t] * half, *s = sin + positions[t] * half;
    if (type == BF16)
      rope_and_store_token(&to, BF16, t, slots[t], c, s);
    else
      rope_and_store_token(&to, F32, t, slots[t], c, s);
  }
}

/* One thread computes all rows of `place`, and of `advance`, because they take only a few instructions. */
EXPORT void place(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct place_arguments *a = arguments;
  const int32_t *rows = a->rows, *slots = a->slots, *history = a->history, *lengths = a->lengths;
  int32_t *table = a->table, *ids = a->ids, *positions = a->positions, *row_lengths = a->row_lengths;
  long count = a->count, stride = a->stride;
  FOR_EACH_ITEM(i, count, count, team) {
    long row = rows[i], position = lengths[row] - 1;
    table[row * stride + position] = slots[i];
    ids[i] = history[row * stride + position];
    positions[i] = (int32_t)position;
    row_lengths[i] = (int32_t)position + 1;
  }
}

EXPORT void advance(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct advance_arguments *a = arguments;
  int32_t *history = a->history, *lengths = a->lengths;
  const int32_t *rows = a->rows, *ids = a->ids;
  long stride = a->stride, count = a->count;
  FOR_EACH_ITEM(i, count, count, team) {
    long row = rows[i];
    history[row * stride + lengths[row]] = ids[i];
    lengths[row]++;
  }
}
