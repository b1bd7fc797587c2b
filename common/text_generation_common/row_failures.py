"""Why a single request of a step fails, in words for its client. The other requests of the step go on."""

NOT_FINITE = "the model's logits for it are not finite (NaN or infinity)"
NO_TOKEN = "grammar, allowed_token_ids, bad_words and min_new_tokens together exclude every token that could come next"
