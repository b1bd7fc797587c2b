"""The answers of the engine view, as types with a description of each field."""

from typing import Any, Literal

from text_generation_router.openapi.native_answers import AnswerJson, Count, ReplicasJson


class ShownEngineJson(AnswerJson):
    """One engine."""

    name: str
    """The engine's address; `this process` where front and engine are one."""
    standing: Literal["ready", "lost", "draining", "away"]
    """lost: its shards are lost; away: it is not connected."""
    running: Count
    """Number of running requests."""
    waiting: Count
    """Number of waiting requests."""
    loss: str
    """Why the connection was lost last; empty: it never was."""
    loss_s: float | None
    """Seconds since then."""


class EngineEventJson(AnswerJson):
    """What a viewer is sent a few times a second."""

    engine: str
    """The engine whose state this is."""
    problem: str
    """Why there is no state; empty: there is one."""
    skipped: Count
    """Number of states that the viewer has missed."""
    engines: list[ShownEngineJson]
    """All engines."""
    front: dict[str, Any]
    """This front: its `id`, and the number of `open` requests."""
    replicas: ReplicasJson | None
    """The launcher's replicas; null if it has none."""
    state: dict[str, Any] | None
    """The engine's rows, queue, slots, tree, steps, shards and fronts; null if nothing is new."""


class EngineHistoryJson(AnswerJson):
    """A sample for each second, oldest first."""

    every_s: float
    """Seconds between two samples."""
    columns: dict[str, list[float]]
    """The samples of each quantity."""


class ShownGenerationJson(AnswerJson):
    """One generation: its numbers, and its stages in seconds since the request came."""

    state: str
    """`open`, why it ended, or why it failed."""
    ago_s: float
    """Seconds since the request came."""
    prompt_tokens: Count
    """Number of tokens of the prompt."""
    max_new_tokens: Count
    """Most new tokens."""
    generated_tokens: Count = 0
    """Number of tokens that were made."""
    cached_tokens: Count = 0
    """Number of the prompt's tokens that the prefix cache had."""
    stages: list[dict[str, Any]]
    """`name`, `start_s` and `end_s` of each; a replay after a loss is one too."""


class ListedRequestJson(ShownGenerationJson):
    """A request of the list."""

    id: str
    """The id of the request, as in its header."""


class ShownRequestsJson(AnswerJson):
    """The newest requests of this front."""

    requests: list[ListedRequestJson]
    """The newest first, without stages."""


class ShownRequestJson(AnswerJson):
    """One request."""

    id: str
    """The id of the request."""
    generations: list[ShownGenerationJson]
    """The request's generations."""
