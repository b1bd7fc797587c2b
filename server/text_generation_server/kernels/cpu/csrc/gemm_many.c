/* The product of more than FEW_ROWS rows on the matrix unit.

   x is first packed into tiles. A large product is then divided: the inputs into parts, and the rows into blocks, so
   that one part of one block of x fits the second-level cache. All weights of the part are read once for this block, a
   pair of panels at a time. A strip is 32 rows of a block, which are multiplied by a pair together.

   While the matrix unit multiplies, the rest of the core can do other work, called side work here. It is cut into small
   pieces between the tile instructions: fetching the weights of the next pair from memory (int8: converting them), and
   storing the finished rows of the strip before.

   x is loaded and y is stored with instructions that bypass the first-level cache, so that the weights stay there. */
#include "vectors.h"

#if defined(__AMX_BF16__)

#include "product.h"
#include "tiles.h"

#define TILE_NUMBERS 512 /* number of bfloat16 numbers in a tile */
#define STRIP_ROWS 32    /* number of rows of x in a strip: two tiles of 16 */
#define PART_INPUTS 1024 /* approximate number of inputs in a part, if there are more than UNDIVIDED_INPUTS inputs */

/* The sums of a strip and a pair of panels, tile by tile: rows 0-15 with the first panel, rows 0-15 with the second,
   rows 16-31 with the first, rows 16-31 with the second. */
typedef float strip_sums[4][16][16];

/* How a product is divided, and where its scratch memory is. A pair of panels of a gated product makes only 32 bytes
   of each row of y, so two pairs are taken together, to make a line of 64 bytes. */
struct division {
  long part, parts; /* number of inputs in a part (the last part may have less), and number of parts */
  long strips;      /* number of strips of x */
  long block;       /* number of strips in a block */
  long group;       /* number of pairs of panels that one thread multiplies by together: 1, or 2 of gated products */
  bf16 *x;          /* x in tiles: [parts][strips][part / 32][2][16][32], with zeros after the last row */
  strip_sums *sums; /* [pairs][block]: unfinished sums, kept from one part to the next */
  bf16 *widened;    /* int8: [threads][2][group] pairs of panels of a part, converted to bfloat16 */
};

/* A cursor over the weights that are fetched for the next item. A line is 32 weights: 64 bytes in bfloat16. */
struct weight_fetch {
  const char *from;         /* the next line to fetch */
  bf16 *to;                 /* int8: address for the converted line; bfloat16: null */
  long lines_left;          /* number of lines to be fetched */
  long lines_at_once;       /* number of lines fetched by one call of fetch_some_weights */
  long panel_lines;         /* number of lines of the current part in one panel */
  long lines_left_in_panel; /* number of lines of the current panel that are still to be fetched */
  long gap_bytes;           /* bytes from the end of the current part in a panel to its start in the next panel */
};

/* Finished sums of one strip and one group, and the number of rows stored. There are two sets of sums, so that one
   is stored while the other is computed. */
struct output_rows {
  strip_sums sums[2][2]; /* [set][pair of the group] */
  int set;               /* index of the set that is being stored */
  long first;            /* number of the strip's first row */
  long pair;             /* index of the first pair of the group */
  int rows, at;          /* number of rows in the strip, and number of rows stored */
};

/* The work that is done between tile instructions. */
struct side_work {
  struct weight_fetch fetch;
  struct output_rows outputs;
  const struct product *g;
  long group; /* as in struct division */
};

/* Rows are divided into blocks, and inputs into parts, of nearly equal sizes. */
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

/* The number of inputs in a part. */
INLINE long inputs_of_part(const struct product *g, const struct division *d, long part) {
  long left = g->k - part * d->part;
  return left < d->part ? left : d->part;
}

/* Address of the tiles of one part of one strip of x. */
INLINE bf16 *packed_strip(const struct product *g, const struct division *d, long part, long strip) {
  return d->x + (part * d->part * d->strips + strip * inputs_of_part(g, d, part)) * STRIP_ROWS;
}

#define PIECE_INPUTS 512 /* number of inputs of a strip that a thread packs at a time */

/* Packs inputs [from, to) of a strip into tiles at `out`. */
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
    long start = part * d->part, count = inputs_of_part(g, d, part),
         end = skip + PIECE_INPUTS < count ? skip + PIECE_INPUTS : count;
    pack_piece(g, strip, start + skip, start + end, packed_strip(g, d, part, strip) + skip * STRIP_ROWS);
  }
}

/* Fetches the next few lines of weights. Prefetching many lines at once would delay the loads of the current tiles. */
INLINE void fetch_some_weights(struct weight_fetch *c) {
  if (c->lines_left == 0) return;
  long count = c->lines_at_once < c->lines_left ? c->lines_at_once : c->lines_left, size = c->to ? 32 : 64;
  c->lines_left -= count;
  for (; count > 0; count--) {
    if (c->to) {
      _mm_prefetch(c->from + 1024, _MM_HINT_T1);
      widen_32_weights((const int8_t *)c->from, c->to);
      c->to += 32;
    } else {
      _mm_prefetch(c->from, _MM_HINT_T1);
    }
    c->from += size;
    if (--c->lines_left_in_panel == 0) {
      c->lines_left_in_panel = c->panel_lines;
      c->from += c->gap_bytes;
    }
  }
}

/* Stores the next row of the finished strip: 32 numbers of y, or 16 of an odd gated pair. */
INLINE void store_one_row(struct side_work *s) {
  struct output_rows *l = &s->outputs;
  int tile = l->at / 16 * 2, r = l->at % 16;
  strip_sums *sums = l->sums[l->set];
  const struct product *g = s->g;
  long row = l->first + l->at;
  vf first = load(sums[0][tile][r], 0, F32), second = load(sums[0][tile + 1][r], 0, F32);
  if (s->group == 2)
    store_two_vectors(
        g->y + row * g->y_stride, l->pair * PANEL_OUTPUTS, gate_outputs(row, l->pair, 0, first, second, &g->e),
        gate_outputs(row, l->pair + 1, 0, load(sums[1][tile][r], 0, F32), load(sums[1][tile + 1][r], 0, F32), &g->e),
        &g->e);
  else
    store_pair(g, row, l->pair, 0, first, second);
  l->at++;
}

/* Index of the set of sums to compute into. With one pair in a group one set is enough: multiply_strip computes in
   tiles, and stores the rest of the set before it overwrites it. */
INLINE int set_to_fill(const struct side_work *s) { return s->group == 2 ? !s->outputs.set : s->outputs.set; }

INLINE void store_remaining_rows(struct side_work *s) {
  while (s->outputs.at < s->outputs.rows) store_one_row(s);
}

INLINE void fetch_remaining_weights(struct side_work *s) {
  while (s->fetch.lines_left) fetch_some_weights(&s->fetch);
}

/* Multiplies one strip by a pair of panels over k inputs, and does side work in between. Tiles 0 to 3 are the sums,
   in the order of strip_sums; 4 and 5 are rows 0-15 and 16-31 of x; 6 and 7 are weights of the two panels. `whole`
   is 0 if the strip has at most 16 rows. */
INLINE void multiply_tiles(const bf16 *x, const bf16 *w0, const bf16 *w1, long k, int whole, struct side_work *s) {
  for (long i = 0; i < k; i += 32, x += 2 * TILE_NUMBERS, w0 += TILE_NUMBERS, w1 += TILE_NUMBERS) {
    _tile_stream_loadd(4, x, 64);
    fetch_some_weights(&s->fetch);
    _tile_loadd(6, w0, 64);
    _tile_dpbf16ps(0, 4, 6);
    fetch_some_weights(&s->fetch);
    _tile_loadd(7, w1, 64);
    _tile_dpbf16ps(1, 4, 7);
    fetch_some_weights(&s->fetch);
    if (whole) {
      _tile_stream_loadd(5, x + TILE_NUMBERS, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    fetch_some_weights(&s->fetch);
    if (s->outputs.at < s->outputs.rows) store_one_row(s);
  }
}

/* Multiplies one strip by a pair of panels. The sums begin with the numbers at `from`, or with 0 if it is null, and
   are stored at `to`. */
static void multiply_strip(const bf16 *x, const bf16 *w0, const bf16 *w1, long k, int whole, strip_sums *from,
                           strip_sums *to, struct side_work *s) {
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
  if (to == s->outputs.sums[s->outputs.set]) store_remaining_rows(s);
  _tile_stored(0, (*to)[0], 64);
  _tile_stored(1, (*to)[1], 64);
  _tile_stored(2, (*to)[2], 64);
  _tile_stored(3, (*to)[3], 64);
  MEMORY_IS_WRITTEN;
}

/* The work of one thread on one part of the inputs. */
struct part_work {
  const struct product *g;
  const struct division *d;
  long part, k;        /* the part's number, and its number of inputs */
  const char *weights; /* address of the part in the first panel */
  long panel;          /* bytes from one panel to the next */
  bf16 *own;           /* int8: memory for two converted groups, one of the current item and one of the next */
};

INLINE bf16 *widened_group(const struct part_work *t, int which) {
  return t->own + which * t->d->group * PAIR_OUTPUTS * t->k;
}

/* A cursor over the weights of a group of pairs. int8 weights are converted into half `which` (0 or 1) of the
   thread's memory. */
INLINE struct weight_fetch weights_of_item(const struct part_work *t, long group, int which) {
  const struct division *d = t->d;
  long lines = t->k / 2, bytes = lines * (t->g->is_int8 ? 32 : 64);
  return (struct weight_fetch){
      .from = t->weights + group * d->group * 2 * t->panel,
      .to = t->g->is_int8 ? widened_group(t, which) : 0,
      .lines_left = 2 * d->group * lines,
      /* One step of multiply_tiles uses 32 lines of the current weights, and calls fetch_some_weights four times.
         `block` strips use the same weights. So each call has to fetch 8 lines, divided by the number of strips. */
      .lines_at_once = (8 + d->block - 1) / d->block,
      .panel_lines = lines,
      .lines_left_in_panel = lines,
      .gap_bytes = t->panel - bytes,
  };
}

/* To be called when all sums of a strip and a group are finished: multiply_tiles stores them as side work of the
   next strip. */
INLINE void hand_over_outputs(struct side_work *s, long strip, long pair) {
  const struct product *g = s->g;
  store_remaining_rows(s);
  s->outputs.set = set_to_fill(s);
  s->outputs.first = strip * STRIP_ROWS;
  s->outputs.pair = pair;
  s->outputs.rows = g->m - strip * STRIP_ROWS < STRIP_ROWS ? g->m - strip * STRIP_ROWS : STRIP_ROWS;
  s->outputs.at = 0;
}

/* Computes one item of the work: a block of rows by a group of pairs, for one part of the inputs. */
static void multiply_item(const struct part_work *t, long block, long group, int which, struct side_work *s) {
  const struct product *g = t->g;
  const struct division *d = t->d;
  long first = block * d->block, end = first + d->block < d->strips ? first + d->block : d->strips;
  const char *weights =
      g->is_int8 ? (const char *)widened_group(t, which) : t->weights + group * d->group * 2 * t->panel;
  long panel = g->is_int8 ? t->k * PANEL_OUTPUTS * (long)sizeof(bf16) : t->panel;
  int last = t->part == d->parts - 1;
  for (long strip = first; strip < end; strip++) {
    for (long i = 0; i < d->group; i++) {
      long pair = group * d->group + i;
      const bf16 *w0 = (const bf16 *)(weights + 2 * i * panel), *w1 = (const bf16 *)((const char *)w0 + panel);
      strip_sums *kept = d->sums + pair * d->block + strip - first;
      multiply_strip(packed_strip(g, d, t->part, strip), w0, w1, t->k, g->m - strip * STRIP_ROWS > 16,
                     t->part ? kept : 0, last ? &s->outputs.sums[set_to_fill(s)][i] : kept, s);
    }
    if (last) hand_over_outputs(s, strip, group * d->group);
  }
}

/* Multiplies blocks [first, end) of rows by one part of the inputs. Each thread takes its next item before it
   multiplies the current one, so that it knows which weights to fetch meanwhile. */
static void multiply_part(const struct product *g, const struct division *d, long first, long end, long part,
                          struct team *team, int me) {
  long size = g->is_int8 ? 1 : sizeof(bf16), groups = g->n / PAIR_OUTPUTS / d->group, count = (end - first) * groups;
  struct part_work t = {g,
                        d,
                        part,
                        inputs_of_part(g, d, part),
                        (const char *)g->weights + part * d->part * PANEL_OUTPUTS * size,
                        g->k * PANEL_OUTPUTS * size,
                        d->widened + me * 2L * d->group * PAIR_OUTPUTS * d->part};
  struct side_work s = {.g = g, .group = d->group};
  int which = 0;
  long item = take_items(team, 1);
  if (item < count) s.fetch = weights_of_item(&t, item % groups, which);
  while (item < count) {
    if (g->is_int8) fetch_remaining_weights(&s);
    long next = take_items(team, 1);
    s.fetch = (struct weight_fetch){0};
    if (next < count) s.fetch = weights_of_item(&t, next % groups, !which);
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
  if (g->e.bypasses_caches) _mm_sfence();
}

#endif
