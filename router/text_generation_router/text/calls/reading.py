"""How the texts of one model are read: its formats, and the special tokens of its tokenizer."""

from collections.abc import Callable

from text_generation_common.flags.kinds import ReasoningStyle, ToolCallFormat
from text_generation_router.text.calls.formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    BodyKind,
    CallFormat,
    ReasoningFormat,
    format_of,
    reasoning_of,
)
from text_generation_router.text.calls.found_calls import Tools
from text_generation_router.text.calls.harmony import HarmonyMarks, HarmonyReader
from text_generation_router.text.calls.json_body import JsonBody
from text_generation_router.text.calls.named_body import NamedBody
from text_generation_router.text.calls.pythonic_body import PythonicBody
from text_generation_router.text.calls.reader import AnswerReader, CallBody, Marks
from text_generation_router.text.calls.stepped_reader import SpecialTokens, SteppedReader
from text_generation_router.text.calls.xml_body import XmlBody

# The readers of bodies.
_BODIES: dict[BodyKind, Callable[[CallFormat], CallBody]] = {
    BodyKind.JSON_OBJECT: JsonBody,
    BodyKind.JSON_ARRAY: JsonBody,
    BodyKind.NAMED_JSON: NamedBody,
    BodyKind.XML: XmlBody,
    BodyKind.PYTHONIC: PythonicBody,
    BodyKind.PYTHONIC_LINES: PythonicBody,
}


def reading_of(
    template: str | None, calls: ToolCallFormat, reasoning: ReasoningStyle, special_texts: frozenset[str]
) -> "Reading":
    """The reading of a model's answers. `template`: the source of its chat template, which decides for `auto`."""
    shown = "" if template is None else template
    return Reading(
        format_of(shown) if calls is ToolCallFormat.auto else CALL_FORMATS.get(calls),
        reasoning_of(shown) if reasoning is ReasoningStyle.auto else REASONING_FORMATS.get(reasoning),
        special_texts,
    )


class Reading:
    """Makes the readers of a model's answers. Made once for a model."""

    def __init__(
        self, calls: CallFormat | None, reasoning: ReasoningFormat | None, special_texts: frozenset[str] = frozenset()
    ) -> None:
        """`special_texts`: the texts of the tokenizer's special tokens. A marker that is one of them is never found in
        text that the model has spelled out."""
        self.calls, self.reasoning = calls, reasoning
        markers = (*(calls.texts if calls else ()), *(reasoning.markers if reasoning else ()))
        self._special_tokens = SpecialTokens(special_texts, markers)
        self._harmony: HarmonyMarks | None = None
        if (calls and calls.body is BodyKind.HARMONY) or (reasoning and reasoning.name == "harmony"):
            self._harmony = HarmonyMarks(self._special_tokens)
        else:
            self._with_calls, self._without_calls = self._marks(calls), self._marks(None)

    @property
    def needs_special_tokens(self) -> bool:
        """Whether a marker is a special token: a reader then needs the texts of special tokens too."""
        return self._special_tokens.has_markers

    def reader(self, tools: Tools | None = None, prompt: str = "", keeps_special: bool = False) -> SteppedReader:
        """A reader for one answer. `tools`: the request's tools; None: calls are not looked for. `prompt`: the rendered
        prompt, which may open the reasoning. `keeps_special`: whether the answer's texts contain those of special
        tokens.
        """
        if self._harmony is not None:
            thinks = self.reasoning is not None
            return HarmonyReader(self._harmony, self._special_tokens, tools, thinks, keeps_special)
        is_open = self.reasoning is not None and self.reasoning.is_open_in(prompt)
        marks = self._without_calls if tools is None else self._with_calls
        return AnswerReader(marks, self._special_tokens, tools or {}, is_open, keeps_special)

    def _marks(self, calls: CallFormat | None) -> Marks:
        code, reasoning = self._special_tokens.coded, self.reasoning
        frames = dict(reasoning.frames if reasoning else ())
        thinks = (tuple(map(code, reasoning.begins)), tuple(map(code, reasoning.ends))) if reasoning else ((), ())
        if calls is None:
            return Marks(None, thinks, frames=tuple((code(begin), code(end)) for begin, end in frames.items()))
        syntax = calls.coded(code)
        frames |= dict(calls.frames)
        return Marks(
            body=_BODIES[syntax.body](syntax),
            thinks=thinks,
            starts=syntax.starts,
            call_begin=syntax.call_begin,
            ends=syntax.ends,
            separators=syntax.separators,
            frames=tuple((code(begin), code(end)) for begin, end in frames.items()),
            bare_begins=syntax.bare_begins,
        )
