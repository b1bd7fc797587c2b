"""One request's output as text: an event for each token, and the finish."""

from collections.abc import Sequence
from dataclasses import dataclass

from text_generation_router.scheduling.request import GenerationRequest
from text_generation_router.text.tokens.detokenization import TextStream, Vocabulary
from text_generation_router.text.tokens.events import Finish, FinishReason, Part, Token, TokenEvent
from text_generation_router.text.tokens.stop_cutting import StopCutter


@dataclass(frozen=True, slots=True)
class TextRules:
    """How a text is made of tokens, and where it ends."""

    stop: tuple[str, ...] = ()
    keeps_stop: bool = True  # whether a text contains the stop string or the end token that ended it, as in TGI
    skips_special: bool = True  # whether a text is without the texts of special tokens
    # Special tokens whose texts a text has even so: they divide it into pieces. None: it is not divided, and its events
    # have no parts.
    markers: frozenset[str] | None = None
    # The end tokens of the request, if an end token or a stop string that meets the length limit is the reason of the
    # end, as in OpenAI. None: the length is the reason, as in TGI.
    end_ids: frozenset[int] | None = None


class TextOutput:
    def __init__(self, vocabulary: Vocabulary, request: GenerationRequest, rules: TextRules) -> None:
        self.num_tokens = 0
        self._vocabulary = vocabulary
        self._special_ids = vocabulary.special_ids
        self._text = TextStream(vocabulary, request.input_ids, rules.stop if rules.keeps_stop else ())
        self._cutter = StopCutter(rules.stop) if rules.stop and not rules.keeps_stop else None
        self._rules = rules
        self._parts: list[Part] | None = None  # the text, where it differs from that of `_text`
        self._given = 0  # number of parts that events have had
        if self._cutter is not None or not rules.skips_special or rules.markers is not None:
            self._parts = []
        self._min_new_tokens = request.sampling.min_new_tokens
        self._seed = request.sampling.seed if request.sampling.do_sample else None
        self._adapter = request.adapter_name
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
        too, unless one of the first `min_new_tokens` tokens completes it. `TextRules.end_ids` says which reason a
        token has that ends the request for several. The event has `finish` if the token is the last. `tops`: (id,
        log-probability) of the most likely tokens. `is_text`: the last token belongs to the text, which is complete
        with it, so it is not cut off as an end token.
        """
        self.num_tokens += 1
        if reason is FinishReason.LENGTH and token_id in (self._rules.end_ids or ()):
            reason = FinishReason.EOS_TOKEN
        if reason is FinishReason.EOS_TOKEN and not self._rules.keeps_stop and not is_text:
            shown, plain = self._cut_end_token(token_id)
        else:
            shown, plain, stopped = self._text.push(token_id, self.num_tokens > self._min_new_tokens)
            if reason is not None and not stopped:
                held_back = self._text.flush()
                shown, plain = shown + held_back, plain + held_back
            if self._parts is not None:
                plain, stopped = self._ruled(shown, plain, stopped, reason is not None)
            if stopped:
                reason = self._reason_beside_stop(reason)
        token = Token(token_id, shown, logprob, token_id in self._special_ids)
        top_tokens = tuple([self._top_token(i, top) for i, top in tops]) if tops else ()
        return TokenEvent(
            token, plain, top_tokens, self._finish(reason, inference_s) if reason else None, self._new_parts()
        )

    def _reason_beside_stop(self, reason: FinishReason | None) -> FinishReason:
        """Why a text ends that a stop string has ended. `reason`: the other reason why it ends there, or None."""
        return FinishReason.STOP_SEQUENCE if reason is None or self._rules.end_ids is not None else reason

    def _cut_end_token(self, token_id: int) -> tuple[str, str]:
        """What an end token adds to the token's own text, and to the text: only what was held back before it."""
        plain = held_back = self._text.flush()
        if self._parts is not None:
            plain, _ = self._ruled(held_back, held_back, False, is_last=True)
        return held_back + self._vocabulary.text_of(token_id), plain

    def _ruled(self, shown: str, plain: str, stopped: bool, is_last: bool) -> tuple[str, bool]:
        """The text that is given out, by the rules, for what a token adds; and whether a stop string has ended it."""
        assert self._parts is not None
        before = len(self._parts)
        for text, given, special in self._divided(shown, plain):
            if self._cutter is None:
                self._parts += [Part(given, special)] if given else []
            elif not stopped:
                parts, stopped = self._cutter.push(text, given, self.num_tokens > self._min_new_tokens, special)
                self._parts += parts
        if self._cutter is not None and is_last and not stopped:
            self._parts += self._cutter.flush()
        return "".join([part.text for part in self._parts[before:]]), stopped

    def _divided(self, shown: str, plain: str) -> tuple[tuple[str, str, bool], ...]:
        """What a token adds, as `StopCutter.push` takes it: as one part, or divided before the special token's text."""
        rules, special = self._rules, shown[len(plain) :]
        if rules.markers is None or not special:
            return ((shown, plain if rules.skips_special else shown, False),)
        is_given = not rules.skips_special or special in rules.markers
        return (plain, plain, False), (special, special if is_given else "", True)

    def _new_parts(self) -> tuple[Part, ...]:
        """The parts that no event has had yet; none if the text is not divided."""
        if self._rules.markers is None or self._parts is None:
            return ()
        given, self._given = self._given, len(self._parts)
        return tuple(self._parts[given:])

    def _top_token(self, token_id: int, logprob: float) -> Token:
        vocabulary = self._vocabulary
        return Token(token_id, vocabulary.text_of(token_id), logprob, token_id in self._special_ids)

    def end(self, reason: FinishReason, inference_s: float) -> TokenEvent:
        """The last event of a request that ends without another token. It carries the text that was held back."""
        held_back = self._text.flush()
        if self._parts is not None:
            held_back, stopped = self._ruled(held_back, held_back, False, is_last=True)
            reason = self._reason_beside_stop(reason) if stopped else reason
        finish = self._finish(reason, inference_s)
        return TokenEvent(None, held_back, finish=finish, parts=self._new_parts())

    def _finish(self, reason: FinishReason, inference_s: float) -> Finish:
        text = self._text.text() if self._parts is None else "".join([part.text for part in self._parts])
        stop = None if self._cutter is None else self._cutter.found
        return Finish(
            reason=reason,
            generated_text=text,
            generated_tokens=self.num_tokens,
            seed=self._seed,
            queue_s=self._queue_s,
            inference_s=inference_s,
            cached_tokens=self.cached_tokens,
            stop=stop,
            adapter=self._adapter,
        )
