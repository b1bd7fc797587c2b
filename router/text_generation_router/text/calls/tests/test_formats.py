"""Formats are found by the markers in chat templates, or chosen by a flag."""

import pytest

from text_generation_common.flags.kinds import ReasoningStyle, ToolCallFormat
from text_generation_router.text.calls.formats import CALL_FORMATS, REASONING_FORMATS, BodyKind, format_of, reasoning_of
from text_generation_router.text.calls.reading import Reading, reading_of
from text_generation_router.text.tests.fetch_templates import FOLDER

# Real templates, which `make fetch-templates` fetches: their formats of calls and of reasoning.
REAL = {
    "ByteDance-Seed-OSS": ("seed-oss", "seed-oss"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("command", "command"),
    "GLM-4.6": ("glm45", "think"),
    "Kimi-K2-Instruct": ("kimi-k2", None),
    "Kimi-K2-Thinking": ("kimi-k2", "think"),
    "LFM2-8B-A1B": ("lfm2", None),
    "MiniMax-M2": ("minimax-m2", "think"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral-args", None),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3-coder", "think"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron-v2", "think"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-QwQ-32B": ("hermes", "think"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen3-Coder": ("qwen3-coder", None),
    "Qwen3.5-4B": ("qwen3-coder", "think"),
    "StepFun3.5-Flash": ("qwen3-coder", "think"),
    "command_a_tool_use": ("command", "command"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek-v3", "think"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek-v31", "think"),
    "fireworks-ai-llama-3-firefunction-v2": ("phi4-mini", None),
    "gemma3": (None, None),
    "google-gemma-2-2b-it": (None, None),
    "google-gemma-4-31B-it": (None, "gemma4"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "granite-tags"),
    "ibm-granite-granite-4.0": ("hermes", None),
    "llama4": ("llama4", None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3", None),
    "meetkai-functionary-medium-v3.1": (None, None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral-args", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral-list", None),
    "openai-gpt-oss-120b": ("harmony", "harmony"),
    "pixtral": (None, None),
}
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
    "lfm2": "<|tool_call_start|>[{{ calls | join(', ') }}]<|tool_call_end|>",
    "llama3": '{{- \'{"name": function name, "parameters": dictionary of argument name and its value}\' }}',
    "llama4": "<|python_start|>{{ content }}<|python_end|>",
    "minimax-m2": "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}<invoke name=\"tool-name-1\">",
    "mistral-args": "'[TOOL_CALLS]' + name + '[ARGS]' + arguments",
    "mistral-list": '{{- "[TOOL_CALLS][" }}{{ tool_call|tojson }}]',
    "nemotron-v2": "'<TOOLCALL>[' + calls + ']</TOOLCALL>'",
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


@pytest.mark.parametrize("name", REAL)
def test_a_real_template_shows_its_formats(name: str) -> None:
    paths = sorted(FOLDER.glob(f"*/{name}.jinja"))
    if not paths:
        pytest.skip("needs `make fetch-templates`")
    auto = (ToolCallFormat.auto, ReasoningStyle.auto)
    for path in paths:
        assert chosen(reading_of(path.read_text(), *auto, frozenset())) == REAL[name]


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
    assert {row.body for row in CALL_FORMATS.values()} == set(BodyKind)
