"""Runs the rounds of the shard benchmark: one call at a time to all ranks, timed until the last rank has answered."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import cycle, islice

import numpy as np

from text_generation_benchmark.output import say
from text_generation_benchmark.shards.config import Plan
from text_generation_benchmark.shards.rank_state import find_idle, read_rank_states
from text_generation_benchmark.shards.tables import Results, Round
from text_generation_router.engine.shards import ShardedClient
from text_generation_router.errors import ShardsError, StartError, StepFailedError
from text_generation_router.scheduling.memory.slots import Slots
from text_generation_router.scheduling.request import Share
from text_generation_router.scheduling.step import Chunk, ClearStep, FirstChunk, ForwardStep, Step
from text_generation_router.text.model_files import find_model_files
from text_generation_router.text.tokens.tokenization import TextTokenizer

NO_SLOTS: Slots = np.empty(0, dtype=np.int32)
# The prompt of all requests, repeated or cut to a number of tokens.
TEXT = (
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor incididunt ut labore et dolore"
    " magna aliqua. Ut enim ad minim veniam, quis nostrud exercitation ullamco laboris nisi ut aliquip ex ea commodo"
    " consequat. Duis aute irure dolor in reprehenderit in voluptate velit esse cillum dolore eu fugiat nulla pariatur."
    " Excepteur sint occaecat cupidatat non proident, sunt in culpa qui officia deserunt mollit anim id est laborum. "
)


class ShardBenchmark:
    """Sends steps to the shards, as their only client: it continues the numbering of their steps, and uses all their
    slots.

    A router that used the shards before has its next step refused, so it never uses the overwritten KV cache.
    """

    def __init__(
        self, shards: ShardedClient, master_uds_path: str, plan: Plan, ids: tuple[int, ...], last_step: int
    ) -> None:
        self._shards = shards
        self._master_uds_path = master_uds_path
        self._plan = plan
        self._ids = ids
        self._last_step = last_step

    async def measure(self, on_round: Callable[[Round], None]) -> None:
        """Runs all rounds and calls `on_round` after each. ShardsError if the shards fail, go away, or run another
        client's steps."""
        await self._clear()
        for batch_size in self._plan.batch_sizes:
            for i in range(self._plan.rounds_each):
                on_round(await self._round(batch_size, i < self._plan.warmups))

    async def _round(self, batch_size: int, is_warmup: bool) -> Round:
        plan = self._plan
        slots = np.arange(batch_size * plan.slots_each, dtype=np.int32).reshape(batch_size, plan.slots_each)
        prefill_s = await self._run(self._prefill(slots[:, : plan.sequence_length]))
        decode_s = 0.0
        for position in range(plan.sequence_length, plan.slots_each):
            decode_s += await self._run(
                ForwardStep(self._last_step + 1, tuple(range(batch_size)), slots[:, position].copy(), ())
            )
        await self._clear()
        return Round(batch_size, is_warmup, plan.sequence_length, plan.decode_steps, prefill_s, decode_s)

    def _prefill(self, slots: Slots) -> ForwardStep:
        """The step that computes the prompts: one prompt for each row of `slots`."""
        length, sampling = self._plan.sequence_length, self._plan.sampling
        chunks = tuple(
            Chunk(i, 0, length, True, FirstChunk(self._ids, own, length, sampling)) for i, own in enumerate(slots)
        )
        return ForwardStep(self._last_step + 1, (), NO_SLOTS, chunks)

    async def _clear(self) -> None:
        await self._run(ClearStep(self._last_step + 1))

    async def _run(self, step: Step) -> float:
        """Sends a step to all ranks. Returns the seconds until the last rank has answered."""
        self._last_step = step.number
        started = time.perf_counter()
        try:
            await self._shards.run(step)
        except StepFailedError as error:
            raise ShardsError(
                f"{error}; if that is too large, choose a smaller --batch-size, --sequence-length or --decode-length"
            ) from None
        except ShardsError as error:
            raise ShardsError(await self._why(error)) from None
        return time.perf_counter() - started

    async def _why(self, error: ShardsError) -> str:
        """An error text: why a step was not run, and what the user can do."""
        number = self._last_step
        try:
            states = await read_rank_states(self._master_uds_path)
            gone = any(state.epoch != self._shards.epoch for state in states)
        except ShardsError:
            states, gone = [], True
        if gone:
            return (
                f"the shards went away in step {number} ({error}): a router that gets requests has them started again;"
                " send it none, or see the server's log, and run this again"
            )
        if any(max(state.last_step, state.running_step) >= number for state in states):
            return (
                f"another client uses the shards ({error}): stop sending requests to their router, and run this again"
                " when all requests have been answered"
            )
        return f"the shards have not run step {number}: {error}"


@asynccontextmanager
async def open_benchmark(master_uds_path: str, plan: Plan, ids: tuple[int, ...]) -> AsyncIterator[ShardBenchmark]:
    """A connected benchmark. Raises ShardsError if the shards cannot be used now, StartError if the plan does not fit
    them.
    """
    states = await find_idle(master_uds_path)
    _check_slots(plan, min(state.slots for state in states))
    shards = await ShardedClient.connect(master_uds_path)
    try:
        if max(ids) >= shards.info.vocab_size:
            raise StartError(
                "--tokenizer-name is not the model that the shards serve: the text has ids it does not know"
            )
        yield ShardBenchmark(shards, master_uds_path, plan, ids, states[0].last_step)
    finally:
        await shards.close()


def _check_slots(plan: Plan, slots: int) -> None:
    largest = max(plan.batch_sizes)
    if largest * plan.slots_each > slots:
        raise StartError(
            f"--batch-size {largest} with {plan.sequence_length} + {plan.decode_length} tokens each needs"
            f" {largest * plan.slots_each} token slots, and the shards have {slots}: choose smaller ones"
        )


async def prompt_ids(tokenizer_name: str, revision: str, length: int) -> tuple[int, ...]:
    """Token ids of the prompt. Raises StartError if there is no such tokenizer."""
    tokenizer = TextTokenizer.load(find_model_files(tokenizer_name, revision).folder, workers=1, max_waiting=1)
    try:
        ids = (await tokenizer.encode(TEXT, True, Share())).values
    finally:
        tokenizer.close()
    if not ids:
        raise StartError(
            f"the tokenizer of `{tokenizer_name}` encodes text to no tokens: pass the model itself to --tokenizer-name"
        )
    return tuple(islice(cycle(ids), length))


async def measure(model: str, revision: str, master_uds_path: str, plan: Plan) -> Results:
    """Runs all rounds, with a line on stderr after each. Raises StartError and ShardsError."""
    ids = await prompt_ids(model, revision, plan.sequence_length)
    results = Results(plan.batch_sizes, plan.rounds_each)

    def report(done: Round) -> None:
        results.add(done)
        number = f"{results.finished[done.batch_size]}/{results.rounds_each}"
        say(
            f"batch size {done.batch_size}, round {number} ({'warm-up' if done.is_warmup else 'run'}): prefill"
            f" {done.prefill_ms:.2f} ms, decode {done.decode_ms:.2f} ms, {done.token_ms:.2f} ms a token"
        )

    async with open_benchmark(master_uds_path, plan, ids) as benchmark:
        await benchmark.measure(report)
    return results
