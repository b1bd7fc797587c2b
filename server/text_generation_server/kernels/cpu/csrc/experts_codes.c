/* Experts whose weights are codes. Each expert is a product of its own by gemm_codes.c, with its own form of weights; a
   call computes those of all experts that have pairs (experts.c says what a pair is), so that threads take items of
   several experts without waiting for each other. A pair's result has the same bits in any step and for any number of
   threads. */
#include "codes.h"
#include "experts.h"

static long rows_of(const struct experts_codes_arguments *a, long expert) {
  return a->offsets[expert + 1] - a->offsets[expert];
}

static long items_of_codes(const struct experts_codes_arguments *a, long expert, long rows) {
  const struct gemm_codes_arguments *of = (const struct gemm_codes_arguments *)a->products + expert;
  return codes_row_blocks(rows, of->inputs) * (of->outputs / PAIR_OUTPUTS);
}

void list_items(const struct experts_codes_arguments *a, count_items *items_of, struct expert_items *items) {
  items->count = list_experts(a->offsets, a->experts, items->experts);
  long end = 0;
  for (long i = 0; i < items->count; i++) {
    end += items_of(a, items->experts[i], rows_of(a, items->experts[i]));
    items->ends[i] = end;
  }
}

void store_expert(const struct experts_codes_arguments *a, const struct epilogue *e, long at, long pair,
                  const float *sums) {
  long size = e->columns * bytes_of(e->type), n = pair * PAIR_OUTPUTS;
  char *row = (char *)a->y + (a->scores ? a->pairs[at] : at) * size;
  for (long i = 0; i < PAIR_OUTPUTS; i += LANES) {
    long from = a->scores ? n + i : n / 2 + i; /* in a row of the addend */
    vf sum = rounded(finish_sums(load(sums, i, F32), e, at, n + i, from), e->type);
    if (a->scores) {
      store_outputs(row, n + i, sum * rounded(splat(a->scores[a->pairs[at]]), e->type), e);
    } else if (i < PANEL_OUTPUTS) {
      long up_at = PANEL_OUTPUTS + i;
      vf up = rounded(finish_sums(load(sums, up_at, F32), e, at, n + up_at, e->columns + from), e->type);
      store_outputs(row, n / 2 + i, opened(sum, up, a->limit, a->slope, e->type), e);
    }
  }
}

void add_adapters(const struct experts_codes_arguments *a, struct epilogue *e) {
  e->addend = (const char *)a->addend;
  e->addend_stride = e->columns * (a->scores ? 4 : 8);
  e->addend_type = F32;
}

/* The product of an expert that a thread computes items of. */
struct current_expert {
  struct gemm_codes_arguments g;
  struct codes_product p;
  long number, rows, block, first, count; /* which expert, its rows; which block, where it begins, and its rows */
};

static void begin_expert(struct current_expert *c, const struct experts_codes_arguments *a, long number, float *own) {
  c->number = number;
  c->rows = rows_of(a, number);
  c->block = -1;
  c->g = ((const struct gemm_codes_arguments *)a->products)[number];
  c->g.x = a->x;
  begin_codes(&c->p, &c->g, c->rows, own);
  add_adapters(a, &c->p.g.e);
  c->p.pairs_of_x = a->scores ? 0 : a->pairs + a->offsets[number];
  c->p.chosen = a->chosen;
  if (a->scores) c->g.x = (const char *)a->x + a->offsets[number] * c->g.x_inputs * bytes_of((enum type)c->g.x_type);
}

EXPORT void experts_codes(const void *arguments, struct team *team, int me) {
  const struct experts_codes_arguments *a = arguments;
  if (a->are_ints) {
    compute_experts_of_ints(a, team, me);
    return;
  }
  struct expert_items items;
  list_items(a, items_of_codes, &items);
  struct current_expert c = {.number = -1};
  float sums[BLOCK_ROWS][PAIR_OUTPUTS] __attribute__((aligned(64)));
  long i = 0, count = items.count ? items.ends[items.count - 1] : 0;
  long rows = items.count ? a->offsets[a->experts] / items.count : 0;
  long outputs = ((const struct gemm_codes_arguments *)a->products)->outputs;
  FOR_EACH_ITEM(item, count, items_at_a_time(count, rows, outputs, team->threads), team) {
    while (item >= items.ends[i]) i++;
    if (items.experts[i] != c.number)
      begin_expert(&c, a, items.experts[i], (float *)a->scratch + me * a->scratch_stride);
    long pairs = c.g.outputs / PAIR_OUTPUTS, of_expert = item - (i ? items.ends[i - 1] : 0), block = of_expert / pairs;
    if (block != c.block) {
      c.block = block;
      c.first = block * c.rows / c.p.blocks;
      c.count = (block + 1) * c.rows / c.p.blocks - c.first;
      prepare_block(&c.p, c.first, c.count);
    }
    sum_codes(&c.p, c.count, of_expert % pairs, sums);
    for (long r = 0; r < c.count; r++)
      store_expert(a, &c.p.g.e, a->offsets[c.number] + c.first + r, of_expert % pairs, sums[r]);
  }
}

/* The float32 numbers of scratch memory that each thread needs for an expert's product. */
EXPORT long experts_codes_scratch(long tokens, long inputs, long group) {
  return codes_scratch_numbers(tokens, inputs, group);
}
