"""A whole server gives the calls, the text and the reasoning that a model has written: each format, by each API."""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import processes
import pytest
import written
from calls import at_once, events_of, settled_metric
from faults import restarts
from server_process import wait_until
from written import Answer, WritingServer

from text_generation_router.text.calls.formats import CALL_FORMATS
from text_generation_router.text.calls.tests.call_texts import CALL_TEXTS, TOOLS, CallText
from text_generation_router.text.calls.tests.walks import spelled
from text_generation_router.text.calls.written import WRITTEN_FORMS
from text_generation_router.text.tokens.pieces import is_json

ANTHROPIC = (written.anthropic, written.anthropic_stream)
# Formats that are served by each run: one with calls as JSON, and one in channels. The others are served by
# `make test-served-calls`.
SERVED = {("hermes", False), ("harmony", True)}
HERMES = ("hermes", "think", False)  # the format of a server that most tests share
KINDS = sorted({(case.format, case.reasoning_format, special) for case in CALL_TEXTS for special in (False, True)})
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WEATHER = ("weather", '{"city": "Rome"}')
LONG = '{"code": "' + "".join(f"print({number:03})\\n" for number in range(40)) + '"}'
FORECAST = {"city": "Rome", "days": 3, "exact": True, "units": ["a"]}
CODE = {"code": 'if a < b:\n    print("</b>", {1: [2]})\n'}
# Tools whose calls are short, whatever a model without sense writes.
BOUNDED: dict[str, Any] = {
    "pick": {
        "type": "object",
        "properties": {
            "note": {"type": "string", "maxLength": 6},
            "size": {"enum": ["big", "small", 7, None]},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
            "place": {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]},
            "maybe": {"type": ["string", "null"], "maxLength": 4},
        },
        "required": ["note", "size", "place"],
    },
    "stop": {"type": "object", "properties": {}},
}


def kind_param(calls: str, reasoning: str, special: bool) -> object:
    is_served = (calls, special) in SERVED and reasoning in ("think", "harmony")
    name = f"{calls}, {reasoning}, {'special tokens' if special else 'text'}"
    return pytest.param(calls, reasoning, special, id=name, marks=() if is_served else pytest.mark.formats)


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WritingServer]:
    with WritingServer(tmp_path_factory.mktemp("model"), *HERMES) as server:
        yield server


def is_writable(case: CallText, special: tuple[str, ...]) -> bool:
    """Whether every marker in the text is meant as one, so that the tokenizer may have it as a special token."""
    return not special or not (case.is_spelled or any(marker in case.content + case.reasoning for marker in special))


@pytest.mark.parametrize(("calls", "reasoning", "special"), [kind_param(*kind) for kind in KINDS])
def test_each_text_and_each_demanded_call_is_given_by_each_api(
    request: pytest.FixtureRequest, tmp_path: Path, calls: str, reasoning: str, special: bool
) -> None:
    is_hermes = (calls, reasoning, special) == HERMES
    with (
        nullcontext(request.getfixturevalue("hermes"))
        if is_hermes
        else WritingServer(tmp_path, calls, reasoning, special)
    ) as server:
        cases = [case for case in CALL_TEXTS if (case.format, case.reasoning_format) == (calls, reasoning)]
        cases = [case for case in cases if is_writable(case, server.special)]
        assert cases
        for case in cases:
            check(server, case)
        check_demanded(server, calls)
        check_made_by_a_grammar(server, calls)


def check(server: WritingServer, case: CallText) -> None:
    server.write(case.text)
    apis = (written.chat, written.chat_stream, written.anthropic, written.anthropic_stream)
    asked = [api("Hi. " + case.prompt, TOOLS) for api in (*apis, written.responses, written.responses_stream)]
    [chat], [chat_stream], *others = at_once(server.url, *asked)
    as_objects = tuple((name, json.dumps(written.object_of(arguments))) for name, arguments in case.calls)
    is_whole = bool(case.calls) and is_json(case.calls[-1][1])
    endings = ("tool_calls", "tool_use") if is_whole else ("stop", "end_turn")
    for answer in (chat, chat_stream):
        check_answer(answer, case, case.calls, endings[0])
    for answer in others[:2]:
        check_answer(answer, case, as_objects, endings[1])
    for answer in others[2:]:
        check_answer(answer, case, case.calls, "completed")


def check_answer(answer: Answer, case: CallText, calls: tuple[tuple[str, str], ...], ending: str) -> None:
    found = answer.content, answer.reasoning, answer.calls, answer.ending
    assert found == (case.content, case.reasoning, calls, ending), case.label
    assert len(set(answer.ids)) == len(answer.ids) and all(answer.ids), case.label
    own = case.ids or [None] * len(calls)
    assert all(given in (None, id) for given, id in zip(own, answer.ids, strict=True)), case.label


def check_demanded(server: WritingServer, calls: str) -> None:
    syntax, form = CALL_FORMATS[calls], WRITTEN_FORMS[calls]
    asked = [("weather", FORECAST), ("run.code", CODE)][: 2 if form.several else 1]
    server.write(spelled(syntax, *asked))
    choices = [{"tool_choice": "required"}, {"tools": strict(TOOLS), "tool_choice": "required"}]
    choices += [] if syntax.is_bare else [{"tools": strict(TOOLS)}]  # a bare call is not looked for in a text
    for answer in answers(server, TOOLS, *choices):
        assert read(answer) == asked and answer.ending == "tool_calls", calls
    server.write(spelled(syntax, ("run.code", CODE)))
    for answer in answers(server, TOOLS, {"tool_choice": {"type": "function", "function": {"name": "run.code"}}}):
        assert read(answer) == [("run.code", CODE)] and answer.ending == "tool_calls", calls


def check_made_by_a_grammar(server: WritingServer, calls: str) -> None:
    """After the first marker the model, which has no sense, samples its own text: without it, it might reason."""
    form = WRITTEN_FORMS[calls]
    server.begin(str((form.opening or form.call)[0]))
    sampled = {"temperature": 1, "tool_choice": "required"}
    several = [sampled | {"seed": seed} for seed in range(4)]
    single = [{"parallel_tool_calls": False}, {"tool_choice": {"type": "function", "function": {"name": "pick"}}}]
    for answer in answers(server, BOUNDED, *several):
        check_valid(answer)
    for answer in answers(server, BOUNDED, *(sampled | {"seed": 9} | fields for fields in single)):
        check_valid(answer)
        assert len(answer.calls) == 1 and answer.ending == "tool_calls"
    choice = {"type": "any", "disable_parallel_tool_use": True}
    for answer in at_once(server.url, written.anthropic("Hi.", BOUNDED, tool_choice=choice, temperature=1)):
        check_valid(answer)
        assert len(answer.calls) == 1 and answer.ending == "tool_use"


def check_valid(answer: Answer) -> None:
    """After many calls the answer is cut off, and what has come of the last one may be text."""
    is_cut = answer.ending == "length"
    assert answer.calls and not answer.reasoning and (is_cut or not answer.content)
    assert len(set(answer.ids)) == len(answer.ids)
    for name, arguments in answer.calls[: -1 if is_cut else None]:
        jsonschema.Draft202012Validator(BOUNDED[name]).validate(json.loads(arguments))


def answers(server: WritingServer, tools: dict[str, Any], *fields: dict[str, Any]) -> list[Answer]:
    """To whole answers and streams, each with some fields."""
    apis = (written.chat, written.chat_stream)
    return [answer for [answer] in at_once(server.url, *(api("Hi.", tools, **some) for some in fields for api in apis))]


def read(answer: Answer) -> list[tuple[str, Any]]:
    assert answer.content == answer.reasoning == ""
    return [(name, json.loads(arguments)) for name, arguments in answer.calls]


def strict(schemas: dict[str, Any]) -> list[dict[str, Any]]:
    return [tool | {"function": tool["function"] | {"strict": True}} for tool in written.tools_of(schemas)]


def both(server: WritingServer, text: str, **fields: Any) -> list[list[Answer]]:
    """The choices of a whole answer and of a stream."""
    server.write(text)
    return at_once(server.url, *(api("Hi.", TOOLS, **fields) for api in (written.chat, written.chat_stream)))


def test_each_of_several_choices_has_its_calls(hermes: WritingServer) -> None:
    for choices in both(hermes, f"Well. {CALL}", n=2):
        assert [(choice.calls, choice.ending) for choice in choices] == [((WEATHER,), "tool_calls")] * 2
        assert choices[0].ids != choices[1].ids


def test_a_call_that_is_cut_off_keeps_its_arguments_and_shows_no_markup(hermes: WritingServer) -> None:
    tokens = hermes.write(CALL)
    for [choice] in both(hermes, CALL, max_tokens=tokens - len('"}}\n</tool_call>')):
        assert choice.ending == "length" and choice.calls == (("weather", '{"city": "Rome'),)
    for [choice] in both(hermes, CALL, max_tokens=20):
        assert choice.ending == "length" and not choice.calls and not choice.content


def test_one_call_is_given_if_calls_are_not_parallel(hermes: WritingServer) -> None:
    for [choice] in both(hermes, f"{CALL}\n{CALL}", parallel_tool_calls=False):
        assert (choice.calls, choice.ending) == ((WEATHER,), "tool_calls")


def test_a_stop_string_ends_an_answer_before_its_call(hermes: WritingServer) -> None:
    for [choice] in both(hermes, f"Well, then. {CALL}", stop=["then"]):
        assert (choice.content, choice.calls, choice.ending) == ("Well, ", (), "stop")


def test_a_stop_string_within_arguments_leaves_them_incomplete(hermes: WritingServer) -> None:
    for [choice] in both(hermes, CALL, stop=["Ro"]):
        assert (choice.calls, choice.content, choice.ending) == ((("weather", '{"city": "'),), "", "stop")
    for [choice] in both(hermes, f"{CALL}\n{CALL}", stop=["ome"], include_stop_str_in_output=True):
        assert (choice.calls, choice.ending) == ((("weather", '{"city": "Rome'),), "stop")
    for [choice] in both(hermes, f"{CALL}\n{CALL}", stop=["</tool_call>"]):
        assert (choice.calls, choice.content, choice.ending) == ((WEATHER,), "", "tool_calls")
    for answer in at_once(hermes.url, *(api("Hi.", TOOLS, stop_sequences=["Ro"]) for api in ANTHROPIC)):
        assert (answer.calls, answer.ending) == ((("weather", "{}"),), "stop_sequence")


def test_demanded_calls_are_those_that_a_model_writes_in_its_own_way(hermes: WritingServer) -> None:
    """The grammar reads the tokens that take the place of sampled ones: it takes the model's own text, no other."""
    for fields in ({"tool_choice": "required"}, {"tools": strict(TOOLS)}):
        for [choice] in both(hermes, f"{CALL}\n{CALL}", **fields):
            assert (choice.calls, choice.ending) == ((WEATHER, WEATHER), "tool_calls")
        for text in ("No, thanks.", CALL.replace("Rome", "Ro\nme"), CALL.replace("city", "town")):
            if text != "No, thanks." or fields.get("tool_choice"):
                with pytest.raises(AssertionError, match="grammar cannot be followed any further"):
                    both(hermes, text, **fields)


def test_a_shard_that_is_killed_within_calls_is_not_noticed(hermes: WritingServer) -> None:
    hermes.write(f'Well. <tool_call>\n{{"name": "run.code", "arguments": {LONG}}}\n</tool_call>')
    chat = written.chat_body("Hi.", TOOLS)
    bodies = {
        "/v1/chat/completions": (chat, chat | {"tools": strict(TOOLS)}),
        "/v1/messages": (written.messages_body("Hi.", TOOLS),),
        "/v1/responses": (written.responses_body("Hi.", TOOLS),),
    }
    begun = set[int]()

    def streams(told: Callable[[int], None]) -> list[Any]:
        asked = [(path, body) for path, those in bodies.items() for body in those]
        return [argument_parts(*ask, told, number) for number, ask in enumerate(asked)]

    def num_resumed() -> float:
        """Number of streams that go on after a shard is killed within all of them."""
        server, shard, before = hermes.process, processes.shards(hermes.process.pid)[0], restarts(hermes.process)
        resumes = settled_metric(server.url, "tgi_request_resumes")

        def kill_within_all(number: int) -> None:
            if number not in begun:
                begun.add(number)
                if len(begun) == 4:
                    shard.kill()

        begun.clear()
        broken = at_once(server.url, *streams(kill_within_all))
        assert broken == unbroken and ["".join(parts) for parts in broken] == [LONG] * 4
        wait_until(lambda: restarts(server) > before, 60, "another shard")
        return settled_metric(server.url, "tgi_request_resumes") - resumes

    unbroken = at_once(hermes.url, *streams(lambda number: None))
    # A client that is late on a busy machine may see a stream begin when another one has ended.
    assert 4 in (num_resumed() for _ in range(3))


def argument_parts(path: str, body: dict[str, Any], told: Callable[[int], None], number: int) -> Any:
    """A call for `at_once`: the parts of the arguments of a stream's only call. Each of them calls `told(number)`."""

    async def call(client: httpx.AsyncClient) -> list[str]:
        parts = []
        async with client.stream("POST", path, json=body | {"stream": True}) as response:
            async for event in events_of(response):
                if part := arguments_of(event):
                    parts.append(part)
                    told(number)
        return parts

    return call


def arguments_of(event: dict[str, Any]) -> str:
    """The arguments in an event of any API's stream."""
    if "choices" in event:
        delta = event["choices"][0]["delta"]
        return "".join(call["function"]["arguments"] for call in delta.get("tool_calls", ()))
    if event["type"] == "content_block_delta":
        return str(event["delta"].get("partial_json", ""))
    return str(event["delta"]) if event["type"] == "response.function_call_arguments.delta" else ""
