/* Choosing a token for each row of logits, and its log-probability, after the row's mask, temperature and cuts. The
   token with the largest logit + Gumbel noise is a draw from softmax(logits): https://arxiv.org/abs/1411.0030. The
   noise is a pure function of (seed, position, token) and begins with the same integers as in ../../reference.py, so
   that a draw depends on nothing else. */
#include "cuts.h"
#include "masks.h"
#include "team.h"
#include "vectors.h"

#define GOLDEN 0x9e3779b1u /* a prime near 2^32 / golden ratio: it spreads neighbouring tokens over all 32 bits */
/* No noise is below this bound, because v in gumbel_noise is at most 1 - 2^-24. */
#define LEAST_NOISE -2.9f
/* More than all rounding errors of two scores that are compared by their exponentials. */
#define SLACK 1.001f

/* The last step of the hash function MurmurHash3, for 32 bits: https://github.com/aappleby/smhasher. */
#define MIX(x) (x ^= x >> 16, x *= 0x85ebca6bu, x ^= x >> 13, x *= 0xc2b2ae35u, x ^= x >> 16)

/* The natural logarithm of x > 0 that is not denormal; relative error 1e-7. */
INLINE vf log_of(vf x) {
  vu bits = vu_bits(x);
  vi exponent = (vi)(bits - 0x3f3504f3u) >> 23; /* leaves a mantissa between sqrt(1/2) and sqrt(2) */
  vf m = vf_bits(bits - ((vu)exponent << 23)) - 1.0f;
  vf e = __builtin_convertvector(exponent, vf), square = m * m;
  vf y = splat(7.0376836292e-2f);
  y = y * m + -1.1514610310e-1f;
  y = y * m + 1.1676998740e-1f;
  y = y * m + -1.2420140846e-1f;
  y = y * m + 1.4249322787e-1f;
  y = y * m + -1.6668057665e-1f;
  y = y * m + 2.0000714765e-1f;
  y = y * m + -2.4999993993e-1f;
  y = y * m + 3.3333331174e-1f;
  y = y * m * square + e * -2.12194440e-4f - square * 0.5f;
  return m + y + e * 0.693359375f;
}

/* Numbers evenly distributed in (0, 1), made from the hash of key and token. */
INLINE vf even_numbers(uint32_t key, vu tokens) {
  vu bits = (tokens * GOLDEN) ^ key;
  MIX(bits);
  bits += key;
  MIX(bits);
  /* The float nearest to the 32 bits: the two halves are exact, so only their sum is rounded. */
  vf high = __builtin_convertvector((vi)(bits >> 16), vf), low = __builtin_convertvector((vi)(bits & 0xffff), vf);
  vf v = (high * 65536.0f + low + 0.5f) * 0x1p-32f;
  const vf largest = splat(1 - 0x1p-24f);
  return blend(v < largest, v, largest);
}

/* Gumbel noise made from even numbers: -log(-log(1 - v)). */
INLINE vf gumbel_noise(vf v) {
  vf u = 1.0f - v;
  vf w = -(log_of(u) + (-v - (u - 1.0f)) / u); /* -log(1 - v), corrected by the error of rounding 1 - v */
  return -log_of(w);
}

static uint32_t noise_key(int64_t seed, int32_t position) {
  uint32_t key = (uint32_t)seed;
  MIX(key);
  key ^= (uint32_t)((uint64_t)seed >> 32);
  MIX(key);
  key ^= (uint32_t)position;
  MIX(key);
  return key;
}

/* The token with the largest score so far. */
struct best_token {
  float score;
  long place; /* index of the token */
};

INLINE void keep_better_token(const float *scores, long first, int count, struct best_token *best) {
  for (int i = 0; i < count; i++)
    if (scores[i] > best->score) *best = (struct best_token){scores[i], first + i};
}

/* The index, within the tokens, of the first one with the largest logit. */
static long find_peak(const struct tokens *tokens, float peak) {
  for (long i = 0; i < tokens->count; i += LANES) {
    unsigned bits = lane_bits(logits_from(tokens->logits, i, tokens->count) == peak);
    if (bits) return i + __builtin_ctz(bits);
  }
  return 0;
}

/* The index, within the tokens, of the first one with the largest logit + noise. The noise is made from `ids`, or from
   the index if there are none. Adds e^(logit - peak) of each token to `sums`.

   Noise above t comes from a number v = 1 - e^-(e^-t), which is below e^-t. So a token's score is above the best one
   only if v < e^(logit - best). Few tokens pass this test, and two logarithms are computed for them alone. */
static long find_best_token(const struct tokens *tokens, float peak, uint32_t key, vf *sums) {
  struct best_token best = {peak + LEAST_NOISE, 0};
  float reach = expf(peak - best.score) * SLACK;
  vu lanes;
  for (int i = 0; i < LANES; i++) lanes[i] = i;
  for (long i = 0; i < tokens->count; i += LANES) {
    vf x = logits_from(tokens->logits, i, tokens->count), share = exp2_of((x - peak) * LOG2E);
    *sums += share;
    vu ids = lanes + (uint32_t)i;
    if (tokens->ids) memcpy(&ids, tokens->ids + i, sizeof ids);
    vf v = even_numbers(key, ids);
    if (!lane_bits(v < share * reach)) continue;
    float scores[LANES];
    store(scores, 0, x + gumbel_noise(v), F32);
    keep_better_token(scores, i, tokens->count - i < LANES ? (int)(tokens->count - i) : LANES, &best);
    reach = expf(peak - best.score) * SLACK;
  }
  return best.place;
}

/* Chooses one of a row's tokens. Its log-probability is taken from softmax(logits). */
static void draw_token(const struct tokens *tokens, int draws, uint32_t key, int32_t *id, float *logprob) {
  const float *row = tokens->logits;
  long size = tokens->count, place;
  vf peaks = splat(-INFINITY), sums = {};
  for (long i = 0; i < size; i += LANES) peaks = larger(logits_from(row, i, size), peaks);
  float peak = lane_max(peaks);
  if (draws) {
    place = find_best_token(tokens, peak, key, &sums);
  } else {
    for (long i = 0; i < size; i += LANES) sums += exp2_of((logits_from(row, i, size) - peak) * LOG2E);
    place = find_peak(tokens, peak);
  }
  *id = tokens->ids ? tokens->ids[place] : (int32_t)place;
  *logprob = row[place] - peak - logf(lane_sum(sums));
}

static void divide_row(float *row, long size, float divisor) {
  long i = 0;
  for (; i + LANES <= size; i += LANES) store(row, i, load(row, i, F32) / divisor, F32);
  for (; i < size; i++) row[i] /= divisor;
}

/* Sets all logits of a row except those of `kept` to minus infinity. */
static void exclude_others(float *row, long size, const struct tokens *kept) {
  long i = 0;
  for (; i + LANES <= size; i += LANES) store(row, i, splat(-INFINITY), F32);
  for (; i < size; i++) row[i] = -INFINITY;
  for (long j = 0; j < kept->count; j++) row[kept->ids[j]] = kept->logits[j];
}

/* Whether all logits of a row are finite. */
static int is_finite(const float *row, long size) {
  vf sum = {};
  for (long i = 0; i < size; i += LANES) {
    vf x = i + LANES <= size ? load(row, i, F32) : (vf){};
    sum += x * 0.0f; /* infinity * 0 is NaN, so the sum stays 0 only if all numbers are finite */
  }
  for (long i = size / LANES * LANES; i < size; i++) sum[0] += row[i] * 0.0f;
  return lane_sum(sum) == 0.0f;
}

/* The bits of the tokens that a row can choose; null where the row has no mask. */
static const uint32_t *mask_of(const struct draw_arguments *a, long r) {
  for (long m = 0; m < a->masked; m++)
    if (a->masked_rows[m] == r) return (const uint32_t *)a->masks + m * a->mask_stride;
  return NULL;
}

/* Whether all tokens have been excluded. */
static int is_empty(const struct tokens *tokens) {
  for (long i = 0; i < tokens->count; i += LANES)
    if (lane_bits(logits_from(tokens->logits, i, tokens->count) > -INFINITY)) return 0;
  return 1;
}

static void set_invalid(const struct draw_arguments *a, long r, float logprob) {
  memset(a->logits + r * a->stride, 0, a->vocabulary * sizeof(float));
  a->finite[r] = 0, a->ids[r] = 0, a->logprobs[r] = logprob;
}

static void draw_row(const struct draw_arguments *a, long r, int64_t *scratch) {
  float *row = a->logits + r * a->stride;
  long size = a->vocabulary;
  if (!a->is_checked) a->finite[r] = is_finite(row, size);
  if (!a->finite[r]) {
    set_invalid(a, r, 0);
    return;
  }
  struct tokens tokens = {row, NULL, size};
  const uint32_t *mask = mask_of(a, r);
  if (mask) tokens = mask_row(row, size, mask, scratch);
  if ((mask || a->is_checked) && is_empty(&tokens)) {
    set_invalid(a, r, -INFINITY);
    return;
  }
  if (a->temperatures[r] != 1.0f) divide_row(tokens.logits, tokens.count, a->temperatures[r]);
  struct cuts cuts = {a->top_k[r], a->top_p[r], a->log_min_p[r], a->typical_p[r]};
  if (asks_for_cut(&cuts)) tokens = cut_row(tokens, size, &cuts, scratch);
  uint32_t key = a->draws[r] ? noise_key(a->seeds[r], a->lengths[a->rows[r]]) : 0;
  draw_token(&tokens, a->draws[r], key, a->ids + r, a->logprobs + r);
  if (tokens.ids) exclude_others(row, size, &tokens);
}

EXPORT void draw(const void *arguments, struct team *team, int me) {
  const struct draw_arguments *a = arguments;
  int64_t *scratch = a->scratch + me * cut_words(a->vocabulary);
  FOR_EACH_ITEM(r, a->count, 1, team) draw_row(a, r, scratch);
}

EXPORT void check_finite(const void *arguments, struct team *team, int me) {
  (void)me;
  const struct check_finite_arguments *a = arguments;
  FOR_EACH_ITEM(r, a->count, 1, team) {
    float *row = a->logits + r * a->stride;
    a->finite[r] = is_finite(row, a->vocabulary);
    if (!a->finite[r]) memset(row, 0, a->vocabulary * sizeof(float));
  }
}
