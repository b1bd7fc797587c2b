"""The newest requests of this front, one small record each: when each stage began and ended, as front and engine know
it. The engine tells its part with the request's first and last tokens."""

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from text_generation_common.logs import request_id
from text_generation_router.metrics.tracing import GenerationSummary, GenerationTrace, Origin, Tracer
from text_generation_router.scheduling.request import GenerationRequest

# Number of HTTP requests that are remembered, and of generations of one of them.
MAX_RECORDS, MAX_GENERATIONS = 256, 16


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One generation. Implements GenerationTrace: ends it, and the trace that is sent elsewhere. Times are those of
    time.perf_counter."""

    begun_s: float
    prompt_tokens: int
    max_new_tokens: int
    trace: GenerationTrace | None = None
    summary: GenerationSummary | None = None  # None: it is in progress

    def end(self, summary: GenerationSummary) -> None:
        self.summary = summary
        if self.trace is not None:
            self.trace.end(summary)

    def as_json(self, now: float) -> dict[str, Any]:
        """Seconds are those since the HTTP request came, but for `ago_s`, which is from then until now."""
        known = {"prompt_tokens": self.prompt_tokens, "max_new_tokens": self.max_new_tokens}
        if (end := self.summary) is None:
            return {**known, "state": "open", "ago_s": round(now - self.begun_s, 3), "stages": []}
        start = end.started_s
        stages = [
            {"name": name, "start_s": round(from_s - start, 6), "end_s": round(to_s - start, 6)}
            for name, from_s, to_s in end.stages()
        ]
        return {
            **known,
            "state": end.failure or end.finish_reason or "ended",
            "ago_s": round(now - start, 3),
            "generated_tokens": end.generated_tokens,
            "cached_tokens": end.cached_tokens,
            "stages": stages,
        }


@dataclass(slots=True)
class Records:
    """Implements Tracer. `tracer` sends traces elsewhere; None: there is none."""

    tracer: Tracer | None = None
    _by_id: OrderedDict[str, list[RequestRecord]] = field(default_factory=OrderedDict)

    def begin(self, request: GenerationRequest) -> GenerationTrace:
        record = RequestRecord(time.perf_counter(), len(request.input_ids), request.max_new_tokens)
        if self.tracer is not None:
            record.trace = self.tracer.begin(request)
        records = self._by_id.setdefault(request_id.get(), [])
        self._by_id.move_to_end(request_id.get())
        if len(records) < MAX_GENERATIONS:
            records.append(record)
        if len(self._by_id) > MAX_RECORDS:
            self._by_id.popitem(last=False)
        return record

    def refused(self, refused: Origin, status: int) -> None:
        if self.tracer is not None:
            self.tracer.refused(refused, status)

    def find(self, name: str) -> list[dict[str, Any]] | None:
        """The generations of the HTTP request with this id. None: this front knows none of them."""
        now = time.perf_counter()
        return [record.as_json(now) for record in self._by_id[name]] if name in self._by_id else None

    def newest(self, most: int) -> list[dict[str, Any]]:
        """The newest requests, without their stages, the newest one first."""
        now = time.perf_counter()
        chosen = list(self._by_id.items())[: -most - 1 : -1]
        return [{"id": name, **records[0].as_json(now), "stages": []} for name, records in chosen]
