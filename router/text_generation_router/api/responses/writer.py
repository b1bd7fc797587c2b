"""Writes the output items of /v1/responses, and the events of its streams, from the pieces of a text. Does no input or
output.
"""

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from text_generation_router.api.responses.tools import CallName, input_of
from text_generation_router.http.encoding import to_json, to_named_event
from text_generation_router.text.tokens.pieces import CallArguments, CallStart, Piece, Reasoning, Text, is_json

ID_BYTES = 12
Event = dict[str, Any]


def new_call_id() -> str:
    """A random id for a call; the `call_id` of its result repeats it."""
    return f"call_{secrets.token_hex(ID_BYTES)}"


class OutputItems:
    """Builds the items of one answer. Adding a piece yields its events, which have no sequence numbers yet."""

    def __init__(self, identity: str, names: Mapping[str, CallName]) -> None:
        """`identity`: last part of the ids of all items. `names`: see `call_names`."""
        self._names = names
        self.items: list[dict[str, Any]] = []
        self._identity = identity
        self._open: MessageItem | ReasoningOutputItem | CallItem | None = None

    def add(self, piece: Piece, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """Adds a piece to the items. `logprobs`: log-probabilities of the tokens of a piece of text."""
        kind = KINDS[type(piece)]
        if isinstance(piece, CallStart) or not isinstance(self._open, kind):
            yield from self.end()
            yield from self._begin(kind, piece)
        assert self._open is not None
        if not isinstance(piece, CallStart) and (added := self._open.add(piece.text, logprobs)) is not None:
            yield self._placed(added)

    def end(self, status: str = "completed") -> Iterator[Event]:
        """Ends the newest item."""
        if self._open is not None:
            for event in self._open.end(status):
                yield self._placed(event)
            yield self._of_item("done")
            self._open = None

    def end_all(self, status: str, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """Ends the answer. An answer without any item gets an empty message, because clients read the first item.
        `logprobs`: log-probabilities of tokens that have added no text."""
        if not self.items:
            yield from self._begin(MessageItem, Text(""))
        if isinstance(self._open, MessageItem) and logprobs:
            yield self._placed(self._open.add("", logprobs))
        yield from self.end(status)

    def _begin(self, kind: "type[MessageItem | ReasoningOutputItem | CallItem]", piece: Piece) -> Iterator[Event]:
        item_id = f"{kind.prefix}_{self._identity}_{len(self.items)}"
        if isinstance(piece, CallStart):
            name = self._names.get(piece.name, CallName(piece.name))
            self._open = CallItem(item_id, piece.id or new_call_id(), name)
        else:
            self._open = MessageItem(item_id) if kind is MessageItem else ReasoningOutputItem(item_id)
        self.items.append(self._open.item)
        yield self._of_item("added")
        for event in self._open.begin():
            yield self._placed(event)

    def _of_item(self, what: str) -> Event:
        # The event has a copy, because the item changes before the event is written.
        item = dict(self.items[-1])
        return {"type": f"response.output_item.{what}", "output_index": len(self.items) - 1, "item": item}

    def _placed(self, event: Event) -> Event:
        return {"type": event["type"], "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1} | event


class ItemPart:
    """The only part of a message or of reasoning: its text, and the events of the text."""

    def __init__(self, item: dict[str, Any], part: dict[str, Any], event: str) -> None:
        """`event`: prefix of the types of the events that carry the part's text, such as `response.output_text`."""
        self.item = item
        self._part = part
        self._event = event
        self._texts: list[str] = []

    def begin(self) -> Iterator[Event]:
        yield {"type": "response.content_part.added", "content_index": 0, "part": dict(self._part)}

    def add(self, text: str, logprobs: Sequence[Any]) -> Event:
        self._texts.append(text)
        return {"type": f"{self._event}.delta", "content_index": 0, "delta": text}

    def end(self, status: str) -> Iterator[Event]:
        self._part["text"] = "".join(self._texts)
        self.item |= {"content": [self._part], "status": status}
        yield {"type": f"{self._event}.done", "content_index": 0, "text": self._part["text"]}
        yield {"type": "response.content_part.done", "content_index": 0, "part": self._part}


class MessageItem(ItemPart):
    prefix = "msg"

    def __init__(self, item_id: str) -> None:
        item = {"id": item_id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        super().__init__(item, part, "response.output_text")
        self._logprobs: list[bytes] = []  # each token's log-probabilities as JSON, encoded once for all events

    def add(self, text: str, logprobs: Sequence[Any]) -> Event:
        new = [to_json(entry) for entry in logprobs]
        self._logprobs += new
        return super().add(text, logprobs) | {"logprobs": _array(new)}

    def end(self, status: str) -> Iterator[Event]:
        self._part["logprobs"] = logprobs = _array(self._logprobs)
        done, part_done = super().end(status)
        yield done | {"logprobs": logprobs}
        yield part_done


class ReasoningOutputItem(ItemPart):
    prefix = "rs"

    def __init__(self, item_id: str) -> None:
        item = {"id": item_id, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        super().__init__(item, {"type": "reasoning_text", "text": ""}, "response.reasoning_text")


class CallItem:
    """A call. A custom tool has one argument, a text, which is sent when the text is complete."""

    prefix = "fc"

    def __init__(self, item_id: str, call_id: str, name: CallName) -> None:
        self._is_custom = name.is_custom
        self.item: dict[str, Any] = {
            "id": item_id,
            "type": "custom_tool_call" if name.is_custom else "function_call",
            "status": "in_progress",
            "call_id": call_id,
            "name": name.name,
            "input" if name.is_custom else "arguments": "",
        }
        if name.namespace is not None:
            self.item["namespace"] = name.namespace
        self._texts: list[str] = []

    def begin(self) -> Iterator[Event]:
        return iter(())

    def add(self, text: str, logprobs: Sequence[Any]) -> Event | None:
        self._texts.append(text)
        return None if self._is_custom else {"type": "response.function_call_arguments.delta", "delta": text}

    def end(self, status: str) -> Iterator[Event]:
        arguments = "".join(self._texts)  # perhaps incomplete JSON, if the answer was cut off
        self.item["status"] = status if is_json(arguments) else "incomplete"
        if self._is_custom:
            self.item["input"] = text = input_of(arguments)
            yield {"type": "response.custom_tool_call_input.delta", "delta": text}
            yield {"type": "response.custom_tool_call_input.done", "input": text}
        else:
            self.item["arguments"] = arguments
            call = {"name": self.item["name"], "arguments": arguments}
            yield {"type": "response.function_call_arguments.done"} | call


KINDS: dict[type[Piece], type[MessageItem | ReasoningOutputItem | CallItem]] = {
    Text: MessageItem,
    Reasoning: ReasoningOutputItem,
    CallStart: CallItem,
    CallArguments: CallItem,
}


def _array(entries: Sequence[bytes]) -> orjson.Fragment:
    return orjson.Fragment(b"[%b]" % b",".join(entries))


def output_of(
    pieces: Iterable[Piece], identity: str, status: str, names: Mapping[str, CallName]
) -> list[dict[str, Any]]:
    """The items of a whole answer."""
    output = OutputItems(identity, names)
    for piece in pieces:
        list(output.add(piece))
    list(output.end_all(status))
    return output.items


class ResponseStream:
    """Writes the events of one stream, with their numbers. Each method returns whole events, or nothing."""

    def __init__(self, head: dict[str, Any], identity: str, names: Mapping[str, CallName]) -> None:
        """`head`: the fields of the answer that are equal in all events. `names`: see `call_names`."""
        self._head = head
        self._output = OutputItems(identity, names)
        self._number = 0

    def start(self) -> bytes:
        begun = self._head | {"status": "in_progress", "output": [], "usage": None}
        return self._write({"type": f"response.{what}", "response": begun} for what in ("created", "in_progress"))

    def add(self, pieces: Iterable[Piece], logprobs: Sequence[Any] = ()) -> bytes:
        """The events of `pieces`. `logprobs`: log-probabilities of the tokens of the first piece of text."""
        written = b""
        for piece in pieces:
            written += self._write(self._output.add(piece, logprobs))
            logprobs = () if isinstance(piece, Text) else logprobs
        return written

    def end(self, ending: dict[str, Any], usage: dict[str, Any], logprobs: Sequence[Any] = ()) -> bytes:
        """The last events of the stream. `ending`: the fields that say how the answer ended."""
        ended = self._write(self._output.end_all(ending["status"], logprobs))
        return ended + self._last(ending | {"usage": usage})

    def fail(self, code: str, message: str) -> bytes:
        ended = self._write(self._output.end("incomplete"))
        error = {"code": code, "message": message}
        return ended + self._last({"status": "failed", "error": error, "usage": None})

    def _last(self, ending: dict[str, Any]) -> bytes:
        response = self._head | ending | {"output": self._output.items}
        return self._write([{"type": f"response.{ending['status']}", "response": response}])

    def _write(self, events: Iterable[Event]) -> bytes:
        written = []
        for event in events:
            kind = event.pop("type")
            written.append(to_named_event({"type": kind, "sequence_number": self._number, **event}))
            self._number += 1
        return b"".join(written)
