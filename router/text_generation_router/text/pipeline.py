"""The steps of a tokenizer's normalizer, pre-tokenizer or decoder, as tokenizer.json nests them."""

from collections.abc import Mapping
from typing import Any


def flat_steps(step: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """`step` itself, or the steps of a `Sequence`, which lie under `key`, in order. None has no steps."""
    if step is None:
        return []
    if step.get("type") == "Sequence":
        return [inner for part in step[key] for inner in flat_steps(part, key)]
    return [step]
