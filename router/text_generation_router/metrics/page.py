"""The metrics page, as TGI's exporter prints it: prometheus_client's own printer renames counters to `*_total`.

A page takes milliseconds, so the event loop makes it family by family, with other work in between.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

CONTENT_TYPE = "text/plain; charset=utf-8"


class Collectable(Protocol):
    def collect(self) -> Iterable[Metric]: ...


class FamilySource(Protocol):
    """Families of metrics, collected in several turns of the event loop."""

    def families(self) -> AsyncIterator[Metric]: ...


class OwnFamilies:
    """The families of this process's registry."""

    def __init__(self, registry: Collectable) -> None:
        self._registry = registry

    async def families(self) -> AsyncIterator[Metric]:
        for family in self._registry.collect():
            yield family
            await asyncio.sleep(0)


async def render_in_turns(source: FamilySource) -> str:
    """As `render`; other tasks run between two families."""
    return "".join([line async for family in source.families() for line in _family_lines(family)])


def render(source: Collectable) -> str:
    """The metrics page in the text exposition format, as TGI's exporter prints it."""
    return "".join(line for family in source.collect() for line in _family_lines(family))


def _family_lines(family: Metric) -> Iterator[str]:
    # TGI's counters have no suffix. The names of a process's metrics are the same for all Prometheus clients.
    is_standard = family.type == "counter" and family.name.startswith("process_")
    name = f"{family.name}_total" if is_standard else family.name
    if family.documentation:
        yield f"# HELP {name} {family.documentation}\n"
    yield f"# TYPE {name} {family.type}\n"
    for sample in family.samples:
        if sample.name.endswith("_created"):
            continue
        of_sample = name if family.type == "counter" else sample.name
        yield f"{of_sample}{_labels(sample)} {_number(sample.value)}\n"
    yield "\n"


def _labels(sample: Sample) -> str:
    pairs = (f'{key}="{_bound(value) if key == "le" else _escaped(value)}"' for key, value in sample.labels.items())
    return "{" + ",".join(pairs) + "}" if sample.labels else ""


def _bound(text: str) -> str:
    return text if text == "+Inf" else _number(float(text))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(value)
