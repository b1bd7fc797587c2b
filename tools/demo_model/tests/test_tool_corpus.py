import itertools
import json
import random
import re
from typing import Any

import jinja2.sandbox
import pytest
import torch
from demo_model.corpus import SECOND_MIX, Turn, World, render
from demo_model.tool_corpus import (
    ToolCase,
    ToolMix,
    call_case,
    call_of,
    documents_with_tools,
    draw_tools,
    held_out_cases,
    system_turn,
    words_case,
)
from demo_model.train import follows_question
from tokenizers import Tokenizer

from text_generation_common.model_files import demo_directory

CONFIG = json.loads((demo_directory() / "tokenizer_config.json").read_text())


def cases(held_out: bool = False, count: int = 300) -> list[ToolCase]:
    world = World(random.Random(5), held_out, SECOND_MIX)
    return [call_case(world, draw_tools(world, 3)) for _ in range(count)]


def prompt(messages: list[dict[str, Any]], **variables: Any) -> str:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps
    template = environment.from_string(CONFIG["chat_template"])
    return template.render(messages=messages, bos_token="<s>", eos_token="</s>", **variables)


def as_openai(case: ToolCase) -> list[dict[str, Any]]:
    assert case.call is not None
    name, arguments = case.call
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": case.question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": case.result},
        {"role": "assistant", "content": case.answer},
    ]


@pytest.mark.parametrize("text", ["", "Answer briefly."])
def test_the_chat_template_writes_tools_as_the_model_was_trained_on_them(text: str) -> None:
    system = [{"role": "system", "content": text}] if text else []
    for case in cases(count=50):
        tools = [tool.as_openai() for tool in case.tools]
        dialogue = [system_turn(case.tools, text), *case.messages()]
        assert prompt([*system, *as_openai(case)], tools=tools) == "<s>" + render(dialogue)
        begun = prompt([*system, *as_openai(case)][:-1], tools=tools, add_generation_prompt=True)
        assert begun == "<s>" + render(dialogue[:-1]) + "<|assistant|>"


def test_the_chat_template_writes_several_calls_and_results_and_arguments_as_text() -> None:
    calls = [{"function": {"name": "add", "arguments": '{"a": 1}'}}, {"function": {"name": "now", "arguments": {}}}]
    messages = [
        {"role": "assistant", "content": "Well.", "tool_calls": calls},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "12:30"},
    ]
    assert prompt(messages) == (
        '<s><|assistant|>Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call></s>'
        "<|user|><tool_response>\n2\n</tool_response></s><|user|><tool_response>\n12:30\n</tool_response></s>"
    )


def test_the_chat_template_lists_tools_with_other_schemas() -> None:
    either = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    properties = {"a": {"type": ["string", "null"]}, "b": either, "c": {"enum": ["on", "off"]}}
    tools = [{"name": "f", "parameters": {"properties": properties}}, {"function": {"name": "g", "description": "G."}}]
    listed = '<tools>\n{"name": "f", "arguments": {"a": "string|null", "b": "any", "c": "on|off"}}\n'
    listed += 'G. {"name": "g", "arguments": {}}\n</tools>'
    user = {"role": "user", "content": "Hi"}
    assert prompt([user], tools=tools) == f"<s><|system|>{listed}</s><|user|>Hi</s>"


def test_each_call_names_a_listed_tool_and_has_its_arguments() -> None:
    for case in cases():
        turns = case.messages()
        assert case.call is not None and call_of(turns[1][1]) == case.call
        tool = next(tool for tool in case.tools if tool.name == case.call[0])
        for name, value in case.call[1].items():
            kind = tool.parameters[name]
            assert isinstance(value, int) if kind in ("integer", "number") else kind == "string" or value in kind
            assert str(value) in case.question


@pytest.mark.parametrize(
    ("answer", "call"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', ("f", {})),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call', ("", None)),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', ("", None)),
        ('<tool_call>\n{"name": "f", \n</tool_call>', ("", None)),
        ('Well. <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', ("", None)),
        ("Hello!", None),
    ],
)
def test_only_one_call_and_nothing_else_counts_as_a_call(answer: str, call: object) -> None:
    assert call_of(answer) == call


def test_held_out_questions_never_occur_in_training() -> None:
    asked = {case.question for make in (call_case, words_case) for case in held_out_cases(make, 1, 300)}
    train = "".join(itertools.islice(documents_with_tools(1, ToolMix(0.8, 0.15, 0.4, 0.1)), 4000))
    taught = set(re.findall(r"<\|user\|>(.*?)</s>", train))
    assert len(asked) > 500 and len(taught) > 8000 and not asked & taught


def test_held_out_cases_have_new_values_where_these_are_not_words_from_a_list() -> None:
    """Numbers and sentences; names may be from a list."""
    held_out = [case.call for case in cases(held_out=True) if case.call]
    sentences = {arguments[name] for _, arguments in held_out for name in ("note", "message") if name in arguments}
    minutes = {arguments["minutes"] for _, arguments in held_out if "minutes" in arguments}
    train = "".join(itertools.islice(documents_with_tools(1, ToolMix(1.0, 0.15, 0.25)), 2000))
    assert len(sentences) > 5 and len(minutes) > 5
    assert not sentences & set(re.findall(r'"(?:text|note|message)": "([^"]+)"', train))
    assert not minutes & {int(number) for number in re.findall(r'"minutes": (\d+)', train)}


def test_five_tools_and_a_question_take_less_than_a_quarter_of_the_context() -> None:
    tokenizer = Tokenizer.from_file(str(demo_directory() / "tokenizer.json"))
    world = World(random.Random(2), False, SECOND_MIX)
    for _ in range(20):
        tools = draw_tools(world, 5)
        turns: list[Turn] = [system_turn(tools), *call_case(world, tools).messages()]
        assert len(tokenizer.encode_batch([render(turns)])[0].ids) < 512


def test_a_question_that_no_tool_fits_is_answered_in_words() -> None:
    world = World(random.Random(3), False, SECOND_MIX)
    for _ in range(200):
        case = words_case(world, draw_tools(world, 2))
        assert case.call is None and call_of(case.messages()[1][1]) is None


def test_tokens_of_questions_are_those_of_the_system_and_the_user() -> None:
    begin, end, system, user, assistant = 1, 2, 3, 4, 5
    ids = [begin, system, 20, end, user, 21, 22, end, assistant, 23, end, 24, user, 25]
    expected = [False, True, True, False, True, True, True, False, False, False, False, False, True, True]
    assert follows_question(torch.tensor([ids])).tolist() == [expected]
