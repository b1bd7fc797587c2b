/* Experts whose weights are integers, with activations in 8 bits: as experts_codes.c, by the products of gemm_ints.c.
   Each thread makes integers of the rows of an expert once for all its items of this expert. */
#include "experts.h"
#include "ints.h"

static long items_of_ints(const struct experts_codes_arguments *a, long expert, long rows) {
  const struct gemm_ints_arguments *of = (const struct gemm_ints_arguments *)a->products + expert;
  struct ints_product p;
  begin_ints(&p, of, rows);
  return p.blocks * (of->outputs / PAIR_OUTPUTS);
}

/* The product of an expert that a thread computes items of. */
struct current_int_expert {
  struct gemm_ints_arguments g;
  struct ints_product p;
  long number, rows, block, first, count; /* which expert, its rows; which block, where it begins, and its rows */
};

static void begin_int_expert(struct current_int_expert *c, const struct experts_codes_arguments *a, long number) {
  c->number = number;
  c->rows = a->offsets[number + 1] - a->offsets[number];
  c->block = -1;
  c->g = ((const struct gemm_ints_arguments *)a->products)[number];
  c->g.x = a->x;
  begin_ints(&c->p, &c->g, c->rows);
  add_adapters(a, &c->p.g.e);
}

static void make_block(const struct current_int_expert *c, const struct experts_codes_arguments *a, char *to) {
  for (long r = 0; r < c->count; r++) {
    long at = a->offsets[c->number] + c->first + r;
    make_integers(&c->p, a->scores ? at : a->pairs[at] / a->chosen, int_row(&c->p, to, r));
  }
}

void compute_experts_of_ints(const struct experts_codes_arguments *a, struct team *team, int me) {
  struct expert_items items;
  list_items(a, items_of_ints, &items);
  struct current_int_expert c = {.number = -1};
  float sums[MAX_INT_ROWS][PAIR_OUTPUTS] __attribute__((aligned(64)));
  char *own = (char *)((float *)a->scratch + me * a->scratch_stride);
  long i = 0, count = items.count ? items.ends[items.count - 1] : 0;
  long rows = items.count ? a->offsets[a->experts] / items.count : 0;
  long outputs = ((const struct gemm_ints_arguments *)a->products)->outputs;
  FOR_EACH_ITEM(item, count, items_at_a_time(count, rows, outputs, team->threads), team) {
    while (item >= items.ends[i]) i++;
    if (items.experts[i] != c.number) begin_int_expert(&c, a, items.experts[i]);
    long pairs = c.g.outputs / PAIR_OUTPUTS, of_expert = item - (i ? items.ends[i - 1] : 0), block = of_expert / pairs;
    if (block != c.block) {
      c.block = block;
      c.first = first_of_int_block(&c.p, c.rows, block);
      c.count = first_of_int_block(&c.p, c.rows, block + 1) - c.first;
      make_block(&c, a, own);
    }
    sum_ints_of(&c.p, own, c.count, of_expert % pairs, sums);
    for (long r = 0; r < c.count; r++)
      store_expert(a, &c.p.g.e, a->offsets[c.number] + c.first + r, of_expert % pairs, sums[r]);
  }
}
