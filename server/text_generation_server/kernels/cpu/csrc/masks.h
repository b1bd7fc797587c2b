/* The mask of one row of logits: a bit for each token, 1 where the row can choose it. */
#pragma once

#include "cuts.h"

/* The tokens that a row of `size` logits can choose. Few tokens are listed in `scratch`, which has cut_words(size)
   words, and the row stays as it is. Of more tokens none is listed: all logits but theirs become minus infinity in the
   row. */
struct tokens mask_row(float *row, long size, const uint32_t *mask, int64_t *scratch);
