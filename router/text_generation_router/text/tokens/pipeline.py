"""The steps of a tokenizer's normalizer, pre-tokenizer or decoder, taken out of the nested lists of tokenizer.json."""

from collections.abc import Mapping
from typing import Any


def flat_steps(step: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """The steps in order: `step` itself or, if it is a `Sequence`, the steps that it lists under `key`. None has no
    steps.
    """
    if step is None:
        return []
    if step.get("type") == "Sequence":
        return [inner for part in step[key] for inner in flat_steps(part, key)]
    return [step]
