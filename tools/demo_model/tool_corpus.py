"""Makes the demo model's training texts in which tools are listed and called, in Hermes' format, and the cases that
`evaluate.py` asks.

As in corpus.py, a text belongs to one of two splits: phrasings of questions to tools, invented names, numbers and
sentences of the "held-out" split never occur in the "train" split. Tools, and words from lists (cities, days, things),
are the same in both.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from demo_model.corpus import (
    SECOND_MIX,
    Turn,
    World,
    common_fact,
    difference,
    document,
    facts,
    json_request,
    listing,
    render,
    repeat,
    small_talk,
    sum_question,
    unknown,
    word_problem,
)
from demo_model.tool_kinds import TOOL_KINDS, Errand, ToolKind

NO_TOOL = "I have no tool for that."
# How many of 100 lists have 1, 2, 3, 4 and 5 tools.
LENGTHS = (10, 30, 35, 20, 5)


@dataclass(frozen=True, slots=True)
class ToolMix:
    """Parts of training texts, 0 to 1: texts with tools, tools with invented names, questions that no tool fits, and
    texts of sums and differences of single digits.
    """

    texts: float
    invented: float
    unfit: float
    digits: float = 0.0


@dataclass(frozen=True, slots=True)
class Tool:
    """`description` may be empty. `parameters`: type by name, in the order of an errand's values."""

    kind: ToolKind
    name: str
    description: str
    parameters: dict[str, str]

    def line(self) -> str:
        """The tool in the system message, as the chat template writes it: what it does, and its call with types for
        values. The model sees the description first, so that it knows what the name after it means.
        """
        call = json.dumps({"name": self.name, "arguments": self.parameters})
        return f"{self.description} {call}" if self.description else call

    def arguments(self, errand: Errand) -> dict[str, Any]:
        return dict(zip(self.parameters, errand.values, strict=True))

    def as_openai(self) -> dict[str, Any]:
        """The tool as a request to /v1/chat/completions has it."""
        properties = {
            name: {"type": "string", "enum": kind.split("|")} if "|" in kind else {"type": kind}
            for name, kind in self.parameters.items()
        }
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCase:
    """A question beside a list of tools. `call`: the right name and arguments; None if no tool fits. `answer`: the
    right answer in words, after `result` if there is a call.
    """

    tools: tuple[Tool, ...]
    question: str
    call: tuple[str, dict[str, Any]] | None
    result: str
    answer: str

    def messages(self) -> list[Turn]:
        """The question, and the turns that follow it."""
        if self.call is None:
            return [("user", self.question), ("assistant", self.answer)]
        name, arguments = self.call
        return [
            ("user", self.question),
            ("assistant", f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'),
            ("user", f"<tool_response>\n{self.result}\n</tool_response>"),
            ("assistant", self.answer),
        ]


def system_turn(tools: tuple[Tool, ...], text: str = "") -> Turn:
    lines = "".join(tool.line() + "\n" for tool in tools)
    return "system", (text + "\n" if text else "") + f"<tools>\n{lines}</tools>"


def _tool(world: World, kind: ToolKind, invented: float) -> Tool:
    names = kind.parameters[world.rng.randrange(len(kind.parameters))]
    number = world.pick(["integer", "integer", "number"])
    types = [number if kind_of_value == "integer" else kind_of_value for kind_of_value in kind.types]
    name, description = world.pick(kind.names), world.pick(kind.descriptions)
    if world.rng.random() < invented:
        name = "_".join(world.name().lower() for _ in range(world.rng.randint(1, 2)))
    elif world.rng.random() < 0.1:
        description = ""
    return Tool(kind, name, description, dict(zip(names, types, strict=True)))


def draw_tools(world: World, count: int, invented: float = 0.0) -> tuple[Tool, ...]:
    """Tools of different kinds. `invented`: the part of them with names that only the list tells."""
    return tuple(_tool(world, kind, invented) for kind in world.rng.sample(TOOL_KINDS, count))


def call_case(world: World, tools: tuple[Tool, ...]) -> ToolCase:
    """A question for one of the tools."""
    tool = tools[world.rng.randrange(len(tools))]
    errand = tool.kind.errand(world)
    result = errand.result if isinstance(errand.result, str) else json.dumps(errand.result)
    if world.rng.random() < 0.5:
        result = json.dumps({errand.field: errand.result})
    return ToolCase(tools, errand.question, (tool.name, tool.arguments(errand)), result, errand.answer)


def words_case(world: World, tools: tuple[Tool, ...]) -> ToolCase:
    """A question that the model answers in words, because none of the tools fits. Questions whose texts are the same in
    both splits are for training alone.
    """
    others = [kind for kind in TOOL_KINDS if not kind.is_arithmetic and all(tool.kind is not kind for tool in tools)]
    if world.rng.random() < 0.5:
        errand = others[world.rng.randrange(len(others))].errand(world)
        return ToolCase(tools, errand.question, None, "", NO_TOOL)
    makers: list[Callable[[World], Turn]] = [facts, unknown, json_request]
    if not any(tool.kind.is_arithmetic for tool in tools):
        makers += [sum_question, word_problem]
    if not world.held_out:
        makers += [small_talk, common_fact, repeat, listing]
    question, answer = makers[world.rng.randrange(len(makers))](world)
    return ToolCase(tools, question, None, "", answer)


def tool_document(world: World, mix: ToolMix) -> str:
    """A dialogue beside a list of one to five tools; now and then without a list. Most dialogues are five questions
    whose results are left out, so that there are many calls for each list; the others are one to three whole cases.
    """
    if world.rng.random() < 0.03:
        return render(words_case(world, ()).messages())
    tools = draw_tools(world, world.rng.choices(range(1, 6), LENGTHS)[0], mix.invented)
    text = world.pick(["You are a helpful assistant.", "You are a friendly assistant.", "Answer briefly."])
    messages = [system_turn(tools, text if world.rng.random() < 0.3 else "")]
    if world.rng.random() < 0.7:
        return render(messages + [turn for _ in range(5) for turn in _case(world, tools, mix).messages()[:2]])
    for _ in range(world.rng.randint(1, 3)):
        messages += _case(world, tools, mix).messages()
    return render(messages)


def _case(world: World, tools: tuple[Tool, ...], mix: ToolMix) -> ToolCase:
    return (call_case if world.rng.random() < 1 - mix.unfit else words_case)(world, tools)


def digits_document(world: World) -> str:
    """A dialogue of ten sums and differences of single digits, which are rare among those below 100."""
    turns = [(sum_question if world.rng.random() < 0.7 else difference)(world, 9) for _ in range(10)]
    return render([turn for ask, answer in turns for turn in (("user", ask), ("assistant", answer))])


def documents_with_tools(seed: int, tools: ToolMix, mix: tuple[int, ...] = SECOND_MIX) -> Iterator[str]:
    """Training texts without end; texts without tools are those of corpus.py."""
    world = World(random.Random(seed), False, mix)
    while True:
        draw = world.rng.random()
        if draw < tools.texts:
            yield tool_document(world, tools)
        elif draw < tools.texts + tools.digits:
            yield digits_document(world)
        else:
            yield document(world)


def held_out_cases(make: Callable[[World, tuple[Tool, ...]], ToolCase], seed: int, count: int) -> list[ToolCase]:
    """Cases of `call_case` or `words_case` beside lists of two to four tools."""
    world = World(random.Random(seed), True, SECOND_MIX)
    return [make(world, draw_tools(world, world.rng.randint(2, 4))) for _ in range(count)]


def call_of(answer: str) -> tuple[str, object] | None:
    """Name and arguments of an answer that is one call and nothing else. An answer that begins as a call and is not one
    has the name "". None for an answer in words.
    """
    if "<tool_call>" not in answer:
        return None
    found = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", answer)
    try:
        call = json.loads(found.group(1)) if found else {}
        return call["name"], call["arguments"]
    except (ValueError, KeyError):
        return "", None
