/* The cuts of one row of logits, without a sort. What they keep is defined in ../../reference.py, and it is the same to
   the token: weights are integers, so their sums do not depend on an order, and each is made by the same rounded
   operations.

   Each cut keeps the first tokens of an order, until their weights sum to a target. It goes over all tokens three
   times:

     sum_buckets    adds each token's weight to one of CUT_BUCKETS buckets that follow each other in the order; the
                    running sum of the buckets tells in which bucket the target is reached
     list_bucket    lists the tokens of this bucket, usually few
     keep           copies the tokens that stay, and the next cut goes over these only

   Between the last two, `find_bound` finds the token at which the target is reached among the listed tokens, by the
   same method: sums by the first 11 bits of each token's number, then by the next 11, then by the last 10. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off") /* a product and a sum in one rounding would give weights of other bits */
#endif
#include "cuts.h"

#define MAX_HALVINGS 40.0f
#define KEY_BITS 11

/* LANES / 2 numbers of 64 and of 32 bits. */
typedef uint64_t vw __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu32_half __attribute__((vector_size(2 * LANES)));

enum order { MOST_LIKELY, MOST_TYPICAL };
enum measure { COUNT, MASS };

/* A token of the bucket in which a cut's target is reached. */
struct listed {
  float rank;    /* as in `ranks` */
  int32_t place; /* index within the tokens */
  int64_t weight;
};

/* How one cut orders tokens and weighs them. */
struct search {
  enum order order;
  enum measure measure;
  float peak;  /* the largest logit of the row */
  float mean;  /* mean of the tokens' halvings, for MOST_TYPICAL */
  float limit; /* tokens that are farther than this share the last bucket */
  float scale; /* buckets per halving */
};

/* Where a cut ends: the last token that it keeps. */
struct bound {
  float rank;
  int32_t place;
};

/* How many times a token's likelihood is half of the largest one. */
INLINE vf halvings_of(vf x, float peak) { return (splat(peak) - x) * LOG2E; }

/* LANES numbers of 64 bits. */
struct wide {
  vw half[2];
};

INLINE struct wide widen(vi x) {
  vu32_half halves[2];
  memcpy(halves, &x, sizeof x);
  return (struct wide){{__builtin_convertvector(halves[0], vw), __builtin_convertvector(halves[1], vw)}};
}

/* 2^38 / 2^halvings: a mantissa of 2^30 / 2^f, with f the fraction of the halvings, is shifted by their whole part. */
INLINE struct wide weights_of(vf halvings) {
  vf clamped = smaller(halvings, splat(MAX_HALVINGS));
  vi whole = __builtin_convertvector(clamped, vi);
  vf f = clamped - __builtin_convertvector(whole, vf);
  vf y = f * -0.00094490015f + 0.009205789f;
  y = y * f + -0.05529735f;
  y = y * f + 0.24018013f;
  y = y * f + -0.6931437f;
  y = y * f + 1.0f;
  struct wide weights = widen(__builtin_convertvector(y * 0x1p30f, vi)), shifts = widen(whole);
  for (int i = 0; i < 2; i++) weights.half[i] = weights.half[i] << 8 >> shifts.half[i];
  return weights;
}

/* How far a token's surprise is from the mean of all. The entropy is the mean surprise, and surprises are halvings plus
   a constant. */
INLINE vf distances(vf halvings, float mean) {
  vf difference = halvings - mean;
  return larger(difference, -difference);
}

/* Numbers in the order in which a cut takes the tokens: smaller ones first, equal ones by id. */
INLINE vf ranks(const struct search *s, vf x) {
  return s->order == MOST_LIKELY ? -x : distances(halvings_of(x, s->peak), s->mean);
}

/* Buckets do not decrease with the rank. */
INLINE vi buckets(const struct search *s, vf x) {
  vf halvings = halvings_of(x, s->peak);
  vf away = s->order == MOST_LIKELY ? halvings : distances(halvings, s->mean);
  return __builtin_convertvector(smaller(away, splat(s->limit)) * s->scale, vi);
}

/* Lanes that hold one of the tokens from `first` on. */
INLINE unsigned lanes_inside(long first, long count) {
  return count - first < LANES ? (1u << (count - first)) - 1 : (1u << LANES) - 1;
}

/* The least and the largest logit. */
static void find_extremes(const struct tokens *tokens, float *least, float *peak) {
  vf least_of = splat(INFINITY), peak_of = splat(-INFINITY);
  for (long i = 0; i < tokens->count; i += LANES) {
    vf x = logits_from(tokens->logits, i, tokens->count);
    peak_of = larger(x, peak_of);
    least_of = smaller(x, least_of); /* minus infinity past the end: more tokens share a bucket then */
  }
  *peak = lane_max(peak_of), *least = -lane_max(-least_of);
}

INLINE void add_weights(const struct search *s, vf x, int count, int64_t *sums) {
  vi bucket_of = buckets(s, x);
  int32_t bucket[LANES];
  memcpy(bucket, &bucket_of, sizeof bucket);
  if (s->measure == COUNT) {
    for (int j = 0; j < count; j++) sums[bucket[j]]++;
    return;
  }
  struct wide weights = weights_of(halvings_of(x, s->peak));
  int64_t weight[LANES];
  memcpy(weight, &weights, sizeof weight);
  for (int j = 0; j < count; j++) sums[bucket[j]] += weight[j];
}

INLINE void sum_buckets(const struct tokens *tokens, const struct search *s, int64_t *sums) {
  memset(sums, 0, CUT_BUCKETS * sizeof *sums);
  long i = 0;
  for (; i + LANES <= tokens->count; i += LANES) add_weights(s, load(tokens->logits, i, F32), LANES, sums);
  if (i < tokens->count) add_weights(s, logits_from(tokens->logits, i, tokens->count), (int)(tokens->count - i), sums);
}

/* The bucket in which the running sum reaches the target. Subtracts the sum of the buckets before it from the target.
 */
static int find_bucket(const int64_t *sums, int64_t *target) {
  int bucket = 0;
  while (bucket < CUT_BUCKETS - 1 && sums[bucket] < *target) *target -= sums[bucket++];
  return bucket;
}

INLINE long list_bucket(const struct tokens *tokens, const struct search *s, int bucket, struct listed *list) {
  long count = 0;
  for (long i = 0; i < tokens->count; i += LANES) {
    vf x = logits_from(tokens->logits, i, tokens->count);
    unsigned bits = lane_bits(buckets(s, x) == bucket) & lanes_inside(i, tokens->count);
    if (!bits) continue;
    vf rank = ranks(s, x);
    struct wide weights = weights_of(halvings_of(x, s->peak));
    for (; bits; bits &= bits - 1) {
      int j = __builtin_ctz(bits);
      int64_t weight = s->measure == COUNT ? 1 : ((int64_t *)&weights)[j];
      list[count++] = (struct listed){rank[j], (int32_t)(i + j), weight};
    }
  }
  return count;
}

/* An integer that grows with the rank. Zeros of both signs have the same. */
INLINE uint32_t key_of(float rank) {
  float sum = rank + 0.0f;
  uint32_t bits;
  memcpy(&bits, &sum, sizeof bits);
  return bits >> 31 ? ~bits : bits | 1u << 31;
}

/* The token at which the running sum of the listed tokens reaches the target. */
static struct bound find_bound(struct listed *list, long count, int64_t target, int64_t *sums) {
  for (int shift = 32 - KEY_BITS; count > 1; shift = shift > KEY_BITS ? shift - KEY_BITS : 0) {
    memset(sums, 0, CUT_BUCKETS * sizeof *sums);
    for (long i = 0; i < count; i++) sums[key_of(list[i].rank) >> shift & (CUT_BUCKETS - 1)] += list[i].weight;
    uint32_t bucket = (uint32_t)find_bucket(sums, &target);
    long kept = 0;
    for (long i = 0; i < count; i++)
      if ((key_of(list[i].rank) >> shift & (CUT_BUCKETS - 1)) == bucket) list[kept++] = list[i];
    count = kept;
    if (shift == 0) break;
  }
  /* All that are left have the same rank. */
  long last = 0;
  while (last < count - 1 && list[last].weight < target) target -= list[last++].weight;
  return (struct bound){list[last].rank, list[last].place};
}

INLINE vi ids_from(const struct tokens *tokens, long i, vi lanes) {
  if (!tokens->ids) return lanes + (int32_t)i;
  vi ids;
  memcpy(&ids, tokens->ids + i, sizeof ids); /* there is room for LANES ids behind the last token */
  return ids;
}

/* Copies the tokens up to the bound. The copies may take the place of the tokens. */
INLINE void keep(struct tokens *tokens, const struct search *s, struct bound bound, const struct cut_memory *memory) {
  vi lanes = lane_indices();
  long kept = 0;
  for (long i = 0; i < tokens->count; i += LANES) {
    vf x = logits_from(tokens->logits, i, tokens->count), rank = ranks(s, x);
    vi ids = ids_from(tokens, i, lanes), places = lanes + (int32_t)i;
    vi stays = (rank < bound.rank) | ((rank == bound.rank) & (places <= bound.place));
    unsigned bits = lane_bits(stays) & lanes_inside(i, tokens->count);
    if (bits) kept = keep_lanes(bits, x, ids, kept, memory);
  }
  *tokens = (struct tokens){memory->logits, memory->ids, kept};
}

/* Keeps the first tokens whose weights sum to `count`, or to the part `share` of all weights, but at least one token.
   `farthest` is not less than the halvings, or the distance, of most tokens. */
INLINE void cut_tokens(struct tokens *tokens, struct search s, float farthest, int64_t count, float share,
                       const struct cut_memory *memory) {
  s.limit = farthest < MAX_HALVINGS ? farthest : MAX_HALVINGS;
  s.scale = s.limit > 0 ? (CUT_BUCKETS - 1) / s.limit : 0;
  sum_buckets(tokens, &s, memory->sums);
  int64_t target = count;
  if (s.measure == MASS) {
    int64_t total = 0;
    for (int i = 0; i < CUT_BUCKETS; i++) total += memory->sums[i];
    target = (int64_t)((double)share * (double)total);
  }
  if (target < 1) target = 1;
  int bucket = find_bucket(memory->sums, &target);
  long listed = list_bucket(tokens, &s, bucket, memory->list);
  if (!listed) return; /* only where logits are NaN */
  keep(tokens, &s, find_bound(memory->list, listed, target, memory->sums), memory);
}

/* The mean of the tokens' halvings, weighted. Products have 20 bits of the halvings behind the point, sums none. */
static float mean_halvings(const struct tokens *tokens, float peak) {
  vw totals = {}, products = {};
  for (long i = 0; i < tokens->count; i += LANES) {
    vf halvings = halvings_of(logits_from(tokens->logits, i, tokens->count), peak);
    struct wide weights = weights_of(halvings); /* 0 past the end */
    struct wide steps = widen(__builtin_convertvector(smaller(halvings, splat(MAX_HALVINGS)) * 0x1p20f, vi));
    for (int j = 0; j < 2; j++) {
      totals += weights.half[j];
      products += weights.half[j] * steps.half[j] >> 20;
    }
  }
  int64_t total = 0, product = 0;
  for (int j = 0; j < LANES / 2; j++) total += totals[j], product += products[j];
  return (float)((double)product / (double)total);
}

static void cut_untypical(struct tokens *tokens, float peak, float farthest, float share,
                          const struct cut_memory *memory) {
  float mean = mean_halvings(tokens, peak);
  float most = mean > farthest - mean ? mean : farthest - mean;
  cut_tokens(tokens, (struct search){MOST_TYPICAL, MASS, peak, mean, 0, 0}, most, 0, share, memory);
}

struct tokens cut_row(struct tokens tokens, long size, const struct cuts *cuts, int64_t *scratch) {
  struct cut_memory memory = divide_scratch(scratch, size);
  float least, peak;
  find_extremes(&tokens, &least, &peak);
  float farthest = (peak - least) * LOG2E;
  if (cuts->top_k > 0 && cuts->top_k < tokens.count)
    cut_tokens(&tokens, (struct search){MOST_LIKELY, COUNT, peak, 0, 0, 0}, farthest, cuts->top_k, 0, &memory);
  if (cuts->top_p < 1)
    cut_tokens(&tokens, (struct search){MOST_LIKELY, MASS, peak, 0, 0, 0}, farthest, 0, cuts->top_p, &memory);
  if (cuts->log_min_p > -INFINITY) {
    struct bound least_likely = {-(peak + cuts->log_min_p), INT32_MAX};
    keep(&tokens, &(struct search){MOST_LIKELY, COUNT, peak, 0, 0, 0}, least_likely, &memory);
  }
  if (cuts->typical_p < 1) cut_untypical(&tokens, peak, farthest, cuts->typical_p, &memory);
  return tokens;
}
