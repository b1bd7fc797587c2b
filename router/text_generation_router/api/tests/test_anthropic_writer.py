"""Conversions of the pieces of a text to Anthropic's blocks and events."""

import itertools
import json

import pytest

from text_generation_router.api.anthropic.writer import MessageEnd, MessageStream, content_of, usage_json
from text_generation_router.text.tokens.pieces import CallArguments, CallStart, Reasoning, Text

END, USAGE = MessageEnd("end_turn"), usage_json(5, 2, 3)
PIECES = {
    "nothing": ([], [{"type": "text", "text": ""}]),
    "text": ([Text("a"), Text("b")], [{"type": "text", "text": "ab"}]),
    "reasoning": (
        [Reasoning("x"), Reasoning("y"), Text("a")],
        [{"type": "thinking", "thinking": "xy", "signature": ""}, {"type": "text", "text": "a"}],
    ),
    "calls": (
        [
            Text("a"),
            CallStart(0, "f"),
            CallArguments(0, '{"x"'),
            CallArguments(0, ": 1}"),
            CallStart(1, "g", "model-id"),
            CallArguments(1, "{}"),
            Text("b"),
        ],
        [
            {"type": "text", "text": "a"},
            {"type": "tool_use", "id": "id-1", "name": "f", "input": {"x": 1}},
            {"type": "tool_use", "id": "model-id", "name": "g", "input": {}},
            {"type": "text", "text": "b"},
        ],
    ),
    "a call without arguments": ([CallStart(0, "f")], [{"type": "tool_use", "id": "id-1", "name": "f", "input": {}}]),
    "a call that was cut off": (
        [CallStart(0, "f"), CallArguments(0, '{"x": ')],
        [{"type": "tool_use", "id": "id-1", "name": "f", "input": {}}],
    ),
}


def ids():
    numbers = itertools.count(1)
    return lambda: f"id-{next(numbers)}"


def events_of(pieces):
    stream = MessageStream("msg_1", "m", ids())
    content = stream.start(USAGE) + b"".join(stream.add([piece]) for piece in pieces) + stream.end(END, USAGE)
    events = content.decode().split("\n\n")
    assert events.pop() == ""
    values = [json.loads(event.partition("\ndata: ")[2]) for event in events]
    assert [f"event: {value['type']}" for value in values] == [event.partition("\n")[0] for event in events]
    return values


def put_together(events):
    """The message that Anthropic's client puts together from the events."""
    message, buffers, open_blocks = events[0]["message"], {}, []
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"]) and not open_blocks
            message["content"].append(event["content_block"])
            open_blocks.append(event["index"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            assert open_blocks == [event["index"]]
            if delta["type"] == "input_json_delta":
                buffers[event["index"]] = buffers.get(event["index"], "") + delta["partial_json"]
            else:
                field = delta["type"].removesuffix("_delta")
                block[field] += delta[field]
        elif event["type"] == "content_block_stop":
            open_blocks.remove(event["index"])
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for index, text in buffers.items():
        message["content"][index]["input"] = json.loads(text) if text.endswith("}") else {}
    assert not open_blocks and events[-1] == {"type": "message_stop"}
    return message


@pytest.mark.parametrize("name", PIECES)
def test_pieces_become_blocks_and_a_stream_has_the_same_blocks(name):
    pieces, blocks = PIECES[name]
    assert content_of(pieces, ids()) == blocks
    message = put_together(events_of(pieces))
    assert message["content"] == blocks
    assert (message["stop_reason"], message["usage"]) == ("end_turn", USAGE)


def test_the_events_of_a_text():
    assert events_of([Text("a"), Text("b")]) == [
        {
            "type": "message_start",
            "message": {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "model": "m",
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": USAGE,
            },
        },
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "b"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": USAGE},
        {"type": "message_stop"},
    ]


def test_thinking_ends_with_a_signature():
    deltas = [event["delta"] for event in events_of([Reasoning("x"), Text("a")]) if event.get("delta")]
    assert deltas[:2] == [{"type": "thinking_delta", "thinking": "x"}, {"type": "signature_delta", "signature": ""}]


def test_ids_of_calls_are_random():
    first, second = (content_of([CallStart(0, "f")])[0]["id"] for _ in range(2))
    assert first != second and first.startswith("toolu_")
