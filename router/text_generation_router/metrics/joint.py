"""The metrics of several processes of one server on one page: each keeps its own values in a file beside the others'.

A process that takes the place of a dead one goes on from its values, so counters never fall. Gauges of a process that
writes no more are left out. The event loop works on one family at a time, and files are read and written in a thread.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from text_generation_router.metrics.metrics import Metrics

logger = logging.getLogger("text_generation_router")

# Seconds between two writes of the file, if no page is asked for.
WRITE_S = 2.0
# Age in seconds from which a file belongs to a process that has died or hangs.
STALE_S = 3 * WRITE_S
# Gauges whose joint value is not a sum.
LOWEST = frozenset({"process_start_time_seconds", "process_max_fds"})
# Every front tells of the same replicas, and not at the same moment.
HIGHEST = frozenset({"tgi_info", "tgi_replicas"})

Key = tuple[str, tuple[tuple[str, str], ...]]  # name and labels of a sample


@dataclass(slots=True)
class Values:
    """The values of one family of metrics."""

    name: str
    kind: str  # counter, gauge or histogram
    text: str
    samples: dict[Key, float]

    @classmethod
    def of(cls, family: Metric) -> "Values":
        samples = {
            (sample.name, tuple(sample.labels.items())): sample.value
            for sample in family.samples
            if not sample.name.endswith("_created")
        }
        return cls(family.name, family.type, family.documentation, samples)

    @property
    def family(self) -> Metric:
        family = Metric(self.name, self.text, self.kind)
        for (name, labels), value in self.samples.items():
            family.add_sample(name, dict(labels), value)
        return family

    def add(self, other: "Values") -> None:
        for key, value in other.samples.items():
            known = self.samples.get(key)
            if known is None:
                self.samples[key] = value
            elif self.name in LOWEST:
                self.samples[key] = min(known, value)
            elif self.name in HIGHEST:
                self.samples[key] = max(known, value)
            else:
                self.samples[key] = known + value


Page = dict[str, Values]


def joined(pages: Sequence[Page]) -> Iterator[Values]:
    """The sums of the pages, in the order in which the first of them lists its families. Changes none of them."""
    for name in dict.fromkeys(chain.from_iterable(pages)):
        first, *others = (page[name] for page in pages if name in page)
        total = Values(name, first.kind, first.text, dict(first.samples))
        for values in others:
            total.add(values)
        yield total


def without_gauges(page: Page) -> Page:
    return {name: values for name, values in page.items() if values.kind != "gauge"}


class JointMetrics:
    """The metrics of this process and of those whose files lie beside its own, under names with the same beginning."""

    def __init__(self, registry: CollectorRegistry, file: Path) -> None:
        """`file`: PREFIX-NAME, where NAME is this process's and PREFIX the server's."""
        self._registry = registry
        self._file = file
        self._before = without_gauges(read_page(file) or {})
        self._writing = asyncio.Lock()  # so that no file gets older values than it has

    async def write(self) -> Page:
        """Writes this process's values, those of its predecessors included, and returns them."""
        async with self._writing:
            own, written = {}, []
            for values in self._own():
                own[values.name] = values
                written.append(_as_json(values))
                await asyncio.sleep(0)
            await asyncio.to_thread(self._save, written)
        return own

    def _own(self) -> Iterator[Values]:
        before = dict(self._before)
        for family in self._registry.collect():
            values = Values.of(family)
            if (old := before.pop(values.name, None)) is not None:
                values.add(old)
            yield values
        yield from joined([before])

    def _save(self, written: list[bytes]) -> None:
        partial = self._file.with_name(f"{self._file.name}.partial")
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as opened:
                opened.write(b"[%s]" % b",".join(written))
            partial.replace(self._file)
        except OSError as error:
            logger.warning("metrics cannot be written to %s: %s", self._file, error.strerror)

    async def keep_writing(self, is_ending: asyncio.Event) -> None:
        """Writes the values now and then, and a last time when `is_ending` is set."""
        while not is_ending.is_set():
            await self.write()
            with suppress(TimeoutError):
                async with asyncio.timeout(WRITE_S):
                    await is_ending.wait()
        await self.write()

    async def families(self) -> AsyncIterator[Metric]:
        """The families of all processes together."""
        own = await self.write()
        others = await asyncio.to_thread(lambda: list(self._others()))
        for values in joined([own, *others]):
            yield values.family
            await asyncio.sleep(0)

    def _others(self) -> Iterator[Page]:
        prefix = self._file.name.rpartition("-")[0]
        for file in sorted(self._file.parent.glob(f"{prefix}-*")):
            if file == self._file or file.suffix == ".partial":
                continue
            page, age_s = read_page(file), _age_s(file)
            if page is not None:
                yield page if age_s < STALE_S else without_gauges(page)


def read_page(file: Path) -> Page | None:
    """The values in a file; None if there is no such file, or it is not one of ours."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return {entry["name"]: _from_json(entry) for entry in orjson.loads(file.read_bytes())}
    return None


def _as_json(values: Values) -> bytes:
    samples: Sequence[Any] = [(name, labels, value) for (name, labels), value in values.samples.items()]
    return orjson.dumps({"name": values.name, "kind": values.kind, "text": values.text, "samples": samples})


def _from_json(entry: dict[str, Any]) -> Values:
    samples = {
        (str(name), tuple((str(label), str(text)) for label, text in labels)): float(value)
        for name, labels, value in entry["samples"]
    }
    return Values(str(entry["name"]), str(entry["kind"]), str(entry["text"]), samples)


def _age_s(file: Path) -> float:
    try:
        return time.time() - file.stat().st_mtime
    except OSError:
        return STALE_S


@asynccontextmanager
async def joined_with_others(metrics: Metrics, file: str | None) -> AsyncIterator[None]:
    """Inside this context /metrics shows the values of all processes with files beside `file`; None: of this one."""
    if file is None:
        yield
        return
    metrics.of_server = joint = JointMetrics(metrics.registry, Path(file))
    is_ending = asyncio.Event()
    # The task is not cancelled: a thread would go on to write, and might write older values than the last.
    writing = asyncio.create_task(joint.keep_writing(is_ending), name="metrics")
    try:
        yield
    finally:
        is_ending.set()
        await writing
