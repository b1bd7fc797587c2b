"""A model of a shard: it records which keys lie in each slot, and asserts that a step reads only keys that are
there."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from text_generation_router.scheduling.memory.computed import ComputedHistory
from text_generation_router.scheduling.prompt_logprobs import PromptLogprobs
from text_generation_router.scheduling.request import Namespace
from text_generation_router.scheduling.step import AdapterStep, ClearStep, FilterStep, ForwardStep, Step

# Stands for the keys of a token: the adapter, and the ids of all tokens up to it, on which the keys depend.
Keys = tuple[int | str, ...]


@dataclass
class Row:
    ids: list[int]
    slots: list[int]
    prompt_length: int
    prompt_logprobs: int | None
    adapter: str = ""
    namespace: Namespace | None = None
    num_computed: int = 0


@dataclass
class ShardModel:
    """Runs steps in the order of their answers. The next token depends only on the history."""

    max_rows: int
    rows: dict[int, Row] = field(default_factory=dict)
    keys: dict[int, Keys] = field(default_factory=dict)  # for each slot, the keys in it
    adapters: dict[int, str] = field(default_factory=dict)  # the adapter in each slot
    has_slots: bool = False  # whether rows need their adapters in slots
    prompts: dict[int, PromptLogprobs] = field(default_factory=dict)  # what the last step gave, by request
    is_sound: bool = True  # False after a step that has failed

    def run(self, step: Step) -> dict[int, int]:
        """Runs a step. Returns the sampled token of each request, by its id."""
        self.prompts = {}
        if isinstance(step, ClearStep):
            self.rows.clear()
            self.is_sound = True
        elif isinstance(step, FilterStep):
            assert set(step.keep) <= set(self.rows)
            self.rows = {i: row for i, row in self.rows.items() if i in step.keep}
        elif isinstance(step, AdapterStep):
            self.adapters[step.slot] = step.adapter
            assert len(set(self.adapters.values())) == len(self.adapters), "an adapter is in two slots"
        else:
            return self._forward(step)
        return {}

    def fail(self, step: ForwardStep) -> None:
        """Makes a step fail half-way: the slots that it should have written hold invalid keys."""
        self.is_sound = False
        for slot in step.decode_slots.tolist():
            self.keys[slot] = (-1,)
        for chunk in step.chunks:
            slots = chunk.first.slots.tolist() if chunk.first else self.rows[chunk.request_id].slots
            for slot in slots[chunk.start : chunk.end]:
                self.keys[slot] = (-1,)

    def successor(self, unanswered: Sequence[Step]) -> "ShardModel":
        """The shard that takes over the keys of this one, which was killed: all that the `unanswered` steps may have
        written is invalid."""
        slots = {request_id: row.slots for request_id, row in self.rows.items()}
        for step in unanswered:
            if not isinstance(step, ForwardStep):
                continue
            slots |= {chunk.request_id: chunk.first.slots.tolist() for chunk in step.chunks if chunk.first}
            written = step.decode_slots.tolist()
            for chunk in step.chunks:
                written += slots[chunk.request_id][chunk.start : chunk.end]
            self.keys |= dict.fromkeys(written, (-1,))
        return ShardModel(self.max_rows, keys=self.keys, has_slots=self.has_slots)

    def computed(self) -> list[ComputedHistory]:
        """What the rows have in their slots, as a shard tells an engine that has not sent them. Ends the rows."""
        rows, self.rows = self.rows, {}
        return [
            ComputedHistory(r.namespace, np.array(r.ids[:count], np.int32), np.array(r.slots[:count], np.int32))
            for r in (rows.values() if self.is_sound else ())
            if (count := r.num_computed) and r.namespace is not None
        ]

    def _forward(self, step: ForwardStep) -> dict[int, int]:
        self._place(step)
        made = []
        for request_id in step.decode_ids:
            self._compute(self.rows[request_id], len(self.rows[request_id].ids) - 1, len(self.rows[request_id].ids))
            made.append(request_id)
        for chunk in step.chunks:
            row = self.rows[chunk.request_id]
            self._compute(row, chunk.start, chunk.end)
            if row.prompt_logprobs is not None and (end := min(chunk.end, row.prompt_length - 1)) > chunk.start:
                self.prompts[chunk.request_id] = logprobs_after(row.ids, chunk.start, end, row.prompt_logprobs)
            if chunk.last:
                assert chunk.end == len(row.ids)
                made.append(chunk.request_id)
        return {request_id: self._sample(self.rows[request_id]) for request_id in made}

    def _place(self, step: ForwardStep) -> None:
        for request_id, slot in zip(step.decode_ids, step.decode_slots.tolist(), strict=True):
            self.rows[request_id].slots.append(slot)
        for chunk in step.chunks:
            if chunk.first is not None:
                assert chunk.request_id not in self.rows
                first = chunk.first
                self.rows[chunk.request_id] = Row(
                    list(first.ids),
                    first.slots.tolist(),
                    first.prompt_length,
                    first.prompt_logprobs,
                    first.adapter,
                    first.namespace,
                )
        assert len(self.rows) <= self.max_rows
        written = [*step.decode_slots.tolist()]
        for chunk in step.chunks:
            written += self.rows[chunk.request_id].slots[chunk.start : chunk.end]
        assert len(set(written)) == len(written), "two tokens of a step are written to the same slot"

    def _compute(self, row: Row, start: int, end: int) -> None:
        assert 0 <= start < end <= len(row.slots)
        is_there = not (row.adapter and self.has_slots) or row.adapter in self.adapters.values()
        assert is_there, "a step has a row whose adapter is not in a slot"
        for position, slot in enumerate(row.slots[:start]):
            keys = (row.adapter, *row.ids[: position + 1])
            assert self.keys.get(slot) == keys, "a slot does not hold what the request needs"
        for position in range(start, end):
            self.keys[row.slots[position]] = (row.adapter, *row.ids[: position + 1])
        row.num_computed = end

    def _sample(self, row: Row) -> int:
        row.ids.append(next_token(row.ids))
        return row.ids[-1]


def logprobs_after(ids: Sequence[int], start: int, end: int, top_n: int) -> PromptLogprobs:
    """The log-probabilities of the tokens that follow positions start … end - 1. Each depends on all tokens before it
    and on its position."""
    logprobs = np.array([-(sum(ids[: p + 2]) * 7 + p) % 97 - 97.0 for p in range(start, end)], np.float32)
    top_ids = np.array([[p + k for k in range(top_n)] for p in range(start, end)], np.int32)
    return PromptLogprobs(logprobs, top_ids.reshape(end - start, top_n), np.repeat(logprobs[:, None], top_n, axis=1))


def next_token(ids: list[int]) -> int:
    """The token after `ids`: 0 or 1, so that many histories are equal."""
    return (sum(ids) * 7 + len(ids)) % 2
