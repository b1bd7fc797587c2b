/* The arguments of every kernel, declared once. The C code uses these structs; Python reads this file (build.py) and
   fills in the same structs by name. The build compiles assertions that both put each argument at the same offset.

   Rules for this file, so that Python can read it: each argument is a pointer, a `long` or a `double`, so that all take
   8 bytes, and has a line of its own. A number that Python needs is declared as NAME = value.

   Pointers may be null only where a comment says "or null". Tensors are contiguous unless a stride is given. Strides
   count numbers, not bytes. T is the number of tokens of a step, R the number of rows (running requests). */
#pragma once

#include <stdint.h>

typedef uint16_t bf16; /* the upper half of a float32 */

/* The number formats in memory. F8 is e4m3: sign, 4 bits of exponent, 3 of mantissa. The formats after it are those of
   weights only: I4 are the integers 0 … 15, and TABLE4 the numbers of a table with 16 entries. The last ones are those
   of scales: U8 are the integers 0 … 255, E8M0 powers of 2, and TABLE8 the numbers of a table with 256 entries. */
enum type { F32 = 0, BF16 = 1, I8 = 2, F8 = 3, F16 = 4, I4 = 5, TABLE4 = 6, U8 = 7, E8M0 = 8, TABLE8 = 9 };

/* Weights in planes, as further formats: integers of 2, 5 and 6 bits. */
enum { PLANES2 = 10, PLANES5 = 11, PLANES6 = 12 };

/* How codes of a weight lie in a pair of panels: as gemm_codes, gemm or gemm_ints reads them. */
enum layout { IN_STEPS = 0, IN_PAIRS = 1, IN_WORDS = 2 };

enum activation { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3 };

enum {
  MAX_ARGUMENTS = 37,      /* most arguments of one kernel */
  MAX_EXPERTS = 1024,      /* experts of one layer */
  MAX_HEAD_SIZE = 256,     /* most numbers in a head, in all kernels that compute heads; always a multiple of 16 */
  FEW_ROWS = 16,           /* gemm: most rows of x that are read in place; more rows are packed into tiles first */
  UNDIVIDED_INPUTS = 2048, /* gemm: most inputs of a product that is not divided into parts */
  MAX_SUMMED_ROWS = 576,   /* gemm: most rows whose unfinished sums are kept between two parts */
  SPLIT_KEYS = 512,        /* attend, attend_runs: keys after which a new state begins */
  CHUNK_KEYS = 128,        /* attend_chunk: positions in a block of a row */
  CODES_STEP = 8,          /* gemm_codes: inputs of a step; groups and inputs are multiples of it */
  CUT_BUCKETS = 2048,      /* draw: buckets of tokens in the search for the end of a cut */
};

/* Copies the embeddings of tokens: out[t] = weight[ids[t]]. */
struct embed_arguments {
  const int32_t *ids; /* [T] */
  long tokens;        /* T */
  const void *weight; /* [vocabulary, row_bytes] */
  long row_bytes;     /* bytes of one embedding */
  void *out;          /* [T, row_bytes] */
};

/* Copies the embeddings of tokens out of the panels of a matrix product. A word is one float32 or two bfloat16. */
struct embed_panels_arguments {
  const int32_t *ids; /* [T] */
  long tokens;        /* T */
  const void *panels; /* [vocabulary / outputs, words, outputs] */
  long outputs;       /* outputs of a panel: 16 for BF16, 32 for F32 */
  long words;         /* words of one embedding */
  void *out;          /* [T, words] */
};

/* The embeddings of tokens, of codes in panels: the numbers that they stand for, without the scale of each output. */
struct embed_codes_arguments {
  const int32_t *ids;  /* [T] */
  long tokens;         /* T */
  const void *product; /* struct gemm_codes_arguments: the weight */
  long layout;         /* IN_STEPS, IN_WORDS or, for codes of 8 bits, IN_PAIRS */
  long zero;           /* what is subtracted from every code, beside its zero point */
  long width;          /* numbers of an embedding: inputs, or fewer */
  long type;           /* type of out: F32 or BF16 */
  void *out;           /* [T, width] */
};

/* out = x / sqrt(mean(x²) + eps) * weight for each token. With a residual, residual += x is computed first, and then
   the residual takes the place of x. */
struct rms_norm_arguments {
  const void *x;      /* [T, width] */
  void *residual;     /* [T, width], or null */
  long tokens;        /* T */
  long width;         /* a multiple of 16 */
  long type;          /* type of x, residual and out: F32 or BF16 */
  const void *weight; /* [width] */
  long weight_type;   /* type, or F32: then the product is rounded once, after the multiplication */
  double eps;
  void *out; /* [T, width]; may be the same memory as x */
};

/* x = x / sqrt(mean(x²) + eps) * weight for each token, of a part of its numbers. */
struct rms_norm_part_arguments {
  void *x;            /* [T, width], tokens stride apart */
  long tokens;        /* T */
  long stride;        /* numbers from one token to the next */
  long width;         /* a multiple of 16 */
  long type;          /* type of x: F32 or BF16 */
  const void *weight; /* [width] */
  long weight_type;   /* as in rms_norm */
  double eps;
};

/* out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias for each token. With a residual, residual += x comes
   first and is what is normed. */
struct layer_norm_arguments {
  const void *x;      /* [T, width] */
  void *residual;     /* [T, width], or null */
  long tokens;        /* T */
  long width;         /* a multiple of 16 */
  long type;          /* type of x, residual, weight, bias and out: F32 or BF16 */
  const void *weight; /* [width] */
  const void *bias;   /* [width], or null */
  double eps;
  void *out; /* [T, width]; may be x */
};

/* x += y. */
struct add_arguments {
  void *x; /* [T, width] */
  const void *y;
  long tokens; /* T */
  long width;  /* a multiple of 16 */
  long type;   /* F32 or BF16 */
};

/* out = activation(x), or, gated, activation(gate) * up. */
struct activate_arguments {
  const void *x;   /* [T, width], or gated [T, 2 * width]: gate, then up */
  long tokens;     /* T */
  long width;      /* a multiple of 16 */
  long type;       /* type of x and out: F32 or BF16 */
  long activation; /* SILU, GELU_TANH, GELU or RELU */
  long gated;      /* 0 or 1 */
  void *out;       /* [T, width] */
};

/* out = silu(gate) * up. */
struct silu_mul_arguments {
  const void *gate_up; /* [T, 2 * width]: gate, then up */
  long tokens;         /* T */
  long width;          /* a multiple of 16 */
  long type;           /* type of gate_up and out: F32 or BF16 */
  void *out;           /* [T, width] */
};

/* Applies the norms, if there are any, and the rotary embedding to queries and keys. Queries are written back in place;
   keys and values are stored in the tokens' slots of the cache. */
struct rope_and_store_arguments {
  void *qkv;                /* [T, heads + 2 * kv_heads, head_size]: queries, keys, values */
  long tokens;              /* T */
  long heads;               /* query heads */
  long kv_heads;            /* key heads; as many value heads */
  long head_size;           /* a multiple of 16 */
  long type;                /* type of qkv: F32 or BF16 */
  const float *cos;         /* [positions, head_size / 2] */
  const float *sin;         /* [positions, head_size / 2] */
  const int32_t *positions; /* [T] */
  void *kv;                 /* [slots, 2 * kv_heads, head_size]: keys, then values */
  float *kv_scales;         /* [slots, 2 * kv_heads] for I8 and F8, or null */
  long kv_type;             /* any type */
  const int32_t *slots;     /* [T] */
  const void *query_norm;   /* [head_size]: weight of the norm of each query head, or null */
  const void *key_norm;     /* as query_norm, for keys; both or neither are null */
  long norm_type;           /* type of these weights, as in rms_norm */
  double eps;
};

/* Attention of single tokens: token t is a query of row rows[t] at position lengths[t] - 1, over the slots of that row
   up to its own position. */
struct attend_arguments {
  const void *q; /* [T, heads, head_size], tokens q_stride apart */
  long q_stride;
  long q_type;            /* type of q and out: F32 or BF16 */
  void *out;              /* [T, heads, head_size] */
  long tokens;            /* T */
  long heads;             /* query heads, a multiple of kv_heads */
  const void *kv;         /* [slots, 2 * kv_heads, head_size]: keys, then values */
  const float *kv_scales; /* [slots, 2 * kv_heads] for I8 and F8, or null */
  long kv_heads;
  long head_size;       /* a multiple of 16 */
  long kv_type;         /* any type */
  const int32_t *table; /* [rows, positions]: the slot of each position of each row, rows table_stride apart */
  long table_stride;
  const int32_t *rows;    /* [T] */
  const int32_t *lengths; /* [T] */
  double scale;           /* factor of the scores, before softmax */
  double softcap;         /* scores become softcap * tanh(score / softcap); 0: they do not */
  const float *slopes;    /* [heads]: then grow by slope * (position of the key - position of the query), or null */
  const float *sinks;     /* [heads]: score of a further key, whose value is 0, or null */
  long window;            /* a query sees this many positions, its own included; 0: all positions up to its own */
};

/* Attention of a prompt chunk on the matrix unit. The queries are those at positions start … end - 1 of one row.
   Each query attends to the row's positions up to its own. Queries and out are BF16. The options are those of
   `attend`. */
struct attend_chunk_arguments {
  const bf16 *q; /* [end - start, heads, head_size], tokens q_stride apart */
  long q_stride;
  bf16 *out;              /* [end - start, heads, head_size] */
  long heads;             /* query heads, a multiple of kv_heads */
  const void *kv;         /* [slots, 2 * kv_heads, head_size]: keys, then values */
  const float *kv_scales; /* [slots, 2 * kv_heads] for I8 and F8, or null */
  long kv_heads;
  long head_size;       /* a multiple of 32 */
  long kv_type;         /* any type */
  const int32_t *slots; /* [end]: the slot of each position of the row */
  long start;
  long end;
  double scale;
  double softcap;
  const float *slopes; /* [heads], or null */
  const float *sinks;  /* [heads], or null */
  long window;
  /* [2 * kv_heads, head_size, L]: L positions, from the first that a query sees, rounded down to a multiple of
     CHUNK_KEYS, to `end`, rounded up */
  bf16 *scratch;
};

/* Attention of runs: prompt chunks, of which each query attends to its row's positions up to its own. Each run is
   neighbouring positions of one row. Runs with later positions should come first. The options are those of `attend`. */
struct attend_runs_arguments {
  const void *q; /* [T, heads, head_size], tokens q_stride apart */
  long q_stride;
  long q_type;            /* type of q and out: F32 or BF16 */
  void *out;              /* [T, heads, head_size] */
  long heads;             /* query heads, a multiple of kv_heads */
  const void *kv;         /* [slots, 2 * kv_heads, head_size]: keys, then values */
  const float *kv_scales; /* [slots, 2 * kv_heads] for I8 and F8, or null */
  long kv_heads;
  long head_size;       /* a multiple of 16 */
  long kv_type;         /* any type */
  const int32_t *table; /* [rows, positions]: the slot of each position of each row, rows table_stride apart */
  long table_stride;
  const int32_t *runs; /* [count, 5]: row, first position, position after the last, index of the first token in q; and
                          where its states begin, a multiple of 32 queries, or -1 if it is not computed by splits */
  long count;
  double scale;
  double softcap;
  const float *slopes; /* [heads], or null */
  const float *sinks;  /* [heads], or null */
  long window;
  void *states; /* for each run that is computed by splits [splits, kv_heads, queries, 2 + head_size] float32, where
                   queries are those of a key head, rounded up to a multiple of 32 */
};

/* Begins a decode step. The newest position of row rows[r] gets slot slots[r]: table[row, length - 1] = slot.
   Returns the newest token of each row, its position and the row's length. */
struct place_arguments {
  const int32_t *rows;    /* [R] */
  const int32_t *slots;   /* [R] */
  long count;             /* R */
  const int32_t *history; /* [rows, stride]: the token ids of each row */
  int32_t *table;         /* [rows, stride]: the slots of each row */
  long stride;            /* numbers from one row of history or table to the next */
  const int32_t *lengths; /* [rows] */
  int32_t *ids;           /* [R] */
  int32_t *positions;     /* [R] */
  int32_t *row_lengths;   /* [R] */
};

/* Ends a step: appends token ids[r] to the history of row rows[r], which becomes one longer. */
struct advance_arguments {
  int32_t *history;    /* [rows, stride] */
  long stride;         /* numbers from one row of history to the next */
  int32_t *lengths;    /* [rows] */
  const int32_t *rows; /* [R] */
  const int32_t *ids;  /* [R] */
  long count;          /* R */
};

/* Chooses a token for each row of logits, and gives its log-probability. Logits are divided by the temperature, and
   those of tokens that a mask or a cut excludes become minus infinity. A row that is not finite becomes zeros, and its
   id and log-probability 0; a row without a token that is left becomes zeros, its id 0, and its log-probability minus
   infinity. */
struct draw_arguments {
  float *logits; /* [R, vocabulary], rows stride apart */
  long count;    /* R */
  long vocabulary;
  long stride;                /* numbers from one row of logits to the next */
  const uint8_t *draws;       /* [R]: 1 draws at random, 0 takes the token with the highest logit */
  const int64_t *seeds;       /* [R] */
  const int32_t *lengths;     /* [rows]: the position that seeds the noise */
  const int32_t *rows;        /* [R]: indices into lengths */
  const float *temperatures;  /* [R] */
  const int32_t *top_k;       /* [R]; 0: no cut */
  const float *top_p;         /* [R]; 1: no cut */
  const float *log_min_p;     /* [R]; minus infinity: no cut */
  const float *typical_p;     /* [R]; 1: no cut */
  const int32_t *masks;       /* [masked, vocabulary / 32 rounded up], mask_stride apart: bits of the tokens that a row
                                 can choose; or null */
  long mask_stride;           /* words from one mask to the next */
  const int32_t *masked_rows; /* [masked]: the row of each mask, below R; or null */
  long masked;
  long is_checked;  /* 1: `finite` is known; 0: it is written */
  uint8_t *finite;  /* [R]: whether all numbers of a row are finite; becomes 0 where no token is left */
  int32_t *ids;     /* [R] */
  float *logprobs;  /* [R] */
  int64_t *scratch; /* [threads, CUT_BUCKETS + 3 * vocabulary + 16] */
};

/* finite[r] = 1 where all numbers of row r are finite. A row that is not finite is replaced by zeros. */
struct check_finite_arguments {
  float *logits; /* [R, vocabulary], rows stride apart */
  long count;    /* R */
  long vocabulary;
  long stride;
  uint8_t *finite; /* [R] */
};

/* What adapters add to a linear layer: first their products with x, hidden = x downᵀ. A layer has several parts, which
   are outputs with matrices of their own; hidden has `rank` numbers for each. The numbers from ranks[slot][part] on are
   not written. */
struct adapt_down_arguments {
  const void *x;        /* [T, inputs], or with pairs [T / chosen, inputs] */
  const int32_t *pairs; /* [T], as written by route: x of number t is row pairs[t] / chosen; or null: row t */
  long chosen;
  long tokens;          /* T */
  long inputs;          /* a multiple of 16 */
  long type;            /* type of x and down: F32 or BF16 */
  const int32_t *slots; /* [T]: the adapter of each token, or -1 */
  const void *down;     /* [adapters, parts * rank, inputs] */
  const int32_t *ranks; /* [adapters, parts] */
  long parts;
  long rank;
  float *hidden; /* [T, parts * rank] */
};

/* The numbers of the matrices of each pair: slot * experts + expert of the pair's token, or -1. */
struct pair_slots_arguments {
  const int32_t *slots; /* [T]: the adapter of each token, or -1 */
  const int32_t *pairs; /* as written by route, as are the offsets */
  const int32_t *offsets;
  long experts;
  long chosen;
  int32_t *out; /* [T * chosen], in the order of `pairs` */
};

/* What adapt_down is for embeddings: hidden = the numbers of each token's id. */
struct adapt_ids_arguments {
  const int32_t *ids;   /* [T] */
  long tokens;          /* T */
  const int32_t *slots; /* [T] */
  const void *down;     /* [adapters, vocabulary, rank] */
  long vocabulary;
  long rank;     /* a multiple of 16 */
  long type;     /* type of down: F32 or BF16 */
  float *hidden; /* [T, rank] */
};

/* Then out = bias + hidden upᵀ for each part, and -0, which changes no sum, for tokens and parts without an adapter. */
struct adapt_up_arguments {
  const float *hidden;  /* [T, parts * rank] */
  long tokens;          /* T */
  const int32_t *slots; /* [T] */
  const void *up;       /* [adapters, rank, columns] */
  const float *bias;    /* [adapters, columns], or null */
  const void *base;     /* [T, columns], in the type of up: then out has this type, and base is added; or null */
  long type;            /* type of up: F32 or BF16 */
  const int32_t *ranks; /* [adapters, parts] */
  const int32_t *ends;  /* [parts]: the column behind the last one of each part, a multiple of 16 */
  long parts;
  long rank;
  long columns; /* the last of `ends` */
  void *out;    /* [T, columns] */
};

/* y = x Wᵀ + addend + bias in float32. A row of y has the same bits whatever the other rows are. */
struct gemm_f32_arguments {
  const float *x; /* [rows, inputs] */
  long rows;
  long inputs;
  const float *weights; /* [outputs / 32, inputs, 32]; zeros fill the last panel */
  long outputs;
  const float *bias;  /* [outputs], or null */
  const void *addend; /* [rows, outputs], rows addend_stride apart, or null */
  long addend_stride; /* numbers from one row of the addend to the next */
  long addend_type;   /* F32 or BF16 */
  float *y;           /* [rows, outputs], rows y_stride apart */
  long y_stride;
};

/* y = x Wᵀ * scales + addend + bias. If gated: y = silu(gate) * up. Weights lie in panels: see README.md. */
struct gemm_arguments {
  const bf16 *x; /* [rows, inputs] */
  long rows;
  long inputs;         /* a multiple of 32 */
  const void *weights; /* [outputs / 16, inputs / 2, 16, 2] in int8 or BF16 */
  long outputs;        /* a multiple of 32 */
  long is_int8;        /* whether weights are int8 */
  const float *scales; /* [outputs] for int8, or null */
  const float *bias;   /* [outputs], or null */
  const void *addend;  /* [rows, columns]; gated, [rows, 2 * columns]: gates, then ups; or null */
  long addend_stride;  /* numbers from one row of the addend to the next */
  long addend_type;    /* F32 or BF16 */
  long gated;          /* whether panels alternate: one of gates, then one of ups */
  long y_type;         /* F32 or BF16 */
  long columns;        /* numbers of a row of y: outputs, less those that only fill panels; gated, outputs / 2 */
  void *y;             /* [rows, columns], rows y_stride apart */
  long y_stride;
  bf16 *scratch; /* aligned to 64 bytes; linear.py computes the size */
};

/* Copies numbers of outputs into panels: packed[p][u][o] is unit u of the output at place p * width + o, or 0 where no
   output is. A unit is a number, some neighbouring numbers, or 8 codes of as many bits as a unit has bytes. `run` units
   are neighbours where they are read. */
struct pack_panels_arguments {
  const int64_t *rows;   /* [panels * width]: the address of each output's numbers, or 0 */
  const int32_t *starts; /* [units / run]: bits from this address to each run */
  long run;
  long spread; /* whether the codes of a unit are `unit` bits of 8 neighbouring bytes; runs are even then */
  long swaps;  /* whether the first of two codes of 4 bits is in the upper half of its byte */
  long unit;   /* bytes of a unit: 1, 2 or 4 */
  long units;
  long panels;
  long width;   /* outputs of a panel: 16 or 32 */
  long sorts;   /* whether a unit is 8 codes of 4 bits, of which those of even inputs become the lower half */
  void *packed; /* [panels, units, width] */
};

/* The same for 8 codes of 4 bits, where words have codes of an output's inputs, or of several outputs, and words of an
   output do not follow each other. Code k is in word source / in_word, with source = order[k] or k, `shifts` + 4 *
   (source % in_word) bits from its lowest one on. */
struct pack_columns_arguments {
  const int64_t *rows;    /* [panels * 32]: the address of each output's first word, or 0 */
  const int32_t *shifts;  /* [panels * 32] */
  const int64_t *strides; /* [panels * 32]: bytes from an output's word to its next */
  const int32_t *order;   /* [8 * units], or null */
  long in_word;           /* codes of an output in a word: 1 or 8 */
  long units;
  long panels;
  uint32_t *packed; /* [panels, units, 32]: the codes of even inputs in the lower half */
};

/* y = x Wᵀ + addend + bias, with W = scales * (codes - zeros) or scales * codes - offsets, times the scale of each
   output. If gated: y = silu(gate) * up. Codes, scales, zeros, offsets and factors lie in panels, as README.md says.
   Scales are `scales * factors + extras`, offsets are `offsets * offset_factors`. */
struct gemm_codes_arguments {
  const void *x; /* [rows, x_inputs] */
  long x_type;   /* F32 or BF16 */
  long rows;
  long x_inputs;
  long inputs;                /* inputs of W, a multiple of CODES_STEP. x is 0 for those that it does not have */
  const void *codes;          /* [outputs / 32, inputs, 32]; of less than 8 bits [outputs / 32, inputs / 8, 32] words */
  const void *high;           /* [outputs / 32, inputs / 8, 32]: upper bits of planes; or null */
  long type;                  /* any type */
  const float *table;         /* [16] for TABLE4, or null */
  long outputs;               /* a multiple of 32 */
  long group;                 /* inputs of a group, a multiple of CODES_STEP; the last group may have fewer */
  const void *scales;         /* [outputs / 32, groups, scale_width], or null: 1 */
  long scale_type;            /* F32, BF16, F16, F8, I8, U8, E8M0 or TABLE8 */
  long scale_width;           /* 32, or 2: one for each panel */
  const float *scale_table;   /* [256] for TABLE8, or null */
  const void *factors;        /* [outputs / 32, groups / groups_of_factor, 32], or null: 1 */
  long factor_type;           /* F32, BF16 or F16 */
  long groups_of_factor;      /* the last factor may belong to fewer groups */
  const float *extras;        /* [outputs], or null: 0 */
  const int8_t *zeros;        /* [outputs / 32, groups, 32], or null: without offsets the middle, or 0 */
  const void *offsets;        /* [outputs / 32, groups, 32], or null; only without zeros */
  long offset_type;           /* as scale_type, without TABLE8 */
  const void *offset_factors; /* as factors, in their type, or null: 1 */
  const float *output_scales; /* [outputs], or null: 1 */
  const int32_t *order;       /* [inputs]: the number of x that each input of W multiplies, or null: the same number */
  const float *bias;          /* [outputs], or null */
  const void *addend;         /* [rows, columns]; gated, [rows, 2 * columns]: gates, then ups; or null */
  long addend_stride;         /* numbers from one row of the addend to the next */
  long addend_type;           /* F32 or BF16 */
  long gated;                 /* whether panels alternate: one of gates, then one of ups */
  long y_type;                /* F32 or BF16 */
  long columns; /* numbers of a row of y: outputs, less those that only fill panels; gated, half of them */
  void *y;      /* [rows, columns], rows y_stride apart */
  long y_stride;
  void *scratch; /* aligned to 64 bytes; gemm_codes_scratch computes the size */
};

/* The same product for codes that are integers, or stand for integers, where x becomes integers of 8 bits: README.md
   says which numbers y has, to the bit. W = scales * (codes - zeros - zero), or scales * (codes - zero) - offsets. With
   factors, scales and offsets are integers of 8 bits, factors belong to 256 inputs, `group` is 16 or 32, and x_block
   256. With scales alone, `group` is a multiple of 32, and x_block 32. Without scales, x_block is `inputs`. */
struct gemm_ints_arguments {
  const void *x; /* [rows, x_inputs] */
  long x_type;   /* F32 or BF16 */
  long rows;
  long x_inputs;
  long x_block;         /* inputs of x that have one scale */
  long inputs;          /* a multiple of 32 and, if x_block is 256, of 256 */
  const void *codes;    /* [outputs / 32, inputs / 4, 32, 4] in U8; of I4 and TABLE4 [outputs / 32, inputs / 8, 32]
                           words, with the codes of even inputs in the lower half of each byte; planes as in
                           gemm_codes */
  const void *high;     /* as in gemm_codes */
  long type;            /* U8, I4, TABLE4 or planes */
  const uint8_t *table; /* [16] for TABLE4, or null */
  long largest;         /* the largest code; 255 for TABLE4 */
  long zero;
  long outputs;       /* a multiple of 32 */
  long group;         /* inputs of a group; the last group may have fewer */
  const void *scales; /* as in gemm_codes, as are all that follow; no tables, and no extras */
  long scale_type;
  long scale_width;
  const void *factors;
  long factor_type;
  long groups_of_factor;
  const int8_t *zeros;
  const void *offsets;
  long offset_type;
  const void *offset_factors;
  const float *output_scales;
  const int32_t *order;
  const float *bias;
  const void *addend;
  long addend_stride;
  long addend_type;
  long gated;
  long y_type;
  long columns;
  void *y;
  long y_stride;
  void *scratch; /* aligned to 64 bytes; gemm_ints_scratch computes the size */
  long has_vnni; /* whether the processor has VPDPBUSD for vectors of the target */
};

/* Chooses experts for each token: the `chosen` ones with the largest logits. A score is the expert's share of a softmax
   over all experts, or over the chosen ones. Lists the pairs (token, choice) in the order of their experts. */
struct route_arguments {
  const void *logits; /* [T, experts], rows stride apart */
  long stride;        /* numbers from one row of logits to the next */
  long tokens;        /* T */
  long experts;       /* up to MAX_EXPERTS */
  long chosen;        /* experts of a token */
  long type;          /* type of logits: F32 or BF16 */
  long over_chosen;   /* 1: softmax over the chosen experts; 0: over all */
  int32_t *ids;       /* [T * chosen]: the expert of each pair */
  float *scores;      /* [T * chosen] */
  int32_t *pairs;     /* [T * chosen]: numbers of pairs, in the order of their experts */
  int32_t *offsets;   /* [experts + 1]: the pairs of expert e are pairs[offsets[e]] ... pairs[offsets[e + 1] - 1] */
};

/* out = silu(gate) * up of each pair, in the order of `pairs`. With a limit it is
   (up + 1) * gate / (1 + e^(-slope * gate)), where gate <= limit and -limit <= up <= limit. */
struct experts_up_arguments {
  const void *x;        /* [T, width] */
  const int32_t *pairs; /* as written by route, as are the offsets */
  const int32_t *offsets;
  long experts;
  long chosen;
  long width;          /* a multiple of 16 */
  long inner;          /* a multiple of 16 */
  long type;           /* type of x, gate_up and out: F32 or BF16 */
  const void *gate_up; /* [experts, 2 * inner, width]: gates, then ups */
  const void *bias;    /* [experts, 2 * inner], of the same type, or null */
  const float *addend; /* [T * chosen, 2 * inner], in the order of `pairs`: added before the bias; or null */
  double limit;        /* 0: none */
  double slope;
  void *out; /* [T * chosen, inner] */
};

/* out = score * down(x) of each pair, in the order of the pairs' numbers. */
struct experts_down_arguments {
  const void *x;        /* [T * chosen, inner], in the order of `pairs` */
  const int32_t *pairs; /* as written by route, as are offsets and scores */
  const int32_t *offsets;
  const float *scores;
  long experts;
  long width;          /* a multiple of 16 */
  long inner;          /* a multiple of 16 */
  long type;           /* type of x, down and out: F32 or BF16 */
  const void *down;    /* [experts, width, inner] */
  const void *bias;    /* [experts, width], of the same type, or null */
  const float *addend; /* [T * chosen, width], in the order of `pairs`: added before the bias; or null */
  void *out;           /* [T * chosen, width] */
};

/* The product of each pair's expert, for weights in codes. Without scores, gates and ups: y as in experts_up. With
   scores: y as in experts_down. */
struct experts_codes_arguments {
  const void *products; /* [experts]: gemm_codes_arguments of each, whose x, rows, addend, y and scratch are not read */
  long are_ints;        /* whether they are gemm_ints_arguments */
  const void *x;        /* [T, x_inputs]; with scores [T * chosen, x_inputs], in the order of `pairs` */
  const int32_t *pairs; /* as written by route, as are offsets and scores */
  const int32_t *offsets;
  const float *scores; /* or null */
  long experts;
  long chosen;
  const float *addend; /* as in experts_up, or with scores as in experts_down */
  double limit;        /* 0: none */
  double slope;
  void *y;             /* [T * chosen, columns] */
  void *scratch;       /* [threads, scratch_stride] float32, aligned to 64 bytes */
  long scratch_stride; /* a multiple of 16; experts_codes_scratch and experts_ints_scratch compute what an expert needs
                        */
};

/* out = the sum of each token's pairs. */
struct experts_sum_arguments {
  const void *parts; /* [T, chosen, width] */
  long tokens;       /* T */
  long chosen;
  long width; /* a multiple of 16 */
  long type;  /* type of parts and out: F32 or BF16 */
  void *out;  /* [T, width] */
};

/* x = x + y / (1 + e^-(inputs · weight + addend)) for each token. */
struct add_scored_arguments {
  void *x;             /* [T, width] */
  const void *y;       /* [T, width] */
  const void *inputs;  /* [T, width] */
  const void *weight;  /* [width] */
  const float *addend; /* [T], addend_stride apart, or null */
  long addend_stride;
  long tokens; /* T */
  long width;  /* a multiple of 16 */
  long type;   /* type of x, y, inputs and weight: F32 or BF16 */
};
