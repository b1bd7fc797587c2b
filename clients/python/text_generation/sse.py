"""Server-sent events: takes bytes, returns the data of whole events. Does no input or output."""

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventDecoder:
    """Decodes a stream that arrives in pieces of any size; a piece may end inside a line, a line end or a character.

    Comments and fields other than `data` are dropped. The space after the colon may be missing.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """Returns the data of every event that ends in this piece."""
        *lines, self._rest = self._split(self._rest + piece)
        events = []
        for line in lines:
            if line:
                self._take_field(line)
            elif self._data:
                events.append(self._flush())
        return events

    def end(self) -> list[str]:
        """A list of the last event if only its blank line is missing; otherwise []. An incomplete line is dropped."""
        return [self._flush()] if self._data else []

    @staticmethod
    def _split(text: bytes) -> list[bytes]:
        if not text.endswith(b"\r"):
            return _LINE_END.split(text)
        # A line feed may follow in the next piece.
        *lines, last = _LINE_END.split(text[:-1])
        return [*lines, last + b"\r"]

    def _take_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" ").decode("utf-8", errors="replace"))

    def _flush(self) -> str:
        data, self._data = "\n".join(self._data), []
        return data
