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
    CallText(
        "hermes",
        "reasoning again after a call",
        '<think>One.\n\n</think>\n<tool_call>{"name": "clock", "arguments": {}}</tool_call>\n'
        "<think>\nTwo.</think>Four.",
        calls=(("clock", "{}"),),
        reasoning="One.\nTwo.",
        content="Four.",
    ),
    CallText("hermes", "cut off in a marker", "It is\n<tool_c", content="It is\n<tool_c", is_spelled=True),
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

LLAMA4 = (
    CallText("llama4", "no call", "[1] It is warm [see](rome).", content="[1] It is warm [see](rome)."),
    CallText("llama4", "one call", '[weather(city="Rome")]', calls=(("weather", '{"city": "Rome"}'),)),
    CallText(
        "llama4",
        "two calls in markers",
        "<|python_start|>[weather(city='Rome', days=3), clock()]<|python_end|>",
        calls=(("weather", '{"city": "Rome", "days": 3}'), ("clock", "{}")),
    ),
    CallText(
        "llama4",
        "text before and after",
        "I look.\n<|python_start|>[clock()]<|python_end|> Done.",
        calls=(("clock", "{}"),),
        content="I look.\n Done.",
    ),
    CallText("llama4", "cut off in a string", '[weather(city="Ro', calls=(("weather", '{"city": "Ro'),)),
    CallText("llama4", "cut off after a call", "[clock(), wea", calls=(("clock", "{}"),), content=", wea"),
    CallText("llama4", "cut off before the end", "[clock()", calls=(("clock", "{}"),)),
    CallText(
        "llama4", "cut off in a number", "[weather(city='R', days=1", calls=(("weather", '{"city": "R", "days": 1'),)
    ),
    CallText(
        "llama4",
        "nested literals",
        "[weather(city='R', place={'a': [1, -2.5, True, None,], \"b\": {}}, exact=False, units=[])]",
        calls=(
            ("weather", '{"city": "R", "place": {"a": [1, -2.5, true, null], "b": {}}, "exact": false, "units": []}'),
        ),
    ),
    CallText(
        "llama4",
        "brackets, quotes and markers in strings",
        "[run.code(code='print(\"a)]\")\\n# it\\'s <|python_end|>\\d \\x41\\u00e9')]",
        calls=(("run.code", '{"code": "print(\\"a)]\\")\\n# it\'s <|python_end|>\\\\d A\\u00e9"}'),),
        is_spelled=True,
    ),
    CallText("llama4", "any script", "[weather(city='東京 🗼')]", calls=(("weather", '{"city": "東京 🗼"}'),)),
    CallText(
        "llama4",
        "a number that is larger than any float",
        "[weather(days=1e999, city=.1e999)]",
        calls=(("weather", '{"days": 1e999, "city": .1e999'),),
        content=")]",
    ),
    CallText("llama4", "a list of names", "[weather, clock]", content="[weather, clock]"),
    CallText("llama4", "a tool that the request does not have", "[other(a=1)]", content="[other(a=1)]"),
    CallText(
        "llama4",
        "an argument that is not a literal",
        "[weather(city=name(1))]",
        calls=(("weather", '{"city": name'),),
        content="(1))]",
    ),
)

OLMO3 = (
    CallText("olmo3", "no call", "weather(city='Rome')", content="weather(city='Rome')"),
    CallText(
        "olmo3",
        "one call",
        '<function_calls>weather(city="Rome")</function_calls>',
        calls=(("weather", '{"city": "Rome"}'),),
    ),
    CallText(
        "olmo3",
        "two calls",
        '<function_calls>\nweather(city="Rome", exact=true, days=null)\nclock()\n</function_calls>',
        calls=(("weather", '{"city": "Rome", "exact": true, "days": null}'), ("clock", "{}")),
    ),
    CallText(
        "olmo3",
        "text before and after",
        "I look.\n<function_calls>clock()</function_calls>\nDone.",
        calls=(("clock", "{}"),),
        content="I look.\n\nDone.",
    ),
    CallText(
        "olmo3",
        "cut off",
        '<function_calls>weather(city="Rome", units=["a", "b',
        calls=(("weather", '{"city": "Rome", "units": ["a", "b'),),
    ),
    CallText(
        "olmo3",
        "markers in strings",
        '<function_calls>run.code(code="f()\\n</function_calls>")</function_calls>',
        calls=(("run.code", '{"code": "f()\\n</function_calls>"}'),),
        is_spelled=True,
    ),
    CallText(
        "olmo3",
        "reasoning before",
        "<think>Hm.</think><function_calls>clock()</function_calls>",
        calls=(("clock", "{}"),),
        reasoning="Hm.",
    ),
)

QWEN3_CODER = (
    CallText("qwen3-coder", "no call", "Use <function> or x<y.", content="Use <function> or x<y."),
    CallText(
        "qwen3-coder",
        "one call",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        calls=(("weather", '{"city": "Rome"}'),),
    ),
    CallText(
        "qwen3-coder",
        "two calls",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        calls=(("weather", '{"city": "Rome", "days": 3}'), ("clock", "{}")),
    ),
    CallText(
        "qwen3-coder",
        "text before and after",
        "I look.\n<tool_call><function=clock></function></tool_call>Done.",
        calls=(("clock", "{}"),),
        content="I look.\nDone.",
    ),
    CallText(
        "qwen3-coder",
        "cut off in a string",
        "<tool_call>\n<function=weather>\n<parameter=city>\nNew\nYo",
        calls=(("weather", '{"city": "New\\nYo'),),
    ),
    CallText(
        "qwen3-coder",
        "cut off in a number",
        "<tool_call>\n<function=weather>\n<parameter=days>\n1",
        calls=(("weather", '{"days": \n1'),),
    ),
    CallText(
        "qwen3-coder",
        "values of several lines with quotes, tags and braces",
        '<tool_call>\n<function=run.code>\n<parameter=code>\n\nif a < b:\n\tprint("</function>\\n{}")\n\n</parameter>\n'
        "</function>\n</tool_call>",
        calls=(("run.code", '{"code": "\\nif a < b:\\n\\tprint(\\"</function>\\\\n{}\\")\\n"}'),),
        is_spelled=True,
    ),
    CallText(
        "qwen3-coder",
        "types of the schema",
        "<tool_call><function=weather><parameter=city>42</parameter><parameter=exact>True</parameter>"
        '<parameter=units>["a", "ä"]</parameter><parameter=place>{"b": {"c": [1.50]}}</parameter>'
        "<parameter=days>many</parameter><parameter=other>7</parameter></function></tool_call>",
        calls=(
            (
                "weather",
                '{"city": "42", "exact": true, "units": ["a", "ä"], "place": {"b": {"c": [1.50]}}, "days": "many", '
                '"other": "7"}',
            ),
        ),
    ),
    CallText(
        "qwen3-coder",
        "without the outer marker, and any script",
        "<function=weather>\n<parameter=city>\nЯлта ⛵\n</parameter>\n</function>",
        calls=(("weather", '{"city": "Ялта ⛵"}'),),
    ),
    CallText(
        "qwen3-coder",
        "text within a call",
        "<tool_call><function=weather><parameter=city>R</parameter>then</function></tool_call>",
        calls=(("weather", '{"city": "R"}'),),
        content="then",
    ),
    CallText(
        "qwen3-coder",
        "a call without its end",
        "<tool_call><function=weather><parameter=city>R</parameter>\n<tool_call><function=clock></function></tool_call>",
        calls=(("weather", '{"city": "R"}'), ("clock", "{}")),
    ),
    CallText(
        "qwen3-coder",
        "reasoning before",
        "<think>\nHm.\n</think>\n\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        calls=(("clock", "{}"),),
        reasoning="Hm.",
    ),
)

SEED_OSS = tuple(
    CallText(
        "seed-oss",
        title,
        text,
        calls=calls,
        content=content,
        reasoning=reasoning,
        reasoning_format="seed-oss",
    )
    for title, text, calls, content, reasoning in (
        ("no call", "Warm.", (), "Warm.", ""),
        (
            "one call",
            "<seed:tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n</function>\n</seed:tool_call>",
            (("weather", '{"city": "Rome"}'),),
            "",
            "",
        ),
        (
            "two calls",
            "<seed:tool_call>\n<function=clock>\n</function>\n</seed:tool_call>"
            "<seed:tool_call>\n<function=clock>\n</function>\n</seed:tool_call>",
            (("clock", "{}"), ("clock", "{}")),
            "",
            "",
        ),
        (
            "reasoning before, text after",
            "<seed:think>Hm.</seed:think>\n<seed:tool_call><function=clock></function></seed:tool_call>Ok.",
            (("clock", "{}"),),
            "Ok.",
            "Hm.",
        ),
        ("cut off", "<seed:tool_call><function=weather><parameter=city>Ro", (("weather", '{"city": "Ro'),), "", ""),
        ("no tool", "<seed:tool_call>weather</seed:tool_call>", (), "<seed:tool_call>weather</seed:tool_call>", ""),
    )
)

MINIMAX_M2 = tuple(
    CallText("minimax-m2", title, text, calls=calls, content=content, reasoning=reasoning)
    for title, text, calls, content, reasoning in (
        ("no call", "Warm.", (), "Warm.", ""),
        (
            "one call",
            '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n'
            '<parameter name="units">["a"]</parameter>\n</invoke>\n</minimax:tool_call>',
            (("weather", '{"city": "Rome", "units": ["a"]}'),),
            "",
            "",
        ),
        (
            "two calls in one section",
            '<minimax:tool_call>\n<invoke name="clock">\n</invoke>\n<invoke name="clock">\n</invoke>\n'
            "</minimax:tool_call>",
            (("clock", "{}"), ("clock", "{}")),
            "",
            "",
        ),
        (
            "reasoning before, text after",
            '<think>Hm.</think>\nI look.<minimax:tool_call><invoke name="clock"></invoke></minimax:tool_call>Ok.',
            (("clock", "{}"),),
            "I look.Ok.",
            "Hm.",
        ),
        (
            "cut off",
            '<minimax:tool_call><invoke name="weather"><parameter name="city">Ro',
            (("weather", '{"city": "Ro'),),
            "",
            "",
        ),
        ("no tool", "<minimax:tool_call>a</minimax:tool_call>", (), "<minimax:tool_call>a</minimax:tool_call>", ""),
    )
)

GLM45 = (
    CallText("glm45", "no call", "It is warm.", content="It is warm."),
    CallText(
        "glm45",
        "one call",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
        calls=(("weather", '{"city": "Rome"}'),),
    ),
    CallText(
        "glm45",
        "two calls",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call>\n<tool_call>clock</tool_call>",
        calls=(("weather", '{"city": "Rome", "days": 3}'), ("clock", "{}")),
    ),
    CallText(
        "glm45",
        "text before and after",
        "I look.\n<tool_call>clock\n</tool_call>\nDone.",
        calls=(("clock", "{}"),),
        content="I look.\n\nDone.",
    ),
    CallText(
        "glm45",
        "cut off",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ro",
        calls=(("weather", '{"city": "Ro'),),
    ),
    CallText(
        "glm45",
        "values with tags, braces and line breaks",
        '<tool_call>run.code\n<arg_key>code</arg_key>\n<arg_value>\n{"a": "</tool_call>"}\n</arg_value>\n</tool_call>',
        calls=(("run.code", '{"code": "\\n{\\"a\\": \\"</tool_call>\\"}\\n"}'),),
        is_spelled=True,
    ),
    CallText(
        "glm45",
        "nested values and any script",
        '<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>{"é": [{}, 1]}</arg_value>\n'
        "<arg_key>city</arg_key>\n<arg_value>Łódź</arg_value>\n</tool_call>",
        calls=(("weather", '{"place": {"é": [{}, 1]}, "city": "Łódź"}'),),
    ),
    CallText(
        "glm45",
        "reasoning before",
        "\n<think>Hm.</think>\n<tool_call>clock\n</tool_call>",
        calls=(("clock", "{}"),),
        reasoning="Hm.",
    ),
    CallText("glm45", "no tool", "<tool_call>what is it</tool_call>", content="<tool_call>what is it</tool_call>"),
)

MISTRAL_LIST = (
    CallText("mistral-list", "no call", "It is [warm].", content="It is [warm]."),
    CallText(
        "mistral-list",
        "one call",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]',
        calls=(("weather", '{"city": "Rome"}'),),
    ),
    CallText(
        "mistral-list",
        "two calls with ids",
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}, "id": "AbC123xyz"}, '
        '{"id": "012345678", "name": "clock", "arguments": {}}]',
        calls=(("weather", '{"city": "Rome"}'), ("clock", "{}")),
        ids=(None, "012345678"),
    ),
    CallText(
        "mistral-list",
        "text before and after",
        'I look.[TOOL_CALLS][{"name": "clock", "arguments": {}}] Done.',
        calls=(("clock", "{}"),),
        content="I look. Done.",
    ),
    CallText(
        "mistral-list",
        "cut off in the second call",
        '[TOOL_CALLS][{"name": "clock", "arguments": {}}, {"name": "weather", "arguments": {"ci',
        calls=(("clock", "{}"), ("weather", '{"ci')),
    ),
    CallText(
        "mistral-list",
        "cut off after a comma",
        '[TOOL_CALLS][{"name": "clock", "arguments": {}}, ',
        calls=(("clock", "{}"),),
    ),
    CallText(
        "mistral-list",
        "brackets and markers in strings",
        '[TOOL_CALLS][{"name": "run.code", "arguments": {"code": "}}]\\"[TOOL_CALLS][{"}}]',
        calls=(("run.code", '{"code": "}}]\\"[TOOL_CALLS][{"}'),),
        is_spelled=True,
    ),
    CallText(
        "mistral-list",
        "reasoning before",
        '[THINK]Hm.[/THINK][TOOL_CALLS][{"name": "weather", "arguments": {"city": "Œuf"}}]',
        calls=(("weather", '{"city": "Œuf"}'),),
        reasoning="Hm.",
        reasoning_format="mistral",
    ),
    CallText("mistral-list", "an empty list", "[TOOL_CALLS][]", content="[TOOL_CALLS][]"),
)

MISTRAL_ARGS = (
    CallText("mistral-args", "no call", "It is [ARGS].", content="It is [ARGS].", is_spelled=True),
    CallText(
        "mistral-args",
        "one call",
        '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
        calls=(("weather", '{"city": "Rome"}'),),
    ),
    CallText(
        "mistral-args",
        "two calls, one with an id",
        '[TOOL_CALLS]weather[CALL_ID]AbC123xyz[ARGS]{"city": "Rome"}[TOOL_CALLS]clock{}',
        calls=(("weather", '{"city": "Rome"}'), ("clock", "{}")),
        ids=("AbC123xyz", None),
    ),
    CallText(
        "mistral-args",
        "text before and after",
        "I look.[TOOL_CALLS]clock[ARGS]{}Done.",
        calls=(("clock", "{}"),),
        content="I look.Done.",
    ),
    CallText("mistral-args", "cut off", '[TOOL_CALLS]weather[ARGS]{"city": ', calls=(("weather", '{"city": '),)),
    CallText("mistral-args", "cut off in the name", "[TOOL_CALLS]weath", content="[TOOL_CALLS]weath"),
    CallText(
        "mistral-args",
        "braces and markers in strings",
        '[TOOL_CALLS]run.code[ARGS]{"code": "}[TOOL_CALLS]clock[ARGS]{}"}',
        calls=(("run.code", '{"code": "}[TOOL_CALLS]clock[ARGS]{}"}'),),
        is_spelled=True,
    ),
    CallText(
        "mistral-args",
        "reasoning before",
        '[THINK]Hm.\n[/THINK][TOOL_CALLS]weather[ARGS]{"city": "Œuf"}',
        calls=(("weather", '{"city": "Œuf"}'),),
        reasoning="Hm.",
        reasoning_format="mistral",
    ),
)

_V3 = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_SECTION, _CALL, _SEP, _END, _SECTION_END = _V3

DEEPSEEK_V3 = tuple(
    CallText("deepseek-v3", title, text, calls=calls, content=content, reasoning=reasoning, is_spelled=is_spelled)
    for title, text, calls, content, reasoning, is_spelled in (
        ("no call", "```json\n{}\n```", (), "```json\n{}\n```", "", False),
        (
            "one call",
            f'{_SECTION}{_CALL}function{_SEP}weather\n```json\n{{"city": "Rome"}}\n```{_END}{_SECTION_END}',
            (("weather", '{"city": "Rome"}'),),
            "",
            "",
            False,
        ),
        (
            "two calls",
            f'{_SECTION}{_CALL}function{_SEP}weather\n```json\n{{"city": "Rome"}}\n```{_END}\n'
            f"{_CALL}function{_SEP}clock\n```json\n{{}}\n```{_END}{_SECTION_END}",
            (("weather", '{"city": "Rome"}'), ("clock", "{}")),
            "",
            "",
            False,
        ),
        (
            "text before and after",
            f"I look.{_SECTION}{_CALL}function{_SEP}clock\n```json\n{{}}\n```{_END}{_SECTION_END}Done.",
            (("clock", "{}"),),
            "I look.Done.",
            "",
            False,
        ),
        (
            "cut off",
            f'{_SECTION}{_CALL}function{_SEP}weather\n```json\n{{"city": "Ro',
            (("weather", '{"city": "Ro'),),
            "",
            "",
            False,
        ),
        (
            "fences and markers in strings",
            f'{_SECTION}{_CALL}function{_SEP}run.code\n```json\n{{"code": "```{_END}\\"}}"}}\n```{_END}{_SECTION_END}',
            (("run.code", f'{{"code": "```{_END}\\"}}"}}'),),
            "",
            "",
            True,
        ),
        (
            "reasoning before",
            f'<think>\nHm.\n</think>\n\n{_SECTION}{_CALL}function{_SEP}weather\n```json\n{{"city": "İz"}}\n```{_END}',
            (("weather", '{"city": "İz"}'),),
            "",
            "Hm.",
            False,
        ),
    )
)

DEEPSEEK_V31 = tuple(
    CallText("deepseek-v31", title, text, calls=calls, content=content, reasoning=reasoning, is_spelled=is_spelled)
    for title, text, calls, content, reasoning, is_spelled in (
        ("no call", "It is warm.", (), "It is warm.", "", False),
        (
            "one call",
            f'{_SECTION}{_CALL}weather{_SEP}{{"city": "Rome"}}{_END}{_SECTION_END}',
            (("weather", '{"city": "Rome"}'),),
            "",
            "",
            False,
        ),
        (
            "two calls",
            f'{_SECTION}{_CALL}weather{_SEP}{{"city": "Rome"}}{_END}{_CALL}clock{_SEP}{{}}{_END}{_SECTION_END}',
            (("weather", '{"city": "Rome"}'), ("clock", "{}")),
            "",
            "",
            False,
        ),
        (
            "text before and after",
            f"I look.{_SECTION}{_CALL}clock{_SEP}{{}}{_END}{_SECTION_END}Done.",
            (("clock", "{}"),),
            "I look.Done.",
            "",
            False,
        ),
        ("cut off", f'{_SECTION}{_CALL}weather{_SEP}{{"city"', (("weather", '{"city"'),), "", "", False),
        (
            "markers in strings",
            f'{_SECTION}{_CALL}run.code{_SEP}{{"code": "{_END}{_SECTION_END}"}}{_END}{_SECTION_END}',
            (("run.code", f'{{"code": "{_END}{_SECTION_END}"}}'),),
            "",
            "",
            True,
        ),
        (
            "arguments that are not JSON, then a call",
            f"{_SECTION}{_CALL}weather{_SEP}{{Rome}}{_END}{_CALL}clock{_SEP}{{}}{_END}{_SECTION_END}",
            (("weather", "{Rome}"), ("clock", "{}")),
            "",
            "",
            False,
        ),
        (
            "no arguments",
            f"{_SECTION}{_CALL}weather{_SEP}{_END}",
            (("weather", "{}"),),
            "",
            "",
            False,
        ),
    )
)

_K2 = "<|tool_calls_section_begin|>"

KIMI_K2 = tuple(
    CallText(
        "kimi-k2",
        title,
        text,
        calls=calls,
        ids=ids,
        content=content,
        reasoning=reasoning,
        is_spelled=title.startswith("markers"),
    )
    for title, text, calls, ids, content, reasoning in (
        ("no call", "functions.weather:0", (), (), "functions.weather:0", ""),
        (
            "one call",
            f'{_K2}<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{{"city": "Rome"}}'
            "<|tool_call_end|><|tool_calls_section_end|>",
            (("weather", '{"city": "Rome"}'),),
            ("functions.weather:0",),
            "",
            "",
        ),
        (
            "two calls",
            f'{_K2}<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{{"city": "Rome"}}'
            "<|tool_call_end|><|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>",
            (("weather", '{"city": "Rome"}'), ("clock", "{}")),
            ("functions.weather:0", "functions.clock:1"),
            "",
            "",
        ),
        (
            "an id that is written twice",
            f"{_K2}<|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
            "<|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>",
            (("clock", "{}"), ("clock", "{}")),
            ("functions.clock:0", None),
            "",
            "",
        ),
        (
            "text before and after",
            f"I look.{_K2}<|tool_call_begin|>functions.run.code:12<|tool_call_argument_begin|>{{}}"
            "<|tool_call_end|><|tool_calls_section_end|>Done.",
            (("run.code", "{}"),),
            ("functions.run.code:12",),
            "I look.Done.",
            "",
        ),
        (
            "cut off",
            f'{_K2}<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{{"city": "Ro',
            (("weather", '{"city": "Ro'),),
            ("functions.weather:0",),
            "",
            "",
        ),
        (
            "markers in strings",
            f'{_K2}<|tool_call_begin|>functions.run.code:0<|tool_call_argument_begin|>{{"code": "<|tool_call_end|>"}}'
            "<|tool_call_end|><|tool_calls_section_end|>",
            (("run.code", '{"code": "<|tool_call_end|>"}'),),
            ("functions.run.code:0",),
            "",
            "",
        ),
        (
            "a call within reasoning ends it",
            f"<think>Hm.{_K2}<|tool_call_begin|>functions.clock:3<|tool_call_argument_begin|>{{}}<|tool_call_end|>",
            (("clock", "{}"),),
            ("functions.clock:3",),
            "",
            "Hm.",
        ),
    )
)

PHI4_MINI = tuple(
    CallText("phi4-mini", title, text, calls=calls, content=content, is_spelled=title.startswith("markers"))
    for title, text, calls, content in (
        ("no call", "The functools module.", (), "The functools module."),
        (
            "one call",
            '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}]<|/tool_call|>',
            (("weather", '{"city": "Rome"}'),),
            "",
        ),
        (
            "two calls",
            'functools[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "clock", "arguments": {}}]',
            (("weather", '{"city": "Rome"}'), ("clock", "{}")),
            "",
        ),
        (
            "text before and after",
            'I look.<|tool_call|>[{"name": "clock", "parameters": {}}]<|/tool_call|>Done.',
            (("clock", "{}"),),
            "I look.Done.",
        ),
        ("cut off", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Ro', (("weather", '{"city": "Ro'),), ""),
        (
            "markers in strings",
            '<|tool_call|>[{"name": "run.code", "arguments": {"code": "]}<|/tool_call|>functools"}}]<|/tool_call|>',
            (("run.code", '{"code": "]}<|/tool_call|>functools"}'),),
            "",
        ),
        (
            "one object without a list",
            '<|tool_call|>{"name": "weather", "arguments": {"city": "São Tomé"}}<|/tool_call|>',
            (("weather", '{"city": "São Tomé"}'),),
            "",
        ),
    )
)

GRANITE = tuple(
    CallText(
        "granite",
        title,
        text,
        calls=calls,
        content=content,
        reasoning=reasoning,
        is_spelled=title.startswith("markers"),
        reasoning_format="granite",
    )
    for title, text, calls, content, reasoning in (
        ("no call", "Here is my answer.", (), "Here is my answer.", ""),
        (
            "one call",
            '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}]',
            (("weather", '{"city": "Rome"}'),),
            "",
            "",
        ),
        (
            "two calls",
            '<tool_call> [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "clock", "arguments": {}}]',
            (("weather", '{"city": "Rome"}'), ("clock", "{}")),
            "",
            "",
        ),
        (
            "text before and after",
            'I look.<|tool_call|>[{"name": "clock", "arguments": {}}]\nDone.',
            (("clock", "{}"),),
            "I look.\nDone.",
            "",
        ),
        ("cut off", '<|tool_call|>[{"name": "weather", "arguments": {"city"', (("weather", '{"city"'),), "", ""),
        (
            "markers in strings",
            '<|tool_call|>[{"name": "run.code", "arguments": {"code": "}]<|tool_call|>[{"}}]',
            (("run.code", '{"code": "}]<|tool_call|>[{"}'),),
            "",
            "",
        ),
        (
            "reasoning",
            "Here is my thought process:\n\nHere we go.\n\nHere's my response:\nIt is warm.",
            (),
            "It is warm.",
            "Here we go.",
        ),
    )
)

COMMAND = tuple(
    CallText(
        "command",
        title,
        text,
        calls=calls,
        ids=ids,
        content=content,
        reasoning=reasoning,
        is_spelled=title.startswith("markers"),
        reasoning_format="command",
    )
    for title, text, calls, ids, content, reasoning in (
        ("no call", "<|START_RESPONSE|>It is warm.<|END_RESPONSE|>", (), (), "It is warm.", ""),
        (
            "one call",
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Rome"}}\n]'
            "<|END_ACTION|>",
            (("weather", '{"city": "Rome"}'),),
            ("0",),
            "",
            "",
        ),
        (
            "two calls after reasoning",
            "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n"
            '    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Rome"}},\n'
            '    {"tool_call_id": "1", "tool_name": "clock", "parameters": {}}\n]<|END_ACTION|>',
            (("weather", '{"city": "Rome"}'), ("clock", "{}")),
            ("0", "1"),
            "",
            "Hm.",
        ),
        (
            "text before and after",
            'I look.<|START_ACTION|>[{"tool_name": "clock", "parameters": {}}]<|END_ACTION|>Done.',
            (("clock", "{}"),),
            (),
            "I look.Done.",
            "",
        ),
        (
            "cut off",
            '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Ro',
            (("weather", '{"city": "Ro'),),
            ("0",),
            "",
            "",
        ),
        (
            "markers in strings",
            '<|START_ACTION|>[{"tool_name": "run.code", "parameters": {"code": "}]<|END_ACTION|>"}}]<|END_ACTION|>',
            (("run.code", '{"code": "}]<|END_ACTION|>"}'),),
            (),
            "",
            "",
        ),
        (
            "reasoning and an answer",
            "<|START_THINKING|>Hm 雨.\n<|END_THINKING|>\n<|START_TEXT|>Warm.<|END_TEXT|>",
            (),
            (),
            "Warm.",
            "Hm 雨.",
        ),
    )
)

HARMONY = tuple(
    CallText(
        "harmony",
        title,
        text,
        calls=calls,
        content=content,
        reasoning=reasoning,
        is_spelled=title.startswith("markers"),
        reasoning_format="harmony",
    )
    for title, text, calls, content, reasoning in (
        ("no call", "<|channel|>final<|message|>It is warm.<|return|>", (), "It is warm.", ""),
        (
            "one call after reasoning",
            "<|channel|>analysis<|message|>Use the tool.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>',
            (("weather", '{"city": "Rome"}'),),
            "",
            "Use the tool.",
        ),
        (
            "two calls, with recipients before and after the channel",
            "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
            '{"city": "Rome"}<|call|><|start|>assistant<|channel|>commentary to=functions.clock <|constrain|>json'
            "<|message|>{}<|call|>",
            (("weather", '{"city": "Rome"}'), ("clock", "{}")),
            "",
            "",
        ),
        (
            "text before a call",
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.clock "
            "<|constrain|>json<|message|>{}<|call|>",
            (("clock", "{}"),),
            "I look.",
            "",
        ),
        (
            "reasoning and an answer, twice",
            "<|channel|>analysis<|message|>One.\n<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
            "<|start|>assistant<|channel|>commentary<|message|>A.<|end|><|start|>assistant<|channel|>final<|message|>B.",
            (),
            "A.\nB.",
            "One.\nTwo.",
        ),
        (
            "cut off",
            '<|channel|>commentary to=functions.weather<|message|>{"city": "Ro',
            (("weather", '{"city": "Ro'),),
            "",
            "",
        ),
        (
            "cut off in a header",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>fin",
            (),
            "<|start|>assistant<|channel|>fin",
            "Hm.",
        ),
        (
            "markers in strings",
            '<|channel|>commentary to=functions.run.code<|message|>{"code": "<|call|>é}"}<|call|>',
            (("run.code", '{"code": "<|call|>é}"}'),),
            "",
            "",
        ),
        (
            "arguments that are not JSON",
            "<|channel|>commentary to=functions.run.code code<|message|>print(1)<|call|>",
            (("run.code", "print(1)"),),
            "",
            "",
        ),
        (
            "a recipient without its first word",
            "<|channel|>commentary to=clock<|message|>{}<|call|>",
            (("clock", "{}"),),
            "",
            "",
        ),
        (
            "a tool that is not a function",
            "<|channel|>analysis to=python code<|message|>1 + 1<|call|>",
            (),
            "",
            "1 + 1",
        ),
        ("white space", " \n", (), " \n", ""),
        ("plain text", "It is <warm>.", (), "It is <warm>.", ""),
    )
)

LFM2 = tuple(
    CallText("lfm2", title, text, calls=calls, content=content, is_spelled=title.startswith("markers"))
    for title, text, calls, content in (
        ("no call", "[weather(city='Rome')]", (), "[weather(city='Rome')]"),
        (
            "one call",
            "<|tool_call_start|>[weather(city='Rome')]<|tool_call_end|>",
            (("weather", '{"city": "Rome"}'),),
            "",
        ),
        (
            "two calls",
            '<|tool_call_start|>[weather(city="Rome", days=2), clock()]<|tool_call_end|>',
            (("weather", '{"city": "Rome", "days": 2}'), ("clock", "{}")),
            "",
        ),
        (
            "text before and after",
            "I look.<|tool_call_start|>[clock()]<|tool_call_end|>Done.",
            (("clock", "{}"),),
            "I look.Done.",
        ),
        ("cut off", '<|tool_call_start|>[weather(city="Ro', (("weather", '{"city": "Ro'),), ""),
        (
            "markers in strings",
            '<|tool_call_start|>[run.code(code="<|tool_call_end|>)]")]<|tool_call_end|>',
            (("run.code", '{"code": "<|tool_call_end|>)]"}'),),
            "",
        ),
        (
            "a tool that the request does not have",
            '<|tool_call_start|>[other(a="ñ")]<|tool_call_end|>',
            (("other", '{"a": "ñ"}'),),
            "",
        ),
    )
)

NEMOTRON_V2 = tuple(
    CallText(
        "nemotron-v2", title, text, calls=calls, content=content, reasoning=reasoning, is_spelled=title == "markers"
    )
    for title, text, calls, content, reasoning in (
        ("no call", "Warm.", (), "Warm.", ""),
        (
            "one call",
            '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Rome"}}]</TOOLCALL>',
            (("weather", '{"city": "Rome"}'),),
            "",
            "",
        ),
        (
            "two calls",
            '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "clock", "arguments": {}}]'
            "</TOOLCALL>",
            (("weather", '{"city": "Rome"}'), ("clock", "{}")),
            "",
            "",
        ),
        (
            "reasoning before, text after",
            '<think>\nHm.\n</think>\n\n<TOOLCALL>[{"name": "clock", "arguments": {}}]</TOOLCALL>\nDone.',
            (("clock", "{}"),),
            "\nDone.",
            "Hm.",
        ),
        ("cut off", '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Ro', (("weather", '{"city": "Ro'),), "", ""),
        (
            "markers",
            '<TOOLCALL>[{"name": "run.code", "arguments": {"code": "]</TOOLCALL>ü"}}]</TOOLCALL>',
            (("run.code", '{"code": "]</TOOLCALL>ü"}'),),
            "",
            "",
        ),
    )
)

CALL_TEXTS = (
    *HERMES,
    *LLAMA3,
    *LLAMA4,
    *OLMO3,
    *QWEN3_CODER,
    *SEED_OSS,
    *MINIMAX_M2,
    *GLM45,
    *MISTRAL_LIST,
    *MISTRAL_ARGS,
    *DEEPSEEK_V3,
    *DEEPSEEK_V31,
    *KIMI_K2,
    *PHI4_MINI,
    *GRANITE,
    *COMMAND,
    *HARMONY,
    *LFM2,
    *NEMOTRON_V2,
)
