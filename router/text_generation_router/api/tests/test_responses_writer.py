"""Conversions of the pieces of a text to the items and events of /v1/responses."""

import json

import pytest

from text_generation_router.api.responses import writer as responses_writer
from text_generation_router.api.responses.writer import ResponseStream, output_of
from text_generation_router.http.encoding import to_json
from text_generation_router.text.tokens.pieces import CallArguments, CallStart, Reasoning, Text

HEAD = {"id": "resp_1", "status": "in_progress"}
USAGE = {"total_tokens": 3}


@pytest.fixture(autouse=True)
def _known_call_id(monkeypatch):
    monkeypatch.setattr(responses_writer, "new_call_id", lambda: "call_1")


def message(item_id, text, status="completed"):
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": [part]}


def reasoning(item_id, text, status="completed"):
    part = {"type": "reasoning_text", "text": text}
    return {"id": item_id, "type": "reasoning", "status": status, "summary": [], "content": [part]}


def call(item_id, call_id, name, arguments, status="completed"):
    item = {"id": item_id, "type": "function_call", "status": status, "call_id": call_id, "name": name}
    return item | {"arguments": arguments}


PIECES = {
    "nothing": ([], [message("msg_1_0", "")]),
    "text": ([Text("a"), Text("b")], [message("msg_1_0", "ab")]),
    "reasoning": ([Reasoning("x"), Reasoning("y"), Text("a")], [reasoning("rs_1_0", "xy"), message("msg_1_1", "a")]),
    "calls": (
        [
            Text("a"),
            CallStart(0, "f"),
            CallArguments(0, '{"x"'),
            CallArguments(0, ": 1}"),
            CallStart(1, "g", "model-id"),
            CallArguments(1, "{}"),
        ],
        [message("msg_1_0", "a"), call("fc_1_1", "call_1", "f", '{"x": 1}'), call("fc_1_2", "model-id", "g", "{}")],
    ),
}


def events_of(pieces, ending=None):
    stream = ResponseStream(HEAD, "1", {})
    content = stream.start() + b"".join(stream.add([piece]) for piece in pieces)
    content += stream.end(ending or {"status": "completed"}, USAGE)
    events = content.decode().split("\n\n")
    assert events.pop() == ""
    values = [json.loads(event.partition("\ndata: ")[2]) for event in events]
    assert [f"event: {value['type']}" for value in values] == [event.partition("\n")[0] for event in events]
    assert [value.pop("sequence_number") for value in values] == list(range(len(values)))
    return values


def put_together(events):
    """The items that a client puts together from the `added` and `delta` events. Asserts that the `done` events contain
    the same texts."""
    items, texts, done = [], [], []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items) == len(done) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
            texts.append("")
        elif kind.endswith(".delta"):
            assert (event["item_id"], event["output_index"]) == (items[-1]["id"], len(items) - 1)
            texts[-1] += event["delta"]
        elif kind.endswith(("_text.done", "arguments.done")):
            assert texts[-1] == event.get("text", event.get("arguments"))
        elif kind == "response.content_part.done":
            assert texts[-1] == event["part"]["text"] and event["item_id"] == items[-1]["id"]
        elif kind == "response.output_item.done":
            item = event["item"]
            told = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            assert told == texts[-1] and item["id"] == items[-1]["id"]
            done.append(item)
    return done


@pytest.mark.parametrize("name", PIECES)
def test_pieces_become_items_and_a_stream_has_the_same_items(name):
    pieces, items = PIECES[name]
    assert json.loads(to_json(output_of(pieces, "1", "completed", {}))) == items
    events = events_of(pieces)
    assert put_together(events) == events[-1]["response"]["output"] == items
    assert events[-1] == {
        "type": "response.completed",
        "response": {"id": "resp_1", "status": "completed", "usage": USAGE, "output": items},
    }


def test_the_events_of_a_text():
    place = {"item_id": "msg_1_0", "output_index": 0, "content_index": 0}
    empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    begun = HEAD | {"output": [], "usage": None}
    item = message("msg_1_0", "ab")
    assert events_of([Text("a"), Text("b")])[:-1] == [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": item | {"status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", "part": empty} | place,
        {"type": "response.output_text.delta", "delta": "a", "logprobs": []} | place,
        {"type": "response.output_text.delta", "delta": "b", "logprobs": []} | place,
        {"type": "response.output_text.done", "text": "ab", "logprobs": []} | place,
        {"type": "response.content_part.done", "part": empty | {"text": "ab"}} | place,
        {"type": "response.output_item.done", "output_index": 0, "item": item},
    ]


def test_the_events_of_reasoning_and_of_a_call():
    events = events_of([Reasoning("x"), CallStart(0, "f", "c"), CallArguments(0, "{}")])
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert (
        kinds[2:8]
        == (
            "output_item.added content_part.added reasoning_text.delta reasoning_text.done content_part.done "
            "output_item.done"
        ).split()
    )
    assert (
        kinds[8:]
        == (
            "output_item.added function_call_arguments.delta function_call_arguments.done output_item.done completed"
        ).split()
    )
    assert events[10] == {
        "type": "response.function_call_arguments.done",
        "item_id": "fc_1_1",
        "output_index": 1,
        "name": "f",
        "arguments": "{}",
    }


def test_an_answer_that_is_cut_off_has_an_incomplete_last_item():
    pieces = [Text("a"), CallStart(0, "f", "c"), CallArguments(0, '{"x')]
    items = [message("msg_1_0", "a"), call("fc_1_1", "c", "f", '{"x', "incomplete")]
    last = events_of(pieces, {"status": "incomplete", "incomplete_details": {}})[-1]
    assert (last["type"], last["response"]["output"]) == ("response.incomplete", items)


def test_a_failure_ends_the_stream_and_keeps_the_items():
    stream = ResponseStream(HEAD, "1", {})
    stream.add([Text("a")])
    events = stream.fail("server_error", "boom").decode().split("\n\n")
    last = json.loads(events[-2].partition("\ndata: ")[2])
    assert last["type"] == "response.failed" and last["response"]["error"] == {
        "code": "server_error",
        "message": "boom",
    }
    assert last["response"]["output"] == [message("msg_1_0", "a", "incomplete")]


def test_log_probabilities_are_those_of_the_parts_and_of_the_whole():
    stream = ResponseStream(HEAD, "1", {})
    content = stream.add([Text("a")], [1, 2]) + stream.add([Text("b")], [3])
    content += stream.end({"status": "completed"}, USAGE, [4])
    events = [json.loads(event.partition("\ndata: ")[2]) for event in content.decode().split("\n\n")[:-1]]
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert deltas == [[1, 2], [3], [4]]
    (done,) = (event for event in events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == events[-1]["response"]["output"][0]["content"][0]["logprobs"] == [1, 2, 3, 4]
