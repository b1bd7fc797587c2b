"""The one bound of how deep JSON may be nested that a client or a model has written, also inside strings.

orjson reads 1,024 levels and writes 254, and Python's recursion ends at 1,000: what is read here can be written again,
also inside other objects.
"""

from collections.abc import Iterable
from typing import Any

import orjson

MAX_DEPTH = 128
TOO_DEEP = f"more than {MAX_DEPTH} levels of objects and lists"


class TooDeepError(ValueError):
    """The JSON has more than MAX_DEPTH levels."""


def read_json(text: str | bytes) -> Any:
    """Raises ValueError: orjson.JSONDecodeError or TooDeepError."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        read = error.doc[: error.pos]  # orjson stops at bounds of its own, too
        if read.count("{") + read.count("[") - read.count("}") - read.count("]") > MAX_DEPTH:
            raise TooDeepError(f"it has {TOO_DEEP}") from None
        raise
    brackets = (b"{", b"[") if isinstance(text, bytes) else ("{", "[")
    # Counting brackets is quick, and nearly every text has less than MAX_DEPTH of them.
    if sum(map(text.count, brackets)) > MAX_DEPTH and is_deeper(value, MAX_DEPTH):  # type: ignore[arg-type]
        raise TooDeepError(f"it has {TOO_DEEP}")
    return value


def is_deeper(value: Any, max_depth: int) -> bool:
    """Whether objects and lists stand within each other on more than `max_depth` levels."""
    level = _with_items([value])
    for _ in range(max_depth):
        level = _with_items(item for one in level for item in (one.values() if isinstance(one, dict) else one))
    return bool(level)


def _with_items(values: Iterable[Any]) -> list[dict[str, Any] | list[Any]]:
    return [value for value in values if isinstance(value, dict | list)]
