"""Reads the values of a checkpoint's settings. Each is of the right type and within bounds, or a WeightsError says in
one line why not. Null means the same as a missing field."""

import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from text_generation_common.errors import WeightsError

WAY_OUT = "choose the model without quantization, or quantized as gptq, awq, compressed-tensors or fp8"
MAX_SHOWN = 60  # most characters of a value that an error repeats
LARGEST_GROUP = 65_536
SMALLEST_GROUP = 8


@dataclass(frozen=True, slots=True)
class Settings:
    raw: Mapping[str, Any]
    method: str
    where: str  # the file, and the objects around these settings

    def get(self, *names: str) -> Any:
        """The value of the first of these fields that is there."""
        return next((self.raw[name] for name in names if self.raw.get(name) is not None), None)

    def whole(self, *names: str, allowed: Container[int], default: int | None = None) -> int:
        value = self.get(*names)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value not in allowed:
            raise self.wrong(names[0], value)
        return value

    def group_size(self, *names: str) -> int | None:
        """Inputs of a group; None for -1, all inputs."""
        is_whole = self.get(*names) == -1
        return None if is_whole else self.whole(*names, allowed=range(SMALLEST_GROUP, LARGEST_GROUP + 1))

    def block(self, name: str) -> tuple[int, int] | None:
        """Outputs and inputs with one scale, such as [128, 128], or 128x128 in old files."""
        value = self.get(name)
        match [int(size) for size in re.findall(r"\d{1,6}", value)] if isinstance(value, str) else value:
            case None:
                return None
            case [int(rows), int(columns)] if (
                SMALLEST_GROUP <= min(rows, columns) <= max(rows, columns) <= LARGEST_GROUP
            ):
                return rows, columns
        raise self.wrong(name, value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, value)
        return default if value is None else value

    def word(self, *names: str, default: str = "") -> str:
        value = self.get(*names)
        if value is not None and not isinstance(value, str):
            raise self.wrong(names[0], value)
        return default if value is None else value.lower()

    def words(self, *names: str) -> list[str]:
        value = self.get(*names)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.wrong(names[0], value)
        return value

    def inner(self, name: str) -> "Settings":
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, value)
        return Settings(value or {}, self.method, f"{self.where}: {name}")

    def merged(self, other: Mapping[str, Any]) -> "Settings":
        return Settings({**self.raw, **other}, self.method, self.where)

    def wrong(self, name: str, value: object) -> WeightsError:
        return WeightsError(
            f"{self.where}: {name} is {shown(value)}, which is not supported for {self.method} weights: {WAY_OUT}"
        )

    def refused(self, kind: object, way_out: str = WAY_OUT) -> WeightsError:
        name = f"{self.method} ({shown(kind)})" if kind else self.method
        return WeightsError(f"{self.where}: the weights are quantized as {name}, which is not supported: {way_out}")


def shown(value: object) -> str:
    """The value as one line of at most MAX_SHOWN characters, because the file may contain anything."""
    text = value if isinstance(value, str) and value.isascii() and value.isprintable() else json.dumps(value)
    return text[:MAX_SHOWN]
