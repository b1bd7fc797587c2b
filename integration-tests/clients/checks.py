"""Named checks that print one line of outcome each, and one way to call synchronous and asynchronous clients. Standard
library only."""

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]

# Two tools whose arguments any model can write: one of two words, and a digit.
WORDS = ("five", "six")
SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "enum": list(WORDS)}},
    "required": ["word"],
    "additionalProperties": False,
}
_DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
_COUNT_SCHEMA = {"type": "object", "properties": {"number": _DIGIT}, "required": ["number"]}
TOOLS = [
    {"type": "function", "function": {"name": "say", "description": "Says a word.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "count", "description": "Counts to it.", "parameters": _COUNT_SCHEMA}},
]

Call = Callable[..., Any]


class Checks:
    """Collects outcomes. A check is a function that raises when its property does not hold."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._failures = 0

    def run(self, name: str, check: Callable[[], object]) -> None:
        try:
            check()
        except Exception as error:  # any error makes this check fail, and the other checks still run
            self._failures += 1
            where = traceback.extract_tb(error.__traceback__)
            line = next((frame for frame in reversed(where) if "check_" in frame.filename), where[-1])
            text = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"FAIL {self._prefix}: {name} (line {line.lineno}: {line.line}; {text[:500]})", flush=True)
        else:
            print(f"PASS {self._prefix}: {name}", flush=True)

    def run_module(self, module: dict[str, Any], kind: str = "", **given: Any) -> None:
        """Runs the functions of a module (its `globals()`) whose parameters have the names of `given`, the first of
        them included. `kind` tells runs of the same functions apart."""
        subject = next(iter(given))
        for name, check in list(module.items()):
            if inspect.isfunction(check) and check.__module__ == module["__name__"]:
                names = inspect.signature(check).parameters.keys()
                if subject in names and names <= given.keys():
                    values = {each: given[each] for each in names}
                    self.run(f"{name} ({kind})" if kind else name, partial(check, **values))

    def exit(self) -> None:
        sys.exit(1 if self._failures else 0)


def error_of(kind: Any, action: Callable[[], object]) -> Any:
    """The error of this kind, or of one of these kinds, that `action` must raise."""
    try:
        action()
    except kind as error:
        return error
    raise AssertionError(f"no {kind}")


def raises(kind: type[BaseException], text: str, action: Callable[[], object]) -> None:
    """`action` must raise exactly this kind, with `text` somewhere in it."""
    error = error_of(kind, action)
    assert type(error) is kind, f"{type(error).__name__} instead of {kind.__name__}"
    assert text in str(error), f"{text!r} is not in {str(error)!r}"


def sync_call(make_client: Callable[[], Any]) -> Call:
    """Calls a method named by its dotted path on a new client; a stream becomes a list."""

    def call(path: str, *args: Any, **options: Any) -> Any:
        # The client must live while its stream is read: when it is collected, it may close the stream.
        client = make_client()
        answer = _method(client, path)(*args, **options)
        return list(answer) if options.get("stream") or isinstance(answer, Iterator) else answer

    return call


def async_call(make_client: Callable[[], Any]) -> Call:
    """Calls a method of a new asynchronous client by its dotted path, in an event loop of its own; a stream becomes a
    list."""

    async def call(path: str, *args: Any, **options: Any) -> Any:
        # Some clients leave the generator of a broken stream open. The loop would print its traceback when the loop
        # closes.
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        client = make_client()
        try:
            answer = _method(client, path)(*args, **options)
            answer = await answer if inspect.isawaitable(answer) else answer
            is_stream = options.get("stream") or isinstance(answer, AsyncIterator)
            return [event async for event in answer] if is_stream else answer
        finally:
            closed = client.close() if hasattr(client, "close") else None
            if inspect.isawaitable(closed):
                await closed

    return lambda *args, **options: asyncio.run(call(*args, **options))


def _method(client: Any, path: str) -> Any:
    for name in path.split("."):
        client = getattr(client, name)
    return client


def text_of(tokens: Any) -> str:
    return "".join(token.text for token in tokens if not token.special)


def check_usage(usage: Any) -> None:
    """Checks the token counts of an answer, which may be an object or a dict."""
    counts = usage if isinstance(usage, dict) else vars(usage)
    prompt, completion, total = (counts[f"{name}_tokens"] for name in ("prompt", "completion", "total"))
    assert prompt > 0 and completion > 0 and total == prompt + completion, counts


def check_arguments(name: str, arguments: Any) -> None:
    """Checks arguments of one of `TOOLS`, as JSON text or as its value."""
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    if name == "say":
        assert list(value) == ["word"] and value["word"] in WORDS, arguments
    else:
        assert name == "count" and list(value) == ["number"] and value["number"] in range(10), (name, arguments)


def check_results(folder: str, kind: type[BaseException], action: Callable[[], object]) -> None:
    """`action` sends the result of a call. It is refused if the chat template of the model in `folder` has no place for
    results."""
    template = "".join(path.read_text() for path in Path(folder).glob("*template*"))
    settings = json.loads((Path(folder) / "tokenizer_config.json").read_text())
    if '"tool"' in template + str(settings.get("chat_template")):
        action()
    else:
        raises(kind, "not tool", action)
