"""The user's settings of an engine."""

from dataclasses import dataclass

from text_generation_common.flags.requests import SchedulingFlags, TokenFlags


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of an engine. A token limit that is None is chosen by warm-up."""

    tokens: TokenFlags
    scheduling: SchedulingFlags
    max_concurrent_requests: int
