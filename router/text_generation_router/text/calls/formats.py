"""How families of models write calls of tools: each format is a row of facts, and each kind of body has one reader. And
how they mark reasoning.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import Enum, StrEnum
from typing import Any


class BodyKind(Enum):
    """How calls are written between their markers."""

    JSON_OBJECT = 1  # {"name": …, "arguments": {…}}
    JSON_ARRAY = 2  # a list of such objects
    NAMED_JSON = 3  # the name, a separator, and the arguments as JSON
    XML = 4  # the name and each argument between tags
    PYTHONIC = 5  # [name(key=literal, …), …]
    PYTHONIC_LINES = 6  # one name(key=literal, …) in each line
    HARMONY = 7  # messages with channels and recipients


class IdStyle(StrEnum):
    """What the ids of a format's calls look like."""

    RANDOM = "random"  # the format has none: the API makes them
    NINE = "nine"  # 9 letters and digits: the templates refuse other ids
    COUNTED = "counted"  # functions.NAME:INDEX, counted through the conversation; the model writes them


@dataclass(frozen=True, slots=True)
class NamedSyntax:
    """The texts around the name of a NAMED_JSON call. Each may be missing but for the name."""

    before: str = ""
    before_id: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class XmlSyntax:
    """The tags of an XML body. Values are raw text: their types come from the tool's schema."""

    after_name: str  # "": a name ends with white space, or where a tag begins
    before_key: str
    after_key: str
    before_value: str
    after_value: str
    end: str
    is_framed: bool = False  # whether a line break stands before and after each value


@dataclass(frozen=True, slots=True)
class CallFormat:
    name: str
    body: BodyKind
    begins: tuple[str, ...]  # markers that begin a call, or a section of calls
    call_begin: str = ""  # what then begins each call
    ends: tuple[str, ...] = ()  # what may follow a call or a section before other text
    separators: tuple[str, ...] = ()  # what may stand between two calls
    frames: tuple[tuple[str, str], ...] = ()  # what may stand around the answer's own text
    bare_begins: tuple[str, ...] = ()  # what stands before a call's name, without white space, if no marker does
    name_key: str = "name"
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    id_key: str = "id"
    named: NamedSyntax = NamedSyntax()
    xml: XmlSyntax | None = None
    ids: IdStyle = IdStyle.RANDOM
    # Each has texts that a chat template contains, all of them, if its model writes this format.
    seen_in: tuple[tuple[str, ...], ...] = ()

    @property
    def is_bare(self) -> bool:
        """Whether a call may also begin the answer without a marker."""
        return bool(self.bare_begins)

    @property
    def starts(self) -> tuple[str, ...]:
        """Every marker at which a call may begin."""
        return (*self.begins, self.call_begin) if self.call_begin else self.begins

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.starts, *self.ends, *(mark for frame in self.frames for mark in frame))

    @property
    def texts(self) -> tuple[str, ...]:
        """The markers, and the texts within a call."""
        within = tuple(getattr(part, item.name) for part in (self.named, self.xml) if part for item in fields(part))
        return (*self.markers, *(text for text in within if isinstance(text, str) and text))

    def coded(self, code: Callable[[str], str]) -> "CallFormat":
        """The same format with the markers as a reader's text has them."""
        changed: dict[str, Any] = {
            item.name: _coded(getattr(self, item.name), code) for item in fields(self) if item.name != "name"
        }
        return replace(self, **changed)


def _coded(value: Any, code: Callable[[str], str]) -> Any:
    if isinstance(value, tuple):
        return tuple(_coded(part, code) for part in value)
    if isinstance(value, NamedSyntax | XmlSyntax):
        return replace(value, **{item.name: _coded(getattr(value, item.name), code) for item in fields(value)})
    return code(value) if isinstance(value, str) and not isinstance(value, StrEnum) else value


_TAGS = XmlSyntax(
    after_name=">",
    before_key="<parameter=",
    after_key=">",
    before_value="",
    after_value="</parameter>",
    end="</function>",
    is_framed=True,
)

# The more particular formats come first: `format_of` takes the first that a template shows.
CALL_FORMATS = {
    row.name: row
    for row in (
        CallFormat(
            "harmony",
            BodyKind.HARMONY,
            begins=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
            ends=("<|end|>", "<|return|>", "<|call|>"),
            seen_in=(("<|channel|>", "<|message|>"),),
        ),
        CallFormat(
            "kimi-k2",
            BodyKind.NAMED_JSON,
            begins=("<|tool_calls_section_begin|>",),
            call_begin="<|tool_call_begin|>",
            named=NamedSyntax(after="<|tool_call_argument_begin|>"),
            ends=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
            ids=IdStyle.COUNTED,
            seen_in=(("<|tool_calls_section_begin|>",),),
        ),
        CallFormat(
            "deepseek-v3",
            BodyKind.NAMED_JSON,
            begins=("<｜tool▁calls▁begin｜>",),
            call_begin="<｜tool▁call▁begin｜>",
            named=NamedSyntax(before="function<｜tool▁sep｜>", after="```json"),
            ends=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
            seen_in=(("<｜tool▁calls▁begin｜>", "```json"),),
        ),
        CallFormat(
            "deepseek-v31",
            BodyKind.NAMED_JSON,
            begins=("<｜tool▁calls▁begin｜>",),
            call_begin="<｜tool▁call▁begin｜>",
            named=NamedSyntax(after="<｜tool▁sep｜>"),
            ends=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
            seen_in=(("<｜tool▁calls▁begin｜>",),),
        ),
        CallFormat(
            "mistral-args",
            BodyKind.NAMED_JSON,
            begins=("[TOOL_CALLS]",),
            named=NamedSyntax(before_id="[CALL_ID]", after="[ARGS]"),
            ids=IdStyle.NINE,
            seen_in=(("[TOOL_CALLS]", "[ARGS]"),),
        ),
        CallFormat(
            "mistral-list",
            BodyKind.JSON_ARRAY,
            begins=("[TOOL_CALLS]",),
            ids=IdStyle.NINE,
            seen_in=(("[TOOL_CALLS]",),),
        ),
        CallFormat(
            "command",
            BodyKind.JSON_ARRAY,
            begins=("<|START_ACTION|>",),
            ends=("<|END_ACTION|>",),
            frames=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
            name_key="tool_name",
            id_key="tool_call_id",
            seen_in=(("<|START_ACTION|>",),),
        ),
        CallFormat(
            "seed-oss",
            BodyKind.XML,
            begins=("<seed:tool_call>",),
            call_begin="<function=",
            xml=replace(_TAGS, is_framed=False),
            ends=("</seed:tool_call>",),
            seen_in=(("<seed:tool_call>", "<function="), ("seed:tool_call", "<function=")),
        ),
        CallFormat(
            "minimax-m2",
            BodyKind.XML,
            begins=("<minimax:tool_call>",),
            call_begin='<invoke name="',
            xml=XmlSyntax(
                after_name='">',
                before_key='<parameter name="',
                after_key='">',
                before_value="",
                after_value="</parameter>",
                end="</invoke>",
            ),
            ends=("</minimax:tool_call>",),
            seen_in=(("minimax:tool_call", "<invoke"),),
        ),
        CallFormat(
            "qwen3-coder",
            BodyKind.XML,
            begins=("<tool_call>",),
            call_begin="<function=",
            xml=_TAGS,
            ends=("</tool_call>",),
            seen_in=(("<tool_call>", "<function=", "<parameter="),),
        ),
        CallFormat(
            "glm45",
            BodyKind.XML,
            begins=("<tool_call>",),
            xml=XmlSyntax(
                after_name="",
                before_key="<arg_key>",
                after_key="</arg_key>",
                before_value="<arg_value>",
                after_value="</arg_value>",
                end="</tool_call>",
            ),
            seen_in=(("<tool_call>", "<arg_key>"),),
        ),
        CallFormat(
            "phi4-mini",
            BodyKind.JSON_ARRAY,
            begins=("<|tool_call|>", "functools"),
            ends=("<|/tool_call|>",),
            seen_in=(("<|tool_call|>", "<|/tool_call|>"), ("<|tool|>", "<|/tool|>"), ("functools[",)),
        ),
        CallFormat(
            "nemotron-v2",
            BodyKind.JSON_ARRAY,
            begins=("<TOOLCALL>",),
            ends=("</TOOLCALL>",),
            seen_in=(("<TOOLCALL>",),),
        ),
        CallFormat(
            "granite",
            BodyKind.JSON_ARRAY,
            begins=("<|tool_call|>", "<tool_call>"),
            ends=("</tool_call>",),
            seen_in=(("<|tool_call|>",),),
        ),
        CallFormat(
            "lfm2",
            BodyKind.PYTHONIC,
            begins=("<|tool_call_start|>",),
            ends=("<|tool_call_end|>",),
            seen_in=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        ),
        CallFormat(
            "olmo3",
            BodyKind.PYTHONIC_LINES,
            begins=("<function_calls>",),
            ends=("</function_calls>",),
            seen_in=(("<function_calls>",),),
        ),
        CallFormat(
            "hermes",
            BodyKind.JSON_OBJECT,
            begins=("<tool_call>",),
            ends=("</tool_call>",),
            seen_in=(("<tool_call>", '"arguments"'), ("<tool_call>", "list of json objects")),
        ),
        CallFormat(
            "llama4",
            BodyKind.PYTHONIC,
            begins=("<|python_start|>",),
            ends=("<|python_end|>",),
            bare_begins=("[",),
            seen_in=(("<|python_start|>",), ("[func_name1(",)),
        ),
        CallFormat(
            "llama3",
            BodyKind.JSON_OBJECT,
            begins=("<|python_tag|>",),
            separators=(";",),
            bare_begins=('{"name":"', '{"type":"function","name":"'),
            seen_in=(('"parameters": dictionary of argument name',),),
        ),
    )
}


def format_of(template: str) -> CallFormat | None:
    """The format in which the model of a chat template writes calls, as far as the template shows it."""
    template = re.sub(r"\\n|\s+", " ", template).replace('\\"', '"')
    return next((row for row in CALL_FORMATS.values() if any(_shows(template, marks) for marks in row.seen_in)), None)


def _shows(template: str, marks: tuple[str, ...]) -> bool:
    return all(mark in template for mark in marks)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks its reasoning, which comes before the answer."""

    name: str
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    frames: tuple[tuple[str, str], ...] = ()  # what may stand around the answer then
    # Each has texts that a chat template contains, all of them, if its model writes this format.
    seen_in: tuple[tuple[str, ...], ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.begins, *self.ends, *(mark for frame in self.frames for mark in frame))

    def is_open_in(self, prompt: str) -> bool:
        """Whether a rendered prompt ends with an opening marker, so that the model's text begins with reasoning."""
        return bool(self.begins) and prompt.rstrip().endswith(tuple(begin.rstrip() for begin in self.begins))


# The more particular formats come first: `reasoning_of` takes the first that a template shows.
REASONING_FORMATS = {
    row.name: row
    for row in (
        ReasoningFormat("harmony", seen_in=(("<|channel|>", "<|message|>"),)),
        ReasoningFormat("gemma4", ("<|channel>thought\n",), ("<channel|>",), seen_in=(("<|channel>", "<channel|>"),)),
        ReasoningFormat(
            "command",
            ("<|START_THINKING|>",),
            ("<|END_THINKING|>",),
            (("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
            seen_in=(("<|START_THINKING|>",),),
        ),
        ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",), seen_in=(("[THINK]",),)),
        ReasoningFormat("seed-oss", ("<seed:think>",), ("</seed:think>",), seen_in=(("seed:think",),)),
        ReasoningFormat("kimi", ("◁think▷",), ("◁/think▷",), seen_in=(("◁think▷",),)),
        ReasoningFormat(
            "granite",
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
            seen_in=(("Here is my thought process:",), ("Here's my thought process:",)),
        ),
        ReasoningFormat(
            "granite-tags",
            ("<think>",),
            ("</think>",),
            (("<response>", "</response>"),),
            seen_in=(("<response></response>",),),
        ),
        ReasoningFormat("think", ("<think>",), ("</think>",), seen_in=(("<think>",), ("</think>",))),
    )
}


def reasoning_of(template: str) -> ReasoningFormat | None:
    """The format in which the model of a chat template writes reasoning, as far as the template shows it."""
    for row in REASONING_FORMATS.values():
        if any(all(mark in template for mark in marks) for marks in row.seen_in):
            return row
    return None
