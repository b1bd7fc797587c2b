"""Texts of models in each format of calls, and what they consist of. Imports nothing of this repository, so that other
servers' readers can be given the same texts.
"""

from dataclasses import dataclass

# The tools of every request, with the schemas of their arguments.
TOOLS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "units": {"type": "array", "items": {"type": "string"}},
            "place": {"type": "object"},
        },
        "required": ["city"],
    },
    "clock": {"type": "object", "properties": {}},
    "run.code": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
}


@dataclass(frozen=True, slots=True)
class CallText:
    format: str
    title: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()  # (name, arguments as JSON text)
    content: str = ""
    reasoning: str = ""
    ids: tuple[str | None, ...] = ()  # as the model has written them
    is_spelled: bool = False  # whether other text contains markers, or parts of them
    prompt: str = ""  # the end of the rendered prompt
    reasoning_format: str = "think"

    @property
    def label(self) -> str:
        return f"{self.format}: {self.title}"


HERMES = (
    CallText("hermes", "no call", "It is <b>warm</b> {in} [Rome].", content="It is <b>warm</b> {in} [Rome]."),
    CallText(
        "hermes",
        "one call",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        calls=(("weather", '{"city": "Rome"}'),),
    ),
    CallText(
        "hermes",
        "two calls",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
        calls=(("weather", '{"city": "Rome"}'), ("clock", "{}")),
    ),
    CallText(
        "hermes",
        "text before and after",
        'Let me see.\n\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\nDone.',
        calls=(("clock", "{}"),),
        content="Let me see.\n\n\nDone.",
    ),
    CallText(
        "hermes",
        "cut off in a string",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro',
        calls=(("weather", '{"city": "Ro'),),
    ),
    CallText(
        "hermes",
        "cut off in the end marker",
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_c',
        calls=(("clock", "{}"),),
        is_spelled=True,
    ),
    CallText("hermes", "cut off in the name", '<tool_call>\n{"name": "wea', content='<tool_call>\n{"name": "wea'),
    CallText(
        "hermes",
        "markers and braces in strings",
        '<tool_call>\n{"name": "run.code", '
        '"arguments": {"code": "}}</tool_call>\\n<tool_call>{\\"[\\\\"}}\n</tool_call>',
        calls=(("run.code", '{"code": "}}</tool_call>\\n<tool_call>{\\"[\\\\"}'),),
        is_spelled=True,
    ),
    CallText(
        "hermes",
        "nested values",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "R", "days": -1.5e3, "exact": true, '
        '"place": {"a": [[], {}, [null, "x"]]}}}\n</tool_call>',
        calls=(("weather", '{"city": "R", "days": -1.5e3, "exact": true, "place": {"a": [[], {}, [null, "x"]]}}'),),
    ),
    CallText(
        "hermes",
        "any script",
        "天気は？\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Zürich 🏔", "units": ["\\u00e9\\ud83d\\ude00"]}}\n</tool_call>',
        calls=(("weather", '{"city": "Zürich 🏔", "units": ["\\u00e9\\ud83d\\ude00"]}'),),
        content="天気は？\n",
    ),
    CallText(
        "hermes",
        "reasoning before",
        '<think>\nRome is in Italy.\n\n{x}\n</think>\n\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
        calls=(("clock", "{}"),),
        reasoning="Rome is in Italy.\n\n{x}",
    ),
    CallText(
        "hermes",
        "reasoning that the prompt opens",
        "Easy.\n</think>\n\nIt is four.",
        content="It is four.",
        reasoning="Easy.",
        prompt="<|im_start|>assistant\n<think>\n",
    ),
    CallText(
        "hermes",
        "a call within reasoning ends it",
        '<think>I need <tool_call> here.\n<tool_call>{"name": "clock", "arguments": {}}</tool_call>\n</think>\nWait.',
        calls=(("clock", "{}"),),
        reasoning="I need <tool_call> here.",
        content="\nWait.",
    ),
    CallText(
        "hermes",
        "arguments before the name, and an identifier",
        '<tool_call>{"arguments": {"city": "Rome"}, "id": "a1", "name": "weather"}</tool_call>',
        calls=(("weather", '{"city": "Rome"}'),),
        ids=("a1",),
    ),
    CallText(
        "hermes",
        "arguments in a string, and none",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>'
        '<tool_call>{"name": "clock"}</tool_call><tool_call>{"name": "clock", "arguments": null}</tool_call>',
        calls=(("weather", '{"city": "Rome"}'), ("clock", "{}"), ("clock", "{}")),
    ),
    CallText(
        "hermes",
        "a line break in a string",
        '<tool_call>{"name": "run.code", "arguments": {"code": "a\n\tb"}}</tool_call>',
        calls=(("run.code", '{"code": "a\\n\\tb"}'),),
    ),
    CallText(
        "hermes",
        "arguments that are not JSON, then a call",
        '<tool_call>{"name": "weather", "arguments": {"city": Rome}}\n</tool_call>'
        '<tool_call>{"name": "clock", "arguments": {}}</tool_call>',
        calls=(("weather", '{"city": Rome}}\n'), ("clock", "{}")),
    ),
    CallText(
        "hermes",
        "what looks like calls",
        '<tool_call>no</tool_call><tool_call>{"name": 5}</tool_call><tool_call>{"name": "a", "arguments": [1]}',
        content='<tool_call>no</tool_call><tool_call>{"name": 5}</tool_call><tool_call>{"name": "a", "arguments": [1]}',
    ),
    CallText(
        "hermes",
        "a tool that the request does not have",
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        calls=(("other", "{}"),),
    ),
    CallText(
        "hermes",
        "a marker of reasoning in the answer",
        "Models write <think> and </think>.\n<think>",
        content="Models write <think> and </think>.\n<think>",
        is_spelled=True,
    ),
)

LLAMA3 = (
    CallText("llama3", "no call", 'It is {"warm"}; {"name": 1}.', content='It is {"warm"}; {"name": 1}.'),
    CallText(
        "llama3",
        "one call",
        '{"name": "weather", "parameters": {"city": "Rome"}}',
        calls=(("weather", '{"city": "Rome"}'),),
    ),
    CallText(
        "llama3",
        "two calls",
        '{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "clock", "parameters": {}}',
        calls=(("weather", '{"city": "Rome"}'), ("clock", "{}")),
    ),
    CallText(
        "llama3",
        "after the marker, with a type",
        '<|python_tag|>{"type": "function", "name": "clock", "parameters": {}}',
        calls=(("clock", "{}"),),
    ),
    CallText(
        "llama3",
        "text before and after",
        'I look.\n<|python_tag|>{"name": "clock", "parameters": {}}; then {"name": "clock"}',
        calls=(("clock", "{}"),),
        content='I look.\n; then {"name": "clock"}',
    ),
    CallText(
        "llama3",
        "cut off",
        '{"name": "weather", "parameters": {"city": "Rome", "days"',
        calls=(("weather", '{"city": "Rome", "days"'),),
    ),
    CallText(
        "llama3",
        "markers and braces in strings",
        '\n{"name": "run.code", "parameters": {"code": "};<|python_tag|>{\\"name\\": \\"clock\\"}"}}',
        calls=(("run.code", '{"code": "};<|python_tag|>{\\"name\\": \\"clock\\"}"}'),),
        is_spelled=True,
    ),
    CallText(
        "llama3",
        "any script",
        '{"name": "weather", "parameters": {"city": "Αθήνα 🌊"}}',
        calls=(("weather", '{"city": "Αθήνα 🌊"}'),),
    ),
    CallText(
        "llama3",
        "an answer in JSON",
        '{"name": "Anna", "parameters": {"age": 3}}',
        content='{"name": "Anna", "parameters": {"age": 3}}',
    ),
    CallText("llama3", "an answer of one name", '{"name": "clock"}', content='{"name": "clock"}'),
    CallText("llama3", "an answer in other JSON", '{"city": "Rome"}', content='{"city": "Rome"}'),
    CallText("llama3", "code after the marker", "<|python_tag|>print(1)", content="<|python_tag|>print(1)"),
)

CALL_TEXTS = (*HERMES, *LLAMA3)
