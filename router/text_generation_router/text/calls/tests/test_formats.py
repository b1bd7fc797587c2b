"""Formats are found by the markers in chat templates, or chosen by a flag."""

import json
from pathlib import Path

import pytest

from text_generation_common.flags.kinds import ReasoningStyle, ToolCallFormat
from text_generation_router.text.calls.formats import CALL_FORMATS, REASONING_FORMATS, BodyKind, format_of, reasoning_of
from text_generation_router.text.calls.reading import Reading, reading_of
from text_generation_router.text.tests.fetch_templates import FOLDER

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

# Real templates, which `make fetch-templates` fetches: their formats of calls and of reasoning.
REAL = TABLES["real"]
# Lines as the templates of these models have them.
TEMPLATES = TABLES["templates"]


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
