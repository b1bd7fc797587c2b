"""The calls that a reader has found in an answer, within bounds."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from text_generation_router.text.tokens.pieces import CallArguments, CallStart, Piece


# Why a part of a reader stops. None of them leaves the reader.
class NotACallError(Exception):
    """What has been read since `Source.hold` is not a call, or not the rest of one: it is text."""


class TextEndedError(NotACallError):
    """The text ends within a call."""


class BrokenCallError(NotACallError):
    """The arguments of a call that has begun are not JSON. They have been given as the model wrote them."""


class TooMuchError(Exception):
    """The answer has more calls, or longer arguments, than a reader gives. `rest`: text that was not given."""

    def __init__(self, rest: str = "") -> None:
        super().__init__(rest)
        self.rest = rest


MAX_CALLS = 64
MAX_ARGUMENT_CHARS = 256 * 1024  # sum over all calls of an answer
MAX_NAME_CHARS = 256

Tools = Mapping[str, Mapping[str, Any]]  # the JSON schema of each tool's parameters, by the tool's name


class FoundCalls:
    def __init__(
        self,
        give: Callable[[Piece], None],
        give_text: Callable[[str], None],
        tools: Tools,
        decode: Callable[[str], str],
    ) -> None:
        """`give_text`: takes text that stands within a call and does not belong to it."""
        self.give_text = give_text
        self.count = 0
        self.name = ""  # the latest call's
        self.is_complete = False  # whether the latest call has all its arguments
        self.left_out: list[str] = []  # what a call says besides its name, id and arguments
        self._ids = set[str | None]()  # that the model has written
        self._give = give
        self._tools = tools
        self._decode = decode
        self.chars_left = MAX_ARGUMENT_CHARS

    @property
    def names(self) -> Collection[str]:
        """The tools of the request."""
        return self._tools

    def schema(self, name: str) -> Mapping[str, Any]:
        return self._tools.get(name, {})

    def start(self, name: str, call_id: str | None = None) -> None:
        """`call_id`: as the model has written it. An id that an earlier call has is none."""
        if self.count == MAX_CALLS:
            raise TooMuchError
        self.name = name
        self._give(CallStart(self.count, name, None if call_id in self._ids else call_id))
        self._ids.add(call_id)
        self.count += 1
        self.is_complete = False

    def arguments(self, text: str) -> None:
        """The next part of the arguments of the latest call."""
        given, rest = text[: self.chars_left], text[self.chars_left :]
        self.chars_left -= len(given)
        if given := self._decode(given):
            self._give(CallArguments(self.count - 1, given))
        if rest:
            raise TooMuchError(rest)

    def complete(self) -> None:
        self.is_complete = True

    def leave_out(self, text: str) -> None:
        self.left_out.append(self._decode(text))
