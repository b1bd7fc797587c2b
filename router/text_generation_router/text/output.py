"""One request's output as text: an event for each token, and the finish."""

from collections.abc import Sequence

from text_generation_router.scheduling.request import GenerationRequest
from text_generation_router.text.detokenization import TextStream, Vocabulary
from text_generation_router.text.events import Finish, FinishReason, Token, TokenEvent


class TextOutput:
    def __init__(self, vocabulary: Vocabulary, request: GenerationRequest, stop: Sequence[str]) -> None:
        self.num_tokens = 0
        self._vocabulary = vocabulary
        self._special_ids = vocabulary.special_ids
        self._text = TextStream(vocabulary, request.input_ids, stop)
        self._min_new_tokens = request.sampling.min_new_tokens
        self._seed = request.sampling.seed if request.sampling.do_sample else None
        self._queue_s = 0.0
        self._cached_tokens = 0

    def begin(self, queue_s: float, cached_tokens: int) -> None:
        """To be called before the first token, with facts that are known since the first step."""
        self._queue_s, self._cached_tokens = queue_s, cached_tokens

    def push(
        self,
        token_id: int,
        logprob: float,
        tops: Sequence[tuple[int, float]],
        reason: FinishReason | None,
        inference_s: float,
    ) -> TokenEvent:
        """Adds a token. `reason`: why the engine ends the request with this token, or None. A stop string ends the text
        too, unless one of the first `min_new_tokens` tokens completes it. As in TGI, the length limit and the
        end-of-text token take precedence as the reason. The event has `finish` if the token is the last. `tops`: (id,
        log-probability) of the most likely tokens.
        """
        self.num_tokens += 1
        shown, plain, stopped = self._text.push(token_id, self.num_tokens > self._min_new_tokens)
        if stopped:
            reason = reason or FinishReason.STOP_SEQUENCE
        elif reason is not None:
            held_back = self._text.flush()
            shown, plain = shown + held_back, plain + held_back
        token = Token(token_id, shown, logprob, token_id in self._special_ids)
        top_tokens = tuple([self._top_token(i, top) for i, top in tops]) if tops else ()
        return TokenEvent(token, plain, top_tokens, self._finish(reason, inference_s) if reason else None)

    def _top_token(self, token_id: int, logprob: float) -> Token:
        vocabulary = self._vocabulary
        return Token(token_id, vocabulary.text_of(token_id), logprob, token_id in self._special_ids)

    def end(self, reason: FinishReason, inference_s: float) -> TokenEvent:
        """The last event of a request that ends without another token. It carries the text that was held back."""
        held_back = self._text.flush()
        return TokenEvent(None, held_back, finish=self._finish(reason, inference_s))

    def _finish(self, reason: FinishReason, inference_s: float) -> Finish:
        return Finish(
            reason, self._text.text(), self.num_tokens, self._seed, self._queue_s, inference_s, self._cached_tokens
        )
