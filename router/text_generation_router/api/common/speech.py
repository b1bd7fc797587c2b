"""How the model's chats call tools and show their reasoning: what flags and the chat template tell."""

from dataclasses import dataclass, replace

from text_generation_common.flags.model import FormatFlags
from text_generation_router.api.common.styles import Style
from text_generation_router.text.calls.reading import Reading, reading_of
from text_generation_router.text.grammars.tool_grammar import CallWays
from text_generation_router.text.templates.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Speech:
    ways: CallWays
    reading: Reading
    reading_without_reasoning: Reading
    special_texts: frozenset[str]  # the texts of the tokenizer's special tokens

    @classmethod
    def of(cls, template: ChatTemplate | None, flags: FormatFlags, special_texts: frozenset[str]) -> "Speech":
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
        """In TGI's style a grammar makes all calls."""
        return replace(self.ways, knows_calls=False) if style.is_tgis else self.ways
