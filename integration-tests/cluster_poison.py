"""A request that kills whatever computes it, on three replicas: no two of them may be down at a time because of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import httpx
from calls import client_of, tokenizer
from cluster import Deployment
from kills import log_entries
from poison import NUM_NEIGHBOURS, WORD
from streams import Ask, Comparison, StreamAnswer, StreamClients, compare, run_streams

LIMIT_S = 600.0
# What dies of the token, as a rule of FAILPOINTS; and the text of an error that names the cause.
POINTS = {"a shard": "shard.chunk", "an engine's step": "engine.step", "an engine's Submit": "engine.submit"}
NAMED = "on nothing else"


@dataclass(frozen=True, slots=True)
class ClusterPoisoned:
    what: str
    deaths: int
    most_down: int  # greatest number of replicas that were down at a time
    error: str  # what the poisoned request's client got
    comparison: Comparison  # the other requests, with the same requests in a run without faults

    def failures(self) -> list[str]:
        found = [] if self.deaths else ["the request killed nothing"]
        found += [f"{self.most_down} replicas down at a time"] if self.most_down > 1 else []
        found += [f"it ended with {self.error!r}"] if NAMED not in self.error else []
        return found if self.comparison.is_equal else [*found, f"its neighbours: {self.comparison}"]


def rule(what: str) -> str:
    """FAILPOINTS for the engines' launchers."""
    (token,) = tokenizer().encode(WORD, add_special_tokens=False).ids
    return f"{POINTS[what]}[token={token}]:kill@every 1"


def poison(deployment: Deployment, what: str, asks: Sequence[Ask], expected: Sequence[StreamAnswer]) -> ClusterPoisoned:
    """`deployment` was made with `rule(what)`."""
    error = ""

    async def ask(clients: StreamClients) -> None:
        nonlocal error
        await clients.wait_for_tokens(NUM_NEIGHBOURS)
        async with client_of(deployment.url) as client:
            client.timeout = httpx.Timeout(LIMIT_S)
            body = {"inputs": f"Say {WORD}", "parameters": {"max_new_tokens": 4}}
            response = await client.post("/generate", json=body)
            error = str(response.json().get("error", f"{response.status_code}, no error"))

    answers, _ = run_streams(deployment.url, asks[:NUM_NEIGHBOURS], NUM_NEIGHBOURS, ask)
    logs = [deployment.log_of(machine) for machine in deployment.others]
    deaths = [list(_deaths(log)) for log in logs]
    spans = [span for log in logs for span in down(log)]
    return ClusterPoisoned(
        what, sum(map(len, deaths)), most_at_once(spans), error, compare(expected[:NUM_NEIGHBOURS], answers)
    )


def down(log: str) -> Iterator[tuple[float, float]]:
    """When a replica was down: from the death of its shard or engine to its being ready again."""
    since_s: float | None = None
    for entry in log_entries(log):
        at_s = _time(entry)
        if _is_death(entry):
            since_s = at_s if since_s is None else since_s
        elif since_s is not None and str(entry["message"]).startswith("Setting max batch total tokens to"):
            yield since_s, at_s
            since_s = None
    if since_s is not None:
        yield since_s, float("inf")


def _deaths(log: str) -> Iterator[float]:
    return (_time(entry) for entry in log_entries(log) if _is_death(entry))


def _is_death(entry: dict[str, object]) -> bool:
    return str(entry["message"]).startswith("fault injected: ")


def _time(entry: dict[str, object]) -> float:
    return datetime.fromisoformat(str(entry["timestamp"])).timestamp()


def most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    count = most = 0
    for _, change in changes:
        count += change
        most = max(most, count)
    return most


def as_table(found: Sequence[ClusterPoisoned]) -> str:
    lines = [
        "| a request that kills | deaths | most down at a time | ended by name | other streams | lost | different |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in found:
        is_named = "yes" if NAMED in one.error else f"no: {one.error}"
        counts = one.comparison.streams, one.comparison.lost, one.comparison.other_texts
        lines.append("| " + " | ".join(map(str, [one.what, one.deaths, one.most_down, is_named, *counts])) + " |")
    return "\n".join(lines)
