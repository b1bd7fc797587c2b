"""The metrics of several processes of one server on one page: each keeps its own values in a file beside the others'.

A process that takes the place of a dead one goes on from its values, so counters never fall. Gauges of a process that
writes no more are left out.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from text_generation_common.tasks import cancelled
from text_generation_router.metrics import Metrics

logger = logging.getLogger("text_generation_router")

# Seconds between two writes of the file, if no page is asked for.
WRITE_S = 2.0
# Age in seconds from which a file belongs to a process that has died or hangs.
STALE_S = 3 * WRITE_S
# Gauges whose joint value is not a sum.
LOWEST = frozenset({"process_start_time_seconds", "process_max_fds"})
HIGHEST = frozenset({"tgi_info"})

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


def page_of(families: Iterable[Metric]) -> Page:
    return {family.name: Values.of(family) for family in families}


def joined(pages: Iterable[Page]) -> Page:
    """The sums of the pages, in the order in which the first of them lists its families. Changes none of them."""
    total: Page = {}
    for page in pages:
        for name, values in page.items():
            if name in total:
                total[name].add(values)
            else:
                total[name] = Values(name, values.kind, values.text, dict(values.samples))
    return total


def without_gauges(page: Page) -> Page:
    return {name: values for name, values in page.items() if values.kind != "gauge"}


class JointMetrics:
    """The metrics of this process and of those whose files lie beside its own, under names with the same beginning."""

    def __init__(self, registry: CollectorRegistry, file: Path) -> None:
        """`file`: PREFIX-NAME, where NAME is this process's and PREFIX the server's."""
        self._registry = registry
        self._file = file
        self._before = without_gauges(read_page(file) or {})

    def write(self) -> Page:
        """Writes this process's values, those of its predecessors included, and returns them."""
        own = joined([page_of(self._registry.collect()), self._before])
        partial = self._file.with_name(f"{self._file.name}.partial")
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as opened:
                json.dump([_as_json(values) for values in own.values()], opened)
            partial.replace(self._file)
        except OSError as error:
            logger.warning("metrics cannot be written to %s: %s", self._file, error.strerror)
        return own

    async def keep_writing(self) -> None:
        """Writes the values now and then, until the task is cancelled."""
        while True:
            self.write()
            await asyncio.sleep(WRITE_S)

    def collect(self) -> Iterator[Metric]:
        """The families of all processes together."""
        for values in joined([self.write(), *self._others()]).values():
            yield values.family

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
        return {entry["name"]: _from_json(entry) for entry in json.loads(file.read_bytes())}
    return None


def _as_json(values: Values) -> dict[str, Any]:
    samples: Sequence[Any] = [(name, labels, value) for (name, labels), value in values.samples.items()]
    return {"name": values.name, "kind": values.kind, "text": values.text, "samples": samples}


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
    writing = asyncio.create_task(joint.keep_writing(), name="metrics")
    try:
        yield
    finally:
        await cancelled(writing)
        joint.write()
