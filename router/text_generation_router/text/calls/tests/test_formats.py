"""Formats are found by the markers in chat templates, or chosen by a flag."""

import pytest

from text_generation_common.flags.kinds import ReasoningStyle, ToolCallFormat
from text_generation_router.text.calls.formats import CALL_FORMATS, Body, format_of
from text_generation_router.text.calls.reading import Reading, reading_of
from text_generation_router.text.calls.reasoning import REASONING_FORMATS, reasoning_of

# Lines as the templates of these models have them.
TEMPLATES = {
    "command": "{{ '<|START_THINKING|>' }}<|START_ACTION|>[{{ call }}]<|END_ACTION|>",
    "deepseek-v3": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json\\n'",
    "deepseek-v31": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments",
    "glm45": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>",
    "granite": "'<|tool_call|>' followed by a JSON list of tools",
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{{ arguments }}",
    "hermes": '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>',
    "kimi-k2": "<|tool_calls_section_begin|>{{ '<|tool_call_begin|>' + id }}<|tool_call_argument_begin|>",
    "llama3": '{{- \'{"name": function name, "parameters": dictionary of argument name and its value}\' }}',
    "llama4": "<|python_start|>{{ content }}<|python_end|>",
    "minimax-m2": "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}<invoke name=\"tool-name-1\">",
    "mistral-args": "'[TOOL_CALLS]' + name + '[ARGS]' + arguments",
    "mistral-list": '{{- "[TOOL_CALLS][" }}{{ tool_call|tojson }}]',
    "olmo3": "<function_calls>{{ message['function_calls'] }}</function_calls>",
    "phi4-mini": "'<|' + role + '|>' + content + '<|tool|>' + tools + '<|/tool|>'",
    "qwen3-coder": "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\n",
    "seed-oss": "{%- set toolcall_begin_token = '<seed:tool_call>' %}<function=example_function_name>",
}


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_template_shows_its_format(name: str) -> None:
    found = format_of(TEMPLATES[name])
    assert found is not None and found.name == name


def test_a_template_without_markers_shows_none() -> None:
    functionary = "<|python_tag|><function=example_function_name>{{ arguments }}</function>"
    for template in (
        "",
        functionary,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}",
    ):
        assert format_of(template) is None
        assert reasoning_of(template) is None


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ content.split('</think>')[-1] }}", "think"),
        ("[THINK]{{ thinking }}[/THINK]", "mistral"),
        ("<|channel|>analysis<|message|>", "harmony"),
        ("'<|START_THINKING|>'", "command"),
        ("<seed:think>", "seed-oss"),
        ("◁think▷", "kimi"),
        ("after 'Here is my thought process:' and 'Here is my response:'", "granite"),
        ("<think></think> and <response></response>", "granite-tags"),
        ("<|channel>thought\n<channel|>", "gemma4"),
    ],
)
def test_a_template_shows_its_reasoning(template: str, name: str) -> None:
    found = reasoning_of(template)
    assert found is not None and found.name == name


def test_flags_choose_among_all_formats() -> None:
    assert {*CALL_FORMATS, "auto", "none"} == set(ToolCallFormat)
    assert {*REASONING_FORMATS, "auto", "none"} == set(ReasoningStyle)


def chosen(reading: Reading) -> tuple[str | None, str | None]:
    return reading.calls and reading.calls.name, reading.reasoning and reading.reasoning.name


def test_a_flag_goes_before_the_template() -> None:
    template = TEMPLATES["hermes"] + "<think>"
    auto = (ToolCallFormat.auto, ReasoningStyle.auto)
    none = (ToolCallFormat.none, ReasoningStyle.none)
    other = (ToolCallFormat.llama3, ReasoningStyle.mistral)
    assert chosen(reading_of(template, *auto, frozenset())) == ("hermes", "think")
    assert chosen(reading_of(template, *none, frozenset())) == (None, None)
    assert chosen(reading_of(template, *other, frozenset())) == ("llama3", "mistral")
    assert chosen(reading_of(None, *auto, frozenset())) == (None, None)


def test_each_kind_of_body_has_a_format() -> None:
    assert {row.body for row in CALL_FORMATS.values()} == set(Body)
