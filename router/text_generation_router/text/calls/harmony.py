"""Reads gpt-oss messages. Each has a header with a channel and perhaps a recipient: analysis is reasoning, final is the
answer, and a message to functions.NAME is a call. Text in other channels, without a recipient, belongs to the answer.
"""

import re

from text_generation_router.text.calls.found_calls import MAX_NAME_CHARS, NotACallError, Tools
from text_generation_router.text.calls.json_body import give_arguments
from text_generation_router.text.calls.source import Give, Markers, Steps
from text_generation_router.text.calls.stepped_reader import SpecialTokens, SteppedReader
from text_generation_router.text.tokens.pieces import Piece, Reasoning, Text


class HarmonyMarks:
    """The markers as a reader's text has them."""

    def __init__(self, special_tokens: SpecialTokens) -> None:
        code = special_tokens.coded
        start, channel, self.message = code("<|start|>"), code("<|channel|>"), code("<|message|>")
        ends = tuple(map(code, ("<|end|>", "<|return|>", "<|call|>")))
        self.before_header = (start, channel, self.message, "to=")
        self.after_header = Markers((self.message, *ends))
        self.after_body = Markers((*ends, start, channel, self.message))
        self.recipient = re.compile(r"to=([^\s<\ud800-\udfff]+)")
        self.spoken = re.compile(rf"{re.escape(channel)}\s*([a-z]+)")


class HarmonyReader(SteppedReader):
    def __init__(
        self, marks: HarmonyMarks, special_tokens: SpecialTokens, tools: Tools | None, thinks: bool, keeps_special: bool
    ) -> None:
        """`tools`: None: calls are text. `thinks`: whether reasoning is told from text."""
        self._marks, self._thinks, self._has_tools = marks, thinks, tools is not None
        self._given: set[type[Piece]] = set()
        super().__init__(special_tokens, tools or {}, keeps_special)

    def _read(self) -> Steps[None]:
        source, marks = self._source, self._marks
        found, is_all = "", True
        while True:
            space = ""
            if found not in marks.before_header:
                space = yield from source.spaces()
                found = yield from source.match(marks.before_header)
            give: Give | None = self._give_text
            if found:
                give = yield from self._header(space + found, is_complete=found == marks.message)
            elif (yield from source.peek()) or is_all:
                self._give_text(space)
            is_all = False
            if give is not None and not (yield from source.copy_until(marks.after_body, give)):
                break
            found = yield from source.match(tuple(marks.after_body.texts))
            if not found:
                break
            self._line_breaks.clear()
        self._cut_reasoning()

    def _header(self, begin: str, is_complete: bool) -> Steps[Give | None]:
        """Reads a message's header, and the whole message if it is a call: then None. Otherwise returns what takes the
        message's text."""
        source, marks = self._source, self._marks
        source.hold(begin)
        if not is_complete:
            yield from source.copy_until(marks.after_header, lambda text: None)
            is_complete = bool((yield from source.match((marks.message,))))
        header = source.release()
        if not is_complete:
            self._give_text(header)
            return None
        recipient = marks.recipient.search(header)
        if recipient and (name := self._called(recipient[1])):
            self._calls.leave_out(header.replace(name, "", 1))
            yield from self._call(name)
            return None
        self._calls.leave_out(header)
        is_spoken = not recipient and marks.spoken.findall(header)[-1:] != ["analysis"]
        return self._divided(Text if is_spoken or not self._thinks else Reasoning)

    def _called(self, recipient: str) -> str:
        """The tool that a message is for; "": it is not a call. Models leave out `functions.` at times."""
        name = recipient.removeprefix("functions.")
        is_tool = name != recipient or name in self._calls.names
        return name if self._has_tools and is_tool and len(name) <= MAX_NAME_CHARS else ""

    def _divided(self, kind: type[Piece]) -> Give:
        """Takes the text of one message. A line break divides messages of the same kind."""
        give = self._give_text if kind is Text else self._give_reasoning
        needs_break = kind in self._given

        def give_message(text: str) -> None:
            nonlocal needs_break
            give("\n" + text if needs_break else text)
            needs_break = False
            self._given.add(kind)

        return give_message

    def _call(self, name: str) -> Steps[None]:
        """Reads a call's arguments. Text other than a JSON object is given as the model wrote it."""
        source, calls, after = self._source, self._calls, self._marks.after_body
        calls.start(name)
        yield from source.spaces()
        if (yield from source.peek()) != "{":
            yield from source.copy_until(after, calls.arguments)
            return
        try:
            yield from give_arguments(source, calls, after)
        except NotACallError:
            return
        source.release()
        yield from source.spaces()
        yield from source.copy_until(after, self._give_text)
