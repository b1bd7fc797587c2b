"""How the routes of /v1 write their answers: as OpenAI does, or as TGI does (`--tgi-dialect`); and how a model's
chats call tools and show their reasoning."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from text_generation_common.flags.model import FormatFlags
from text_generation_common.logs import request_id
from text_generation_router.text.calls.reading import Reading, reading_of
from text_generation_router.text.grammars.tool_grammar import CallWays
from text_generation_router.text.templates.chat_template import ChatTemplate
from text_generation_router.text.tokens.events import FinishReason

OPENAI_REASONS = MappingProxyType(
    {
        FinishReason.EOS_TOKEN: "stop",
        FinishReason.STOP_SEQUENCE: "stop",
        FinishReason.LENGTH: "length",
        FinishReason.DEADLINE: "length",  # OpenAI's API has no reason for a deadline; the text could go on
    }
)
TGI_REASONS = MappingProxyType({reason: reason.value for reason in FinishReason} | {FinishReason.EOS_TOKEN: "stop"})


@dataclass(frozen=True, slots=True)
class Style:
    is_tgis: bool
    reasons: Mapping[FinishReason, str]

    @property
    def keeps_stop(self) -> bool:
        """Whether a text contains the stop string that ended it, if the request does not set this."""
        return self.is_tgis

    def identity(self, prefix: str) -> str:
        """The `id` of an answer. The client's request id, or a random one, follows the prefix."""
        return "" if self.is_tgis else f"{prefix}-{request_id.get()}"


OPENAI_STYLE = Style(False, OPENAI_REASONS)
TGI_STYLE = Style(True, TGI_REASONS)


def style_of(tgi_dialect: bool) -> Style:
    return TGI_STYLE if tgi_dialect else OPENAI_STYLE


@dataclass(frozen=True, slots=True)
class ChatFormats:
    """The forms in which the model's chats call tools and show their reasoning, by flags and by the chat template."""

    ways: CallWays
    reading: Reading
    reading_without_reasoning: Reading
    special_texts: frozenset[str]  # the texts of the tokenizer's special tokens

    @classmethod
    def of(cls, template: ChatTemplate | None, flags: FormatFlags, special_texts: frozenset[str]) -> "ChatFormats":
        source = None if template is None else template.source(with_tools=True)
        reading = reading_of(source, flags.tool_call_format, flags.reasoning_format, special_texts)
        calls, in_template = reading.calls, template is not None and template.uses_tools
        ways = CallWays(
            knows_calls=calls is not None,
            in_template=in_template,
            guides=calls is not None and not calls.is_bare,
        )
        without = Reading(calls, None, special_texts)
        return cls(ways, reading, without, special_texts)

    def ways_in(self, style: Style) -> CallWays:
        """How tools are called in this style. In TGI's style a grammar makes all calls."""
        return replace(self.ways, knows_calls=False) if style.is_tgis else self.ways
