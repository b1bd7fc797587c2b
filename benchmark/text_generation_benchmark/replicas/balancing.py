"""Policies of fronts, simulated and then live: what share of the prompts caches have, and tokens per second.

The live side has engines and fronts in processes of their own and pretended shards, whose steps take what the simulated
steps cost. Both sides get the same turns of chats at the same times; the live side gets them as texts.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from text_generation_benchmark.live.processes import LiveProcesses
from text_generation_benchmark.load import Completions, stream_once
from text_generation_benchmark.output import aligned_table, say
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.replicas.chats import FIRST_SYSTEM_ID, ChatLoad, Chats, ChatTurn, steady_arrivals
from text_generation_benchmark.replicas.deployment import FleetPlan
from text_generation_benchmark.replicas.front import Policy
from text_generation_benchmark.replicas.report import run
from text_generation_benchmark.simulation.cost import SimulatedModel, StepCost
from text_generation_benchmark.simulation.trace import Floats, LogNormal
from text_generation_common.model_files import demo_directory
from text_generation_router.scheduling.request import Limits

# The chats of `ChatLoad`, with a quarter of the tokens.
PART = 4
LOAD = ChatLoad(
    system_tokens=1200 // PART,
    num_chats=400,
    user=LogNormal(150 / PART, 0.8, 8, 1000 // PART),
    output=LogNormal(150 / PART, 0.6, 2, 512 // PART),
    max_tokens=5500 // PART,
    max_new_tokens=512 // PART,
    exact=True,
)
# Slow enough for two cores to carry four of them. A pretended shard does not know what attention costs.
COST = StepCost(0.04, row_s=0.0005, prompt_token_s=0.0004)
NUM_ENGINES, SLOTS = 4, 200_000 // PART
MODEL = SimulatedModel("pretended", COST, SLOTS, 0.0, "invented")
ROWS, CHUNK = 64, 1024
LIMIT_S = 600.0  # seconds for one answer
DIALECT = Completions("pretended", {"stream_options": {"include_usage": True}})
HEAD = (
    "policy", "fronts", "cached: simulated", "live", "first token s: simulated", "live", "tokens/s: simulated", "live",
)  # fmt: skip


def compare_policies(load: ChatLoad, rate: float, seconds: float, fronts: Sequence[int], seed: int) -> str:
    arrivals_s = steady_arrivals(rate, seconds, seed)
    limits = Limits(MODEL.slots, ROWS, CHUNK)
    prompts, rows = Prompts(demo_directory()), [list(HEAD)]
    with LiveProcesses(demo_directory(), are_apart=False) as processes:
        cost = processes.folder / "cost.json"
        MODEL.write(cost)
        sizes = ("--max-batch-size", str(ROWS), "--max-batch-prefill-tokens", str(CHUNK))
        engines = processes.engines(NUM_ENGINES, str(cost), *sizes)
        for count, policy in itertools.product(fronts, Policy):
            simulated = run(FleetPlan(load, arrivals_s, MODEL, limits, policy, NUM_ENGINES, count, seed=seed))
            words = ChatWords(prompts, salt=len(rows) - 1)
            with processes.fronts(count, engines, "--placement", policy.value.replace(" ", "-")) as started:
                live = uvloop.run(play_chats([front.port for front in started], load, arrivals_s, words, seed))
            rows.append(
                [
                    policy.value,
                    str(count),
                    f"{simulated.cached:.1%}",
                    f"{sum(each.cached_tokens for each in live) / sum(each.prompt_tokens for each in live):.1%}",
                    f"{simulated.first_token_s.mean():.2f}",
                    f"{sum(each.first_s for each in live) / len(live):.2f}",
                    f"{simulated.tokens_per_s:.1f}",
                    f"{sum(each.output_tokens for each in live) / max(each.end_s for each in live):.1f}",
                ]
            )
            say(" | ".join(rows[-1]))
    return aligned_table(rows)


@dataclass(frozen=True, slots=True)
class LiveAnswer:
    """What a client saw of one request. Times in seconds."""

    first_s: float  # from its arrival to its first token
    end_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class ChatWords:
    """Turns the ids of simulated texts into words of one token each. Different texts have different words, also those
    of another `salt`."""

    def __init__(self, prompts: Prompts, salt: int) -> None:
        self._words, self._answer = prompts.words[1:], prompts.answer
        self._salt = salt
        self._texts: dict[int, list[str]] = {}

    def text(self, ids: Sequence[int]) -> str:
        """`ids`: those of a `ChatTurn`. A text begins with an id of its own, and goes on with 1, 2, 3, …; all between
        texts are answers."""
        words: list[str] = []
        own: list[str] = []
        at = 0
        for token in ids:
            if token >= FIRST_SYSTEM_ID:
                own, at = self._words_of(token), 0
            elif token == at + 1:
                at += 1
            else:
                words.append(self._answer)
                continue
            while at >= len(own):
                own += self._random(own, len(own))
            words.append(own[at])
        return "".join(words)

    def _words_of(self, first: int) -> list[str]:
        if first not in self._texts:
            self._texts[first] = random.Random(f"{self._salt} {first}").choices(self._words, k=2048)
        return self._texts[first]

    def _random(self, own: list[str], count: int) -> list[str]:
        return random.Random(f"{self._salt} {own[0]} {count}").choices(self._words, k=count)


async def play_chats(
    ports: Sequence[int], load: ChatLoad, arrivals_s: Floats, words: ChatWords, seed: int
) -> list[LiveAnswer]:
    """The requests go to the fronts in turn. RuntimeError if one is refused or does not have its tokens."""
    chats = Chats(load, seed)
    started = time.perf_counter()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for number, at_s in enumerate(arrivals_s.tolist()):
            await asyncio.sleep(max(0.0, started + at_s - time.perf_counter()))
            port = ports[number % len(ports)]
            tasks.append(group.create_task(_play_turn(port, chats, chats.next(), words, started)))
    return [task.result() for task in tasks]


async def _play_turn(port: int, chats: Chats, turn: ChatTurn, words: ChatWords, started: float) -> LiveAnswer:
    arrived = time.perf_counter()
    text = words.text(turn.prompt.tuple)
    async with asyncio.timeout(LIMIT_S):
        times = await stream_once(port, DIALECT, text, turn.output_tokens, started=arrived)
    chats.answered(turn)
    assert times.usage is not None, "a front states the usage at the end"
    cached = int(times.usage["prompt_tokens_details"]["cached_tokens"])
    end_s = time.perf_counter() - started
    return LiveAnswer(times.first, end_s, int(times.usage["prompt_tokens"]), cached, times.tokens)
