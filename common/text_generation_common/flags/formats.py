"""Flags that say how the model writes what is not plain text. TGI has none like them."""

# ruff: noqa: RUF009  (`flag` returns `dataclasses.field`, which ruff cannot see)

from dataclasses import dataclass

from text_generation_common.flags.declaration import flag
from text_generation_common.flags.kinds import ReasoningStyle, ToolCallFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatFlags:
    tool_call_format: ToolCallFormat = flag(
        ToolCallFormat.auto,
        "How the model writes calls of tools; auto: as its chat template shows. none: a grammar makes the calls.",
    )
    reasoning_format: ReasoningStyle = flag(
        ReasoningStyle.auto,
        "How the model marks its reasoning; auto: as its chat template shows. none: reasoning is part of the answer.",
    )
