"""Why a single request of a step fails, in words for its client. The other requests of the step go on."""

NOT_FINITE = "the model's logits for it are not finite (NaN or infinity)"
NO_TOKEN = "grammar, allowed_token_ids, bad_words and min_new_tokens together exclude every token that could come next"
# The request's own grammar is the cause. More words may follow.
NOT_COMPILED = "the grammar cannot be compiled"
TOO_COMPLEX = "the grammar is too complex"
LOST = "the grammar cannot be followed any further"  # for example, a token needs more work than llguidance may do
DEAD_END = "the grammar allows no token after the text so far"
GRAMMAR_FAULTS = (NOT_COMPILED, TOO_COMPLEX, LOST, DEAD_END)
# The server's state is the cause: the request may be sent again.
GRAMMARS_WAIT = "too many grammars wait to be compiled"
