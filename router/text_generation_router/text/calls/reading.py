"""How the texts of one model are read: its formats, and the special tokens of its tokenizer."""

from collections.abc import Callable

from text_generation_router.text.calls.formats import Body, CallFormat
from text_generation_router.text.calls.found_calls import Tools
from text_generation_router.text.calls.json_body import JsonBody
from text_generation_router.text.calls.reader import AnswerReader, Marks
from text_generation_router.text.calls.reasoning import ReasoningFormat
from text_generation_router.text.calls.special_tokens import SpecialTokens
from text_generation_router.text.pieces import PieceReader

_FIRST_CHARACTERS = {Body.JSON_OBJECT: "{", Body.JSON_ARRAY: "["}


class Reading:
    """Makes the readers of a model's answers. Made once for a model."""

    def __init__(
        self, calls: CallFormat | None, reasoning: ReasoningFormat | None, special_texts: frozenset[str] = frozenset()
    ) -> None:
        """`special_texts`: the texts of the tokenizer's special tokens. A marker that is one of them is never found in
        text that the model has spelled out."""
        self.calls, self.reasoning = calls, reasoning
        markers = (*(calls.markers if calls else ()), *(reasoning.markers if reasoning else ()))
        self._special_tokens = SpecialTokens(special_texts, markers)
        code = self._special_tokens.coded
        self._with_calls = _marks(calls, reasoning, code)
        self._without_calls = _marks(None, reasoning, code)

    @property
    def needs_special_tokens(self) -> bool:
        """Whether a marker is a special token: a reader then needs the texts of special tokens too."""
        return self._special_tokens.has_markers

    def reader(self, tools: Tools | None = None, prompt: str = "", keeps_special: bool = False) -> PieceReader:
        """A reader for one answer. `tools`: the request's tools; None: calls are not looked for. `prompt`: the rendered
        prompt, which may open the reasoning. `keeps_special`: whether the answer's texts contain those of special
        tokens.
        """
        is_open = self.reasoning is not None and self.reasoning.is_open_in(prompt)
        marks = self._without_calls if tools is None else self._with_calls
        return AnswerReader(marks, self._special_tokens, tools or {}, is_open, keeps_special)


def _marks(calls: CallFormat | None, reasoning: ReasoningFormat | None, code: Callable[[str], str]) -> Marks:
    thinks = (code(reasoning.begin), code(reasoning.end)) if reasoning else None
    if calls is None:
        return Marks(None, thinks)
    syntax = calls.coded(code)
    return Marks(
        JsonBody(syntax),
        thinks,
        syntax.starts,
        syntax.ends,
        syntax.separators,
        _FIRST_CHARACTERS[syntax.body] if syntax.is_bare else "",
    )
