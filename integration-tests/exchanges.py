"""Requests that are sent one by one, and their answers as texts without what differs from run to run: ids and times."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

# Headers whose values are other ones in each run. Their names are kept.
VOLATILE_HEADERS = (
    *("date", "x-request-id", "request-id", "x-compute-time", "x-total-time", "x-validation-time", "x-queue-time"),
    *("x-inference-time", "x-time-per-token"),
)
RANDOM_IDS = re.compile(r"\b(call|toolu|fc|rs|msg|item)_[0-9A-Za-z]{8,}")
# Seeds that the server has drawn, as it does for `best_of`. A seed of a request is shorter here.
SEEDS = re.compile(r'"seed":\d{10,}')
CHOICE = re.compile(r'"choices":\s*\[\{"index":\s*(\d+)')
TIMES = re.compile(r'"(created|created_at|completed_at)":(\s*)[1-9]\d{8,}')
# Characters of a body that are written in one line. Longer JSON is written with indents, for a reader of differences.
LINE_LENGTH = 2000


@dataclass(frozen=True, slots=True)
class Exchange:
    """`body`: sent as JSON if it is not bytes; None: no body. The name says which of the requests of its path it is."""

    name: str
    path: str
    body: Any = None
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def title(self) -> str:
        return f"{self.method} {self.path}: {self.name}"


@dataclass(frozen=True, slots=True)
class Said:
    """The answer to an exchange. `is_refused`: by its status, or by an error event of a stream."""

    title: str
    status: int
    head: str
    body: str

    @property
    def is_refused(self) -> bool:
        return self.status >= 400 or self.body.startswith(('data: {"error"', "event: error"))

    def text(self) -> str:
        return f"### {self.title}\n{self.status}\n{self.head}\n\n{_readable(self.body)}\n"


def said(client: httpx.Client, exchange: Exchange, names: Mapping[str, str]) -> Said:
    """The answer. `names`: texts of this run, e.g. the path of a folder, and what stands in their place."""
    content, headers = exchange.body, dict(exchange.headers)
    if content is not None and not isinstance(content, bytes):
        content = json.dumps(content).encode()
        headers = {"content-type": "application/json"} | headers
    response = client.request(exchange.method, exchange.path, content=content, headers=headers)
    lines = [(name.decode(), value.decode("latin-1")) for name, value in response.headers.raw]
    volatile = VOLATILE_HEADERS + (("content-length",) if SEEDS.search(response.text) else ())
    head = "\n".join(f"{name}: {'…' if name.lower() in volatile else value}" for name, value in lines)
    names = {**names, response.headers.get("x-request-id", ""): "ID"}
    return Said(exchange.title, response.status_code, _named(head, names), _steady(_named(response.text, names)))


def all_said(
    url: str, exchanges: Iterable[Exchange], headers: Mapping[str, str], names: Mapping[str, str]
) -> list[Said]:
    with httpx.Client(base_url=url, timeout=60, headers=headers) as client:
        return [said(client, exchange, names) for exchange in exchanges]


def _named(text: str, names: Mapping[str, str]) -> str:
    for found, name in names.items():
        text = text.replace(found, name) if found else text
    return text


def _steady(body: str) -> str:
    """The body without random ids and times. Events of a stream's choices come in the order of the choices, since each
    choice has a speed of its own."""
    if '"index":1' in body and not body.startswith("{"):
        body = "\n\n".join(sorted(body.split("\n\n"), key=_choice))
    return TIMES.sub(r'"\1":\g<2>0', SEEDS.sub('"seed":0', RANDOM_IDS.sub(r"\1_ID", body)))


def _choice(event: str) -> float:
    found = CHOICE.search(event)
    return int(found[1]) if found else float("inf")


def _readable(body: str) -> str:
    if len(body) <= LINE_LENGTH or not body.startswith(("{", "[")):
        return body
    return json.dumps(json.loads(body), indent=1, ensure_ascii=False)
