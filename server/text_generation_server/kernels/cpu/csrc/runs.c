/* Attention of runs: prompt chunks, each of neighbouring positions of one row, on any processor. chunk.c does the same
   on the matrix unit.

   A block is 16 or 32 queries of one key head, one in each lane of two vectors (words.h). An item of the work is some
   blocks that follow each other. The keys and values of 64 positions at a time are copied out of their slots, once for
   all blocks of an item, and then each block computes their scores, weights and weighted values, with a running softmax
   in base 2.

   A short run deep in its row has few blocks, and its time is that of reading keys and values. Its items are splits of
   the keys instead, each for all blocks, and the states after each split are merged in the end.

   The order of the arithmetic depends only on a key's position, and is that of attention.c: tiles of 64 keys, in splits
   of 512 that are merged in order. Keys that a query does not see add zeros. So a query's result does not depend on
   where the prompt was cut, and in floats it has the same bits as in attention.c. */
#include "runs.h"

#if defined(__AVX512BF16__)
/* LANES numbers of a head as bfloat16, without their scale: exact. */
INLINE __m256i load_as_bf16(const void *head, long d, enum type type) {
  if (type == BF16) return _mm256_loadu_si256((const __m256i *)((const bf16 *)head + d));
  return (__m256i)_mm512_cvtneps_pbh((__m512)load(head, d, type));
}

/* Copies the keys and values of two positions as pairs, beginning with the first of them in a tile. */
INLINE void copy_pairs(const void *const keys[2], const void *const values[2], enum type type, long size, int i,
                       struct position_tile *t) {
  for (long d = 0; d < size; d += LANES) {
    for (int j = 0; j < 2; j++)
      _mm256_storeu_si256((__m256i *)t->keys[i + j] + d / LANES, load_as_bf16(keys[j], d, type));
    __m512i even = _mm512_cvtepu16_epi32(load_as_bf16(values[0], d, type));
    __m512i odd = _mm512_cvtepu16_epi32(load_as_bf16(values[1], d, type));
    _mm512_storeu_si512(t->values[i / 2] + d, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
  }
}
#endif

/* Copies the keys and values of two positions as floats, keys in the order of attention.c. */
INLINE void copy_floats(const void *const keys[2], const void *const values[2], enum type type, long size, int i,
                        struct position_tile *t) {
  for (long d = 0; d < size; d += WIDENED)
    for (int j = 0; j < 2; j++) {
      vf x[WIDENED_VECTORS];
      load_in_order(keys[j], d, type, type, x);
      for (int v = 0; v < WIDENED_VECTORS; v++) {
        store(t->keys[i + j], d + v * LANES, x[v], F32);
        store(t->values[i + j], d + v * LANES, load(values[j], d + v * LANES, type), F32);
      }
    }
}

/* Copies the int8 keys and values of two positions as pairs of integers. */
INLINE void copy_integers(const void *const keys[2], const void *const values[2], long size, int i,
                          struct position_tile *t) {
  for (long d = 0; d < size; d += 2 * LANES) {
    vi pairs[2];
    for (int j = 0; j < 2; j++) {
      pairs[j] = load_int_pairs((const char *)keys[j] + d);
      memcpy(t->keys[i + j] + d / 2, &pairs[j], sizeof pairs[j]);
    }
    interleave((const char *)values[0] + d, (const char *)values[1] + d, pairs);
    memcpy(t->values[i / 2] + d, pairs, sizeof pairs);
  }
}

/* Copies positions first … first + TILE_KEYS - 1 of a row. Zeros replace those before `seen` and from `end` on. */
INLINE void copy_positions(const struct run_job *job, const int32_t *slots, long kv_head, long first, long seen,
                           long end, enum type type, int pairs, struct position_tile *t) {
  static const float zeros[MAX_HEAD_SIZE];
  const struct kv_cache *c = &job->cache;
  for (int i = 0; i < TILE_KEYS; i += 2) {
    const void *keys[2], *values[2];
    for (int j = 0; j < 2; j++) {
      keys[j] = values[j] = zeros;
      t->key_scales[i + j] = job->rule.scale;
      t->value_scales[i + j] = 1;
      if (first + i + j < seen || first + i + j >= end) continue;
      long slot = slots[first + i + j];
      keys[j] = head_at(c, slot, kv_head);
      values[j] = head_at(c, slot, c->kv_heads + kv_head);
      if (is_scaled(type)) {
        const float *scales = c->scales + slot * 2 * c->kv_heads + kv_head;
        t->key_scales[i + j] = pairs == INT_PAIRS ? scales[0] : job->rule.scale * scales[0];
        t->value_scales[i + j] = scales[c->kv_heads];
      }
    }
#if defined(__AVX512BF16__)
    if (pairs) {
      copy_pairs(keys, values, type, c->size, i, t);
      continue;
    }
#endif
    if (pairs == INT_PAIRS)
      copy_integers(keys, values, c->size, i, t);
    else
      copy_floats(keys, values, type, c->size, i, t);
  }
}

static void copy_positions_by_type(const struct run_job *job, const int32_t *slots, long kv_head, long first, long seen,
                                   long end, struct position_tile *t) {
#define COPY(TYPE, PAIRS) copy_positions(job, slots, kv_head, first, seen, end, TYPE, PAIRS, t)
#if defined(__AVX512BF16__)
  if (job->pairs) {
    switch (job->cache.type) {
      case I8: COPY(I8, BF16_PAIRS); break;
      case F8: COPY(F8, BF16_PAIRS); break;
      default: COPY(BF16, BF16_PAIRS);
    }
    return;
  }
#else
  if (job->pairs == INT_PAIRS) {
    COPY(I8, INT_PAIRS);
    return;
  }
#endif
  switch (job->cache.type) {
    case F32: COPY(F32, NO_PAIRS); break;
    case BF16: COPY(BF16, NO_PAIRS); break;
    case I8: COPY(I8, NO_PAIRS); break;
    case F8: COPY(F8, NO_PAIRS); break;
    default: break; /* types of weights only */
  }
#undef COPY
}

/* Fills a block with queries first … of a run, and empties its state. Queries past the run's last repeat it. */
static void begin_block(const struct run_job *job, const struct run *r, long kv_head, long first,
                        struct lane_block *b) {
  long group = job->heads / job->cache.kv_heads, size = job->cache.size, all = (r->end - r->start) * group;
  long words = job->pairs ? size / 2 : size;
  b->count = min(all - first, QUERY_LANES);
  const char *queries[QUERY_LANES];
  int16_t integers[QUERY_LANES][MAX_HEAD_SIZE];
  for (long i = 0; i < QUERY_LANES; i++) {
    long query = first + min(i, b->count - 1), token = query / group, head = kv_head * group + query % group;
    b->positions[i] = (int32_t)(r->start + token);
    b->seen[i] = (int32_t)first_seen(&job->rule, r->start + token);
    b->slopes[i] = slope_of(&job->rule, head);
    b->sinks[i] = job->rule.sinks ? job->rule.sinks[head] * LOG2E : 0;
    queries[i] = job->q + ((r->token + token) * job->q_stride + head * size) * bytes_of(job->type);
    if (job->pairs == INT_PAIRS) {
      b->factors[i] = job->rule.scale * narrow_query(queries[i], job->type, size, integers[i]);
      queries[i] = (const char *)integers[i];
    }
  }
  for (long v = 0; v < QUERY_LANES; v += LANES)
    for (long w = 0; w < words; w += LANES) {
      vf x[LANES] = {};
      for (long i = 0; i < LANES; i++) {
        if (job->pairs)
          memcpy(&x[i], queries[v + i] + 4 * w, 4 * min(LANES, words - w));
        else
          x[i] = load(queries[v + i], w, job->type);
      }
      transpose(x);
      for (long i = 0; i < min(LANES, words - w); i++) {
        long place = job->pairs ? w + i : place_of(w + i, job->cache.type);
        store(b->q[place], v, x[i], F32);
      }
    }
  empty_state(&b->whole, size);
  b->has_split = 0;
}

/* Stores the results of `count` queries of a block, the first of which is query `first` of a run: out / sums. */
static void store_results(const struct run_job *job, const struct run *r, long kv_head, long first, long count,
                          const struct lane_state *s) {
  long group = job->heads / job->cache.kv_heads, size = job->cache.size;
  for (long v = 0; v < count; v += LANES)
    for (long d = 0; d < size; d += LANES) {
      vf x[LANES], sums = load(s->sums, v, F32);
      for (long i = 0; i < LANES; i++) x[i] = load(s->out[d + i], v, F32) / sums;
      transpose(x);
      for (long i = 0; i < min(LANES, count - v); i++) {
        long query = first + v + i, token = r->token + query / group, head = kv_head * group + query % group;
        store(job->out + (token * job->heads + head) * size * bytes_of(job->type), d, x[i], job->type);
      }
    }
}

static long queries_of(const struct run_job *job, const struct run *r) {
  return (r->end - r->start) * (job->heads / job->cache.kv_heads);
}

/* The number of blocks of a run, for each key head. */
static long blocks_of(const struct run_job *job, const struct run *r) {
  return (queries_of(job, r) + QUERY_LANES - 1) / QUERY_LANES;
}

/* Adds positions from … to - 1 of a run's row to `count` blocks of one key head. `from` and `to` are multiples of
   TILE_KEYS. ahead: null, if the next tile of the same head is to be prefetched. */
static void attend_range(const struct run_job *job, const struct run *r, long kv_head, long from, long to,
                         struct ahead *ahead, struct lane_block *blocks, long count) {
  struct position_tile tile;
  const int32_t *slots = job->table + r->row * job->table_stride;
  long seen = blocks[0].seen[0], end = blocks[count - 1].positions[QUERY_LANES - 1] + 1;
  for (long at = from; at < to; at += TILE_KEYS) {
    struct ahead tile_ahead = {{.cache = &job->cache, .slots = slots + at + TILE_KEYS, .first = kv_head, .count = 1},
                               2 * COLUMNS_AT_ONCE};
    tile_ahead.next.left = min(end - at - TILE_KEYS, TILE_KEYS);
    if (at + TILE_KEYS > seen && at < end) copy_positions_by_type(job, slots, kv_head, at, seen, end, &tile);
    for (long i = 0; i < count; i++) attend_positions(job, &tile, at, ahead ? ahead : &tile_ahead, &blocks[i]);
  }
}

/* Computes blocks first … first + count - 1 of a run and a key head, and stores their results. */
static void attend_blocks(const struct run_job *job, const struct run *r, long kv_head, long first, long count) {
  struct lane_block blocks[count];
  for (long i = 0; i < count; i++) begin_block(job, r, kv_head, (first + i) * QUERY_LANES, &blocks[i]);
  long seen = blocks[0].seen[0], end = blocks[count - 1].positions[QUERY_LANES - 1] + 1;
  attend_range(job, r, kv_head, seen / TILE_KEYS * TILE_KEYS, end, NULL, blocks, count);
  for (long i = 0; i < count; i++) {
    merge_split(&blocks[i], job->cache.size);
    store_results(job, r, kv_head, (first + i) * QUERY_LANES, blocks[i].count, &blocks[i].whole);
  }
}

/* Splits that queries of a run see: first … end - 1. */
struct splits {
  long first, end;
};

static struct splits splits_of(const struct run_job *job, const struct run *r) {
  return (struct splits){first_seen(&job->rule, r->start) / SPLIT_KEYS, (r->end + SPLIT_KEYS - 1) / SPLIT_KEYS};
}

/* The state of a block after the keys of one split alone. */
static struct lane_state *split_state(const struct run_job *job, const struct run *r, long split, long kv_head,
                                      long block) {
  long at = ((split - splits_of(job, r).first) * job->cache.kv_heads + kv_head) * blocks_of(job, r) + block;
  return (struct lane_state *)(job->states + (r->states / QUERY_LANES + at) * state_bytes(job->cache.size));
}

/* Computes one split of all queries of a run. Its keys and values are read in the order of their addresses, which is
   several times faster than one head after the other: those of the split that this thread probably takes next are
   prefetched meanwhile, and the current ones are in a cache. */
static void attend_split_of_run(const struct run_job *job, const struct run *r, long split, long threads) {
  long blocks = blocks_of(job, r), from = split * SPLIT_KEYS, later = (split + threads) * SPLIT_KEYS;
  struct ahead ahead = {{.cache = &job->cache, .count = job->cache.kv_heads}, 2 * COLUMNS_AT_ONCE / blocks + 1};
  ahead.next.slots = job->table + r->row * job->table_stride + later;
  ahead.next.left = min(r->end - later, SPLIT_KEYS);
  for (long kv_head = 0; kv_head < job->cache.kv_heads; kv_head++)
    for (long first = 0; first < blocks; first += MAX_BLOCKS) {
      long count = min(blocks - first, MAX_BLOCKS);
      struct lane_block at_once[count];
      for (long i = 0; i < count; i++) begin_block(job, r, kv_head, (first + i) * QUERY_LANES, &at_once[i]);
      attend_range(job, r, kv_head, from, from + SPLIT_KEYS, &ahead, at_once, count);
      for (long i = 0; i < count; i++) {
        if (!at_once[i].has_split) empty_state(&at_once[i].split, job->cache.size);
        memcpy(split_state(job, r, split, kv_head, first + i), &at_once[i].split, state_bytes(job->cache.size));
      }
    }
}

/* Merges the splits of a block in order, and stores its results. */
static void merge_splits_of(const struct run_job *job, const struct run *r, long kv_head, long block) {
  struct splits splits = splits_of(job, r);
  struct lane_state whole;
  empty_state(&whole, job->cache.size);
  for (long split = splits.first; split < splits.end; split++)
    merge_states(&whole, split_state(job, r, split, kv_head, block), job->cache.size);
  long first = block * QUERY_LANES;
  store_results(job, r, kv_head, first, min(queries_of(job, r) - first, QUERY_LANES), &whole);
}

/* The number of items of a run: its splits, or pieces of up to `each` blocks of each key head. */
static long items_of(const struct run_job *job, const struct run *r, long each) {
  struct splits splits = splits_of(job, r);
  if (r->states >= 0) return splits.end - splits.first;
  return (blocks_of(job, r) + each - 1) / each * job->cache.kv_heads;
}

static void attend_item_of_run(const struct run_job *job, const struct run *r, long item, long each, long threads) {
  if (r->states >= 0) {
    attend_split_of_run(job, r, splits_of(job, r).first + item, threads);
    return;
  }
  /* Queries at later positions attend to more keys. They are taken first, so that the items taken last are short. */
  long kv_heads = job->cache.kv_heads, first = (items_of(job, r, each) / kv_heads - 1 - item / kv_heads) * each;
  attend_blocks(job, r, item % kv_heads, first, min(each, blocks_of(job, r) - first));
}

EXPORT void attend_runs(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct attend_runs_arguments *a = arguments;
  struct run_job job = {
      .q = a->q,
      .q_stride = a->q_stride,
      .type = a->q_type,
      .out = a->out,
      .heads = a->heads,
      .cache =
          {.heads = a->kv, .scales = a->kv_scales, .kv_heads = a->kv_heads, .size = a->head_size, .type = a->kv_type},
      .table = a->table,
      .table_stride = a->table_stride,
      .rule = make_rule(a->scale * LOG2E, a->softcap, a->slopes, a->sinks, a->window),
      .states = a->states,
  };
#if defined(__AVX512BF16__)
  job.pairs = job.type == BF16 && job.cache.type != F32 ? BF16_PAIRS : NO_PAIRS;
#else
  job.pairs = is_in_integers(job.type, job.cache.type, job.cache.size) ? INT_PAIRS : NO_PAIRS;
#endif
  const struct run *runs = (const struct run *)a->runs;
  long kv_heads = job.cache.kv_heads, blocks = 0, items = 0, split_blocks = 0;
  for (long i = 0; i < a->count; i++) {
    blocks += runs[i].states < 0 ? kv_heads * blocks_of(&job, &runs[i]) : 0;
    split_blocks += runs[i].states < 0 ? 0 : kv_heads * blocks_of(&job, &runs[i]);
  }
  /* Many blocks in an item copy keys and values seldom; with few, the threads finish at about the same time. */
  long each = min(blocks / team->threads / 4, MAX_BLOCKS);
  if (each < 1) each = 1;
  for (long i = 0; i < a->count; i++) items += items_of(&job, &runs[i], each);
  FOR_EACH_ITEM(item, items, 1, team) {
    const struct run *r = runs;
    long left = item;
    for (; left >= items_of(&job, r, each); r++) left -= items_of(&job, r, each);
    attend_item_of_run(&job, r, left, each, team->threads);
  }
  if (!split_blocks) return;
  wait_for_team(team);
  FOR_EACH_ITEM(item, split_blocks, 1, team) {
    const struct run *r = runs;
    long left = item;
    for (; r->states < 0 || left >= kv_heads * blocks_of(&job, r); r++)
      left -= r->states < 0 ? 0 : kv_heads * blocks_of(&job, r);
    merge_splits_of(&job, r, left % kv_heads, left / kv_heads);
  }
}
