"""A poisoned request, which kills a shard each time its prompt is computed, among other requests and alone. The
poisoned request must end with an error, and the others must go on."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import kills
from calls import client_of, tokenizer
from scale import Scale
from server_process import ServerProcess
from streams import Comparison, StreamAnswer, StreamClients, compare, run_streams

# A word whose token is in no other prompt and no text: its token triggers the injected fault.
WORD = "@"
NUM_NEIGHBOURS = 32
MAX_DEATHS = 5
LIMIT_S = 300.0
ERROR = "3 times on nothing else"


@dataclass(frozen=True, slots=True)
class Poisoned:
    # Number of shard deaths that each poisoned request caused. The first request ran among others, the rest of them
    # alone.
    deaths: tuple[int, ...]
    errors: tuple[str, ...]
    comparison: Comparison  # the other requests, compared with the same requests in a run without faults

    def failures(self) -> list[str]:
        found = [f"{count} deaths by one request" for count in self.deaths if not 0 < count <= MAX_DEATHS]
        found += [f"it ended with {error!r}" for error in self.errors if ERROR not in error]
        return found if self.comparison.is_equal else [*found, f"its neighbours: {self.comparison}"]


def poison(scale: Scale, expected: Sequence[StreamAnswer], alone: int) -> Poisoned:
    """Sends one poisoned request among NUM_NEIGHBOURS others. Then sends `alone` more poisoned requests, each as the
    only request on the server.
    """
    (token,) = tokenizer().encode(WORD, add_special_tokens=False).ids
    neighbours, expected = scale.asks()[:NUM_NEIGHBOURS], expected[:NUM_NEIGHBOURS]
    if any(token in answer.ids for answer in expected):
        raise RuntimeError(f"a neighbour's text has {WORD!r}")
    faults = {"FAILPOINTS": f"shard.chunk[token={token},rank=0]:kill@every 1"}
    with scale.server(1, "--testing", environ=faults) as server:
        deaths, errors = [], []

        async def ask(clients: StreamClients) -> None:
            await clients.wait_for_tokens(NUM_NEIGHBOURS)
            errors.append(await _error(server))

        answers, _ = run_streams(server.url, neighbours, NUM_NEIGHBOURS, ask)
        deaths.append(_deaths(server))
        for _ in range(alone):
            errors.append(asyncio.run(_error(server)))
            deaths.append(_deaths(server) - sum(deaths))
        return Poisoned(tuple(deaths), tuple(errors), compare(expected, answers))


def _deaths(server: ServerProcess) -> int:
    return len([fault for fault in kills.injected(server.log()) if fault.action == "kill"])


async def _error(server: ServerProcess) -> str:
    """The error that the client of a poisoned request receives."""
    async with client_of(server.url) as client:
        client.timeout = httpx.Timeout(LIMIT_S)
        response = await client.post("/generate", json={"inputs": f"Say {WORD}", "parameters": {"max_new_tokens": 4}})
        return str(response.json().get("error", f"{response.status_code}, no error"))
