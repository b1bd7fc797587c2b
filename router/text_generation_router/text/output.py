"""One request's output as text: an event for each token, and the finish."""

from collections.abc import Sequence
from dataclasses import dataclass

from text_generation_router.scheduling.request import GenerationRequest
from text_generation_router.text.detokenization import TextStream, Vocabulary
from text_generation_router.text.events import Finish, FinishReason, Token, TokenEvent
from text_generation_router.text.stop_cutting import StopCutter


@dataclass(frozen=True, slots=True)
class TextRules:
    """How a text is made of tokens, and where it ends."""

    stop: tuple[str, ...] = ()
    keeps_stop: bool = True  # whether a text contains the stop string or the end token that ended it, as in TGI
    skips_special: bool = True  # whether a text is without the texts of special tokens


class TextOutput:
    def __init__(self, vocabulary: Vocabulary, request: GenerationRequest, rules: TextRules) -> None:
        self.num_tokens = 0
        self._vocabulary = vocabulary
        self._special_ids = vocabulary.special_ids
        self._text = TextStream(vocabulary, request.input_ids, rules.stop if rules.keeps_stop else ())
        self._cutter = StopCutter(rules.stop) if rules.stop and not rules.keeps_stop else None
        self._skips_special = rules.skips_special
        self._keeps_stop = rules.keeps_stop
        self._pieces: list[str] | None = None  # the text, where it differs from that of `_text`
        if self._cutter is not None or not rules.skips_special:
            self._pieces = []
        self._min_new_tokens = request.sampling.min_new_tokens
        self._seed = request.sampling.seed if request.sampling.do_sample else None
        self._queue_s = 0.0
        self.cached_tokens = 0

    def begin(self, queue_s: float, cached_tokens: int) -> None:
        """To be called before the first token, with facts that are known since the first step."""
        self._queue_s, self.cached_tokens = queue_s, cached_tokens

    def push(
        self,
        token_id: int,
        logprob: float,
        tops: Sequence[tuple[int, float]],
        reason: FinishReason | None,
        inference_s: float,
        is_text: bool = False,
    ) -> TokenEvent:
        """Adds a token. `reason`: why the engine ends the request with this token, or None. A stop string ends the text
        too, unless one of the first `min_new_tokens` tokens completes it. As in TGI, the length limit and the
        end-of-text token take precedence as the reason. The event has `finish` if the token is the last. `tops`: (id,
        log-probability) of the most likely tokens. `is_text`: the last token belongs to the text, which is complete
        with it, so it is not cut off as an end token.
        """
        self.num_tokens += 1
        if reason is FinishReason.EOS_TOKEN and not self._keeps_stop and not is_text:
            shown, plain = self._cut_end_token(token_id)
        else:
            shown, plain, stopped = self._text.push(token_id, self.num_tokens > self._min_new_tokens)
            if reason is not None and not stopped:
                held_back = self._text.flush()
                shown, plain = shown + held_back, plain + held_back
            if self._pieces is not None:
                plain, stopped = self._ruled(shown, plain, stopped, reason is not None)
            if stopped:
                reason = reason or FinishReason.STOP_SEQUENCE
        token = Token(token_id, shown, logprob, token_id in self._special_ids)
        top_tokens = tuple([self._top_token(i, top) for i, top in tops]) if tops else ()
        return TokenEvent(token, plain, top_tokens, self._finish(reason, inference_s) if reason else None)

    def _cut_end_token(self, token_id: int) -> tuple[str, str]:
        """What an end token adds to the token's own text, and to the text: only what was held back before it."""
        plain = held_back = self._text.flush()
        if self._pieces is not None:
            plain, _ = self._ruled(held_back, held_back, False, is_last=True)
        return held_back + self._vocabulary.text_of(token_id), plain

    def _ruled(self, shown: str, plain: str, stopped: bool, is_last: bool) -> tuple[str, bool]:
        """The text that is given out, by the rules, for what a token adds; and whether a stop string has ended it."""
        text = plain if self._skips_special else shown
        if self._cutter is not None:
            text, stopped = self._cutter.push(shown, text, self.num_tokens > self._min_new_tokens)
            if is_last and not stopped:
                text += self._cutter.flush()
        assert self._pieces is not None
        self._pieces.append(text)
        return text, stopped

    def _top_token(self, token_id: int, logprob: float) -> Token:
        vocabulary = self._vocabulary
        return Token(token_id, vocabulary.text_of(token_id), logprob, token_id in self._special_ids)

    def end(self, reason: FinishReason, inference_s: float) -> TokenEvent:
        """The last event of a request that ends without another token. It carries the text that was held back."""
        held_back = self._text.flush()
        if self._pieces is not None:
            held_back, _ = self._ruled(held_back, held_back, False, is_last=True)
        return TokenEvent(None, held_back, finish=self._finish(reason, inference_s))

    def _finish(self, reason: FinishReason, inference_s: float) -> Finish:
        text = self._text.text() if self._pieces is None else "".join(self._pieces)
        stop = None if self._cutter is None else self._cutter.found
        seconds = self._queue_s, inference_s
        return Finish(reason, text, self.num_tokens, self._seed, *seconds, self.cached_tokens, stop)
