/* The product of many rows on the matrix unit.

   x is packed into tiles first. The product is then done in parts of the inputs, of which a block of rows of x stays in the
   second-level cache while the weights pass by, a pair of panels at a time. While the matrix unit works on one pair, the
   other units of the core do what else there is to do, a bit at every step: they fetch the next pair from memory, and finish
   the sums of the rows before.

   What streams past, x and y, must not cost the weights their place in the first-level cache. */
#include "vectors.h"

#if defined(__AMX_BF16__)

#include "product.h"
#include "tiles.h"

#define TILE_NUMBERS 512  /* numbers in bfloat16 */
#define STRIP_ROWS 32  /* rows that are computed together */
#define UNDIVIDED_INPUTS 2048 /* inputs that are not divided */
#define PART_INPUTS 1024  /* inputs, about, of each part where there are more */

/* Sums of one strip by one pair: rows 0-15 by the first panel, by the second, rows 16-31 likewise. */
typedef float strip_sums[4][16][16];

/* How a large product is divided. */
struct division {
  long part, parts;  /* inputs of a part; the last may have less */
  long strips;       /* of x */
  long block;        /* strips of a block */
  long group;        /* pairs of panels that a thread takes together: those that write into the same 64 bytes of y */
  bf16 *x;           /* [parts][strips][part / 32][2][16][32], zeros past the last row */
  strip_sums *sums;  /* [pairs][block], between one part and the next */
  bf16 *widened;     /* for int8, two groups of panels of a part for each thread */
};

/* Weights that will be wanted next. A line is 64 bytes of them in bfloat16. */
struct weight_fetch {
  const char *from; /* the next line */
  bf16 *to;         /* for int8 */
  long left, pace;  /* lines, and how many of them come at a time */
  long lines, here; /* of a panel, and left of this one */
  long gap;         /* bytes from the end of one panel's part to the next panel's */
};

/* Sums on their way into y: 64 bytes of each row, which one pair of panels makes, or two pairs where they are gated. Of
   those there are two sets, so that one is put there while the other one comes. */
struct output_rows {
  strip_sums sums[2][2]; /* [set][pair] */
  int set;
  char *y;
  long pair; /* the first */
  int rows, at;
};

struct side_work {
  struct weight_fetch coming;
  struct output_rows leaving;
  const struct product *g;
  long group; /* of the plan */
};

static struct division divide(const struct product *g) {
  struct division d;
  long pieces = g->k <= UNDIVIDED_INPUTS ? 1 : (g->k + PART_INPUTS - 1) / PART_INPUTS, most;
  d.part = (g->k / 32 + pieces - 1) / pieces * 32;
  d.parts = (g->k + d.part - 1) / d.part;
  d.strips = (g->m + STRIP_ROWS - 1) / STRIP_ROWS;
  most = X_NUMBERS_IN_L2 / d.part / STRIP_ROWS;
  if (most < 1) most = 1;
  pieces = (d.strips + most - 1) / most;
  d.block = (d.strips + pieces - 1) / pieces;
  d.group = g->e.gated && g->n % (2 * PAIR_OUTPUTS) == 0 ? 2 : 1;
  d.x = g->scratch;
  d.sums = (strip_sums *)(d.x + d.strips * STRIP_ROWS * g->k);
  d.widened = (bf16 *)(d.sums + (d.parts > 1 ? d.block * (g->n / PAIR_OUTPUTS) : 0));
  return d;
}

/* The inputs in a part, of which the last may have less. */
INLINE long inputs_of_part(const struct product *g, const struct division *d, long part) {
  long left = g->k - part * d->part;
  return left < d->part ? left : d->part;
}

/* One part of one strip of x. */
INLINE bf16 *packed_strip(const struct product *g, const struct division *d, long part, long strip) {
  return d->x + (part * d->part * d->strips + strip * inputs_of_part(g, d, part)) * STRIP_ROWS;
}

#define PIECE_INPUTS 512 /* inputs of a strip that a thread packs at a time */

static void pack_piece(const struct product *g, long strip, long from, long to, bf16 *out) {
  for (long r = 0; r < STRIP_ROWS; r++) {
    long row = strip * STRIP_ROWS + r;
    bf16 *at = out + r * 32;
    const bf16 *x = g->x + row * g->k;
    for (long i = from; i < to; i += 32, at += 2 * TILE_NUMBERS) {
      __m512i line = {};
      if (row < g->m) memcpy(&line, x + i, 64);
      memcpy(at, &line, 64);
    }
  }
}

static void pack_x(const struct product *g, const struct division *d, struct team *team) {
  long pieces = (d->part + PIECE_INPUTS - 1) / PIECE_INPUTS, each = d->parts * pieces;
  FOR_EACH_ITEM(item, d->strips * each, 1, team) {
    long strip = item / each, part = item % each / pieces, skip = item % pieces * PIECE_INPUTS;
    long start = part * d->part, count = inputs_of_part(g, d, part), end = skip + PIECE_INPUTS < count ? skip + PIECE_INPUTS : count;
    pack_piece(g, strip, start + skip, start + end, packed_strip(g, d, part, strip) + skip * STRIP_ROWS);
  }
}

/* Few at a time: many would hold up the loads of what is computed with. */
INLINE void fetch_some_weights(struct weight_fetch *c) {
  if (c->left == 0) return;
  long count = c->pace < c->left ? c->pace : c->left, size = c->to ? 32 : 64;
  c->left -= count;
  for (; count > 0; count--) {
    if (c->to) {
      _mm_prefetch(c->from + 1024, _MM_HINT_T1);
      widen_32_weights((const int8_t *)c->from, c->to);
      c->to += 32;
    } else {
      _mm_prefetch(c->from, _MM_HINT_T1);
    }
    c->from += size;
    if (--c->here == 0) {
      c->here = c->lines;
      c->from += c->gap;
    }
  }
}

INLINE void store_one_row(struct side_work *s) {
  struct output_rows *l = &s->leaving;
  int tile = l->at / 16 * 2, r = l->at % 16;
  strip_sums *sums = l->sums[l->set];
  vf first = load(sums[0][tile][r], 0, F32), second = load(sums[0][tile + 1][r], 0, F32);
  if (s->group == 2)
    store_32_outputs(l->y, l->pair * PANEL_OUTPUTS, gate_outputs(l->pair, first, second, &s->g->e),
                gate_outputs(l->pair + 1, load(sums[1][tile][r], 0, F32), load(sums[1][tile + 1][r], 0, F32), &s->g->e), &s->g->e);
  else
    store_pair(l->y, l->pair, first, second, &s->g->e);
  l->y += s->g->y_stride;
  l->at++;
}

/* The set that comes. */
INLINE int set_to_fill(const struct side_work *s) { return s->group == 2 ? !s->leaving.set : s->leaving.set; }

INLINE void store_remaining_rows(struct side_work *s) {
  while (s->leaving.at < s->leaving.rows) store_one_row(s);
}

INLINE void fetch_remaining_weights(struct side_work *s) {
  while (s->coming.left) fetch_some_weights(&s->coming);
}

/* Tiles 0-3: sums. 4, 5: rows of x. 6, 7: weights. */
INLINE void multiply_tiles(const bf16 *x, const bf16 *w0, const bf16 *w1, long k, int whole, struct side_work *s) {
  for (long i = 0; i < k; i += 32, x += 2 * TILE_NUMBERS, w0 += TILE_NUMBERS, w1 += TILE_NUMBERS) {
    _tile_stream_loadd(4, x, 64);
    fetch_some_weights(&s->coming);
    _tile_loadd(6, w0, 64);
    _tile_dpbf16ps(0, 4, 6);
    fetch_some_weights(&s->coming);
    _tile_loadd(7, w1, 64);
    _tile_dpbf16ps(1, 4, 7);
    fetch_some_weights(&s->coming);
    if (whole) {
      _tile_stream_loadd(5, x + TILE_NUMBERS, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    fetch_some_weights(&s->coming);
    if (s->leaving.at < s->leaving.rows) store_one_row(s);
  }
}

/* A strip by a pair of panels. `from`: the sums so far, or null. */
static void multiply_strip(const bf16 *x, const bf16 *w0, const bf16 *w1, long k, int whole, strip_sums *from, strip_sums *to,
                     struct side_work *s) {
  MEMORY_IS_WRITTEN;
  if (from) {
    _tile_loadd(0, (*from)[0], 64);
    _tile_loadd(1, (*from)[1], 64);
    _tile_loadd(2, (*from)[2], 64);
    _tile_loadd(3, (*from)[3], 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  if (whole)
    multiply_tiles(x, w0, w1, k, 1, s);
  else
    multiply_tiles(x, w0, w1, k, 0, s);
  if (to == s->leaving.sums[s->leaving.set]) store_remaining_rows(s);
  _tile_stored(0, (*to)[0], 64);
  _tile_stored(1, (*to)[1], 64);
  _tile_stored(2, (*to)[2], 64);
  _tile_stored(3, (*to)[3], 64);
  MEMORY_IS_WRITTEN;
}

/* One part of the inputs. */
struct part_work {
  const struct product *g;
  const struct division *d;
  long part, k;
  const char *weights; /* the part's, of the first panel */
  long panel;          /* bytes from one panel to the next */
  bf16 *own;           /* for int8: the pair at work and the coming one */
};

INLINE bf16 *widened_group(const struct part_work *t, int which) { return t->own + which * t->d->group * PAIR_OUTPUTS * t->k; }

/* The weights of an item: a block of rows by a group of pairs. `which` of the two places they are widened into. */
INLINE struct weight_fetch weights_of_item(const struct part_work *t, long group, int which) {
  const struct division *d = t->d;
  long lines = t->k / 2, bytes = lines * (t->g->is_int8 ? 32 : 64);
  return (struct weight_fetch){
      .from = t->weights + group * d->group * 2 * t->panel,
      .to = t->g->is_int8 ? widened_group(t, which) : 0,
      .left = 2 * d->group * lines,
      .pace = (8 + d->block - 1) / d->block, /* a step of one strip uses up 32 lines, and is beside four parts */
      .lines = lines,
      .here = lines,
      .gap = t->panel - bytes,
  };
}

/* All sums of a strip and a group are there. */
INLINE void hand_over_outputs(struct side_work *s, long strip, long pair) {
  const struct product *g = s->g;
  store_remaining_rows(s);
  s->leaving.set = set_to_fill(s);
  s->leaving.y = g->y + strip * STRIP_ROWS * g->y_stride;
  s->leaving.pair = pair;
  s->leaving.rows = g->m - strip * STRIP_ROWS < STRIP_ROWS ? g->m - strip * STRIP_ROWS : STRIP_ROWS;
  s->leaving.at = 0;
}

static void multiply_item(const struct part_work *t, long block, long group, int which, struct side_work *s) {
  const struct product *g = t->g;
  const struct division *d = t->d;
  long first = block * d->block, end = first + d->block < d->strips ? first + d->block : d->strips;
  const char *weights = g->is_int8 ? (const char *)widened_group(t, which) : t->weights + group * d->group * 2 * t->panel;
  long panel = g->is_int8 ? t->k * PANEL_OUTPUTS * (long)sizeof(bf16) : t->panel;
  int last = t->part == d->parts - 1;
  for (long strip = first; strip < end; strip++) {
    for (long i = 0; i < d->group; i++) {
      long pair = group * d->group + i;
      const bf16 *w0 = (const bf16 *)(weights + 2 * i * panel), *w1 = (const bf16 *)((const char *)w0 + panel);
      strip_sums *kept = d->sums + pair * d->block + strip - first;
      multiply_strip(packed_strip(g, d, t->part, strip), w0, w1, t->k, g->m - strip * STRIP_ROWS > 16, t->part ? kept : 0,
               last ? &s->leaving.sums[set_to_fill(s)][i] : kept, s);
    }
    if (last) hand_over_outputs(s, strip, group * d->group);
  }
}

/* All rows of blocks `first` … `end` by one part of the inputs. An item is taken while the one before is worked on. */
static void multiply_part(const struct product *g, const struct division *d, long first, long end, long part, struct team *team,
                          int me) {
  long size = g->is_int8 ? 1 : sizeof(bf16), groups = g->n / PAIR_OUTPUTS / d->group, count = (end - first) * groups;
  struct part_work t = {g, d, part, inputs_of_part(g, d, part), (const char *)g->weights + part * d->part * PANEL_OUTPUTS * size,
                   g->k * PANEL_OUTPUTS * size, d->widened + me * 2L * d->group * PAIR_OUTPUTS * d->part};
  struct side_work s = {.g = g, .group = d->group};
  int which = 0;
  long item = take_items(team, 1);
  if (item < count) s.coming = weights_of_item(&t, item % groups, which);
  while (item < count) {
    if (g->is_int8) fetch_remaining_weights(&s);
    long next = take_items(team, 1);
    s.coming = (struct weight_fetch){0};
    if (next < count) s.coming = weights_of_item(&t, next % groups, !which);
    multiply_item(&t, first + item / groups, item % groups, which, &s);
    item = next;
    which = !which;
  }
  store_remaining_rows(&s);
}

void multiply_many_rows(const struct product *g, struct team *team, int me) {
  struct division d = divide(g);
  long blocks = (d.strips + d.block - 1) / d.block, span = d.parts > 1 ? 1 : blocks;
  pack_x(g, &d, team);
  for (long b = 0; b < blocks; b += span) {
    for (long part = 0; part < d.parts; part++) {
      wait_for_team(team);
      multiply_part(g, &d, b, b + span, part, team, me);
    }
  }
  if (g->e.passes_by) _mm_sfence();
}

#endif
