/* The choice of a token: the best of logit + Gumbel noise, and its log-probability. The noise is a pure function of (seed,
   position, token), the same integers as in reference.py, so that no draw depends on anything else. */
#include "team.h"
#include "vectors.h"

#define GOLDEN 0x9e3779b1u
/* v below is at least 2^-33 and at most 1 - 2^-24: noise lies between these. */
#define LEAST_NOISE -2.9f
#define MOST_NOISE 22.9f

/* MurmurHash3's 32-bit finalizer. */
#define MIX(x) (x ^= x >> 16, x *= 0x85ebca6bu, x ^= x >> 13, x *= 0xc2b2ae35u, x ^= x >> 16)

/* ln(x) for normal x > 0; relative error 1e-7. */
INLINE vf log_of(vf x) {
  vu bits = vu_bits(x);
  vi exponent = (vi)(bits - 0x3f3504f3u) >> 23; /* so that the mantissa lies between sqrt(1/2) and sqrt(2) */
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

INLINE vf gumbel_noise(uint32_t key, vu tokens) {
  vu bits = (tokens * GOLDEN) ^ key;
  MIX(bits);
  bits += key;
  MIX(bits);
  /* The number nearest to the 32 bits: two exact halves, and one rounding. */
  vf high = __builtin_convertvector((vi)(bits >> 16), vf), low = __builtin_convertvector((vi)(bits & 0xffff), vf);
  vf v = (high * 65536.0f + low + 0.5f) * 0x1p-32f;
  const vf largest = splat(1 - 0x1p-24f);
  v = blend(v < largest, v, largest);
  vf u = 1.0f - v;
  vf w = -(log_of(u) + (-v - (u - 1.0f)) / u); /* -log1p(-v): what 1 - v lost in rounding is put back */
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

struct best_token {
  float score;
  int32_t id;
};

INLINE void keep_better_token(const float *scores, long first, int count, struct best_token *best) {
  for (int i = 0; i < count; i++)
    if (scores[i] > best->score) *best = (struct best_token){scores[i], (int32_t)(first + i)};
}

/* The logits from `i` on; what lies past the end is minus infinity. */
INLINE vf logits_from(const float *row, long i, long size) {
  if (i + LANES <= size) return load(row, i, F32);
  float rest[LANES];
  for (int j = 0; j < LANES; j++) rest[j] = i + j < size ? row[i + j] : -INFINITY;
  return load(rest, 0, F32);
}

/* The first token with the highest logit, or logit + noise. */
static int32_t find_best_token(const float *row, long size, float peak, int draws, uint32_t key) {
  struct best_token best = {-INFINITY, 0};
  vu tokens;
  for (int i = 0; i < LANES; i++) tokens[i] = i;
  float hopeless = draws ? peak + LEAST_NOISE - MOST_NOISE : peak;
  for (long i = 0; i < size; i += LANES) {
    vf x = logits_from(row, i, size);
    if (lane_max(x) < hopeless) continue;
    float scores[LANES];
    store(scores, 0, draws ? x + gumbel_noise(key, tokens + (uint32_t)i) : x, F32);
    keep_better_token(scores, i, size - i < LANES ? (int)(size - i) : LANES, &best);
    if (!draws) break;
  }
  return best.id;
}

static void draw_for_row(float *row, long size, int draws, int64_t seed, int32_t position, int32_t *id, float *logprob) {
  vf peaks = splat(-INFINITY), sums = {};
  for (long i = 0; i < size; i += LANES) peaks = larger(logits_from(row, i, size), peaks);
  float peak = lane_max(peaks);
  for (long i = 0; i < size; i += LANES) sums += exp2_of((logits_from(row, i, size) - peak) * LOG2E);
  *id = find_best_token(row, size, peak, draws, draws ? noise_key(seed, position) : 0);
  *logprob = row[*id] - peak - logf(lane_sum(sums));
}

/* ids and logprobs of each row of logits [rows, size]; position of row i is lengths[index[i]].
   logits, rows, size, stride, draws, seeds, lengths, index, ids, logprobs */
EXPORT void draw(const union word *w, struct team *team, int me) {
  float *logits = w[0].p, *logprobs = w[9].p;
  long rows = w[1].i, size = w[2].i, stride = w[3].i;
  const uint8_t *draws = w[4].p;
  const int64_t *seeds = w[5].p;
  const int32_t *lengths = w[6].p, *index = w[7].p;
  int32_t *ids = w[8].p;
  FOR_EACH_ITEM(r, rows, 1, team)
  draw_for_row(logits + r * stride, size, draws[r], seeds[r], lengths[index[r]], ids + r, logprobs + r);
}

/* Whether all of a row is finite; a row that is not becomes zeros. logits, rows, size, stride, finite */
EXPORT void check_finite(const union word *w, struct team *team, int me) {
  float *logits = w[0].p;
  long rows = w[1].i, size = w[2].i, stride = w[3].i;
  uint8_t *finite = w[4].p;
  FOR_EACH_ITEM(r, rows, 1, team) {
    vf sum = {};
    for (long i = 0; i < size; i += LANES) {
      vf x = i + LANES <= size ? load(logits + r * stride, i, F32) : (vf){};
      sum += x * 0.0f; /* NaN as soon as something is not finite */
    }
    for (long i = size / LANES * LANES; i < size; i++) sum[0] += logits[r * stride + i] * 0.0f;
    finite[r] = lane_sum(sum) == 0.0f;
    if (!finite[r]) memset(logits + r * stride, 0, size * sizeof(float));
  }
}
