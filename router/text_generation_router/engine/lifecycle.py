"""Takes the engine from one epoch of the shards to the next: warm-up, then the step loop, and after a loss the replay
of requests.

Shards may die at any time. Only the router knows the whole state of a request: it sends each running request to the
shards of the new epoch as a new prompt (the original prompt and the tokens made until then), and the request goes on.
Where the new shards have the keys and values of the old ones, the prefix cache has that prompt.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from text_generation_common.flags.requests import SchedulingFlags, TokenFlags
from text_generation_router.engine.loop import StepLoop
from text_generation_router.engine.protocol import EpochWatcher, JoiningRules, ModelInfo, Snapshot, TokenLimits
from text_generation_router.engine.requests import Requests
from text_generation_router.engine.shard_groups import ShardGroups
from text_generation_router.engine.shards import ShardedClient
from text_generation_router.errors import ShardsError, WarmupRefusedError
from text_generation_router.metrics.metrics import Metrics
from text_generation_router.scheduling.blame import reaches
from text_generation_router.scheduling.step import ForwardStep

CONTENT_BITS = 64

# The user's settings of an engine.


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of an engine. A token limit that is None is chosen by warm-up."""

    tokens: TokenFlags
    scheduling: SchedulingFlags
    max_concurrent_requests: int


logger = logging.getLogger("text_generation_router")


class Lifecycle:
    """Runs the engine from epoch to epoch. `shards` is None while no shards are ready. `started` is set by the first
    warm-up; from then on `snapshot` describes the newest epoch.
    """

    snapshot: Snapshot

    def __init__(
        self,
        shard_groups: ShardGroups,
        config: EngineConfig,
        requests: Requests,
        make_loop: Callable[[ShardedClient], StepLoop],
        metrics: Metrics,
        epochs: EpochWatcher,
    ) -> None:
        self.shards: ShardedClient | None = None
        self.started = asyncio.Event()
        self._shard_groups = shard_groups
        self._config = config
        self._requests = requests
        self._make_loop = make_loop
        self._metrics = metrics
        self._epochs = epochs
        self._loop: StepLoop | None = None
        self._adapters: Collection[str] = ()  # digests of adapters that have come since the start
        self._content = 0  # name of the keys and values that the scheduler's books describe; 0: of none
        self._lost_s: float | None = None  # time at which the shards were lost; None while shards work

    async def run(self) -> None:
        """Runs one epoch after the other. Raises ShardsError when no more shards will come, or if the first shards
        refuse the limits.
        """
        while True:
            shards = await self._shard_groups.next()
            try:
                await self._warm_up(shards)
                self._loop = self._make_loop(shards)
                await self._loop.run()
            except ShardsError as error:
                if isinstance(error, WarmupRefusedError) and not self.started.is_set():
                    raise
                await self._lose(shards, str(error))

    async def _warm_up(self, shards: ShardedClient) -> None:
        config = self._config
        logger.info("Warming up model")
        content = secrets.randbits(CONTENT_BITS) or 1
        capacity = await shards.warmup(
            config.tokens.prefill_budget,
            config.tokens.max_total_tokens,
            config.max_concurrent_requests,
            config.tokens.max_batch_total_tokens,
            config.scheduling.max_batch_size,
            content=content,
            known_content=self._content,
        )
        logger.info("Setting max batch total tokens to %d", capacity.slots)
        max_total = config.tokens.max_total_tokens or capacity.max_total_tokens
        token_limits = TokenLimits(config.tokens.max_input_tokens or max_total - 1, max_total, capacity.slots)
        model = self._with_adapters(shards.info)
        self.snapshot = Snapshot(model, token_limits, JoiningRules.of(config.scheduling))
        self._metrics.batch_max_total_tokens.set(capacity.slots)
        self._metrics.shards_ready.set(1)
        info = shards.info
        self._requests.begin_epoch(
            capacity.slots,
            info.eos_token_ids,
            info.query_blocks,
            replace(info.adapter_room, resident=capacity.adapters_in_slots),
            has_kept_cache=capacity.has_kept_cache,
            computed=capacity.computed,
        )
        self._content = content
        if self._lost_s is not None:
            self._metrics.shard_recovery_duration.observe(time.perf_counter() - self._lost_s)
            self._lost_s = None
        self.shards = shards
        self.started.set()
        self._epochs.ready(self.snapshot)

    def add_adapters(self, digests: Collection[str]) -> None:
        """From now on requests may ask for these adapters, too, if the shards take any that they did not start with."""
        self._adapters = digests
        if self.started.is_set():
            self.snapshot = replace(self.snapshot, model=self._with_adapters(self.snapshot.model))

    def _with_adapters(self, model: ModelInfo) -> ModelInfo:
        if not model.adapter_room.grows:
            return model
        return replace(model, adapters=frozenset((*model.adapter_room.known, *self._adapters)))

    async def _lose(self, shards: ShardedClient, reason: str) -> None:
        """Gives up a lost group and its rows: all running requests return to the queue and wait for the next group."""
        logger.error("shards of epoch %d are lost: %s", shards.epoch, reason)
        if self._loop is not None:
            await self._loop.take_answers()
        self.shards = None
        self._metrics.shard_losses.inc()
        self._metrics.shards_ready.set(0)
        self._lost_s = self._lost_s or time.perf_counter()
        self._shard_groups.lost(shards, reason)
        unanswered = await self._stop_loop()
        self._epochs.lost(reason, reaches(unanswered))
        await shards.close()
        if self._requests.put_back(unanswered, reason):
            self._shard_groups.blamed(shards)

    async def _stop_loop(self) -> list[ForwardStep]:
        """Stops the step loop. Returns the forward steps that have not answered."""
        loop, self._loop = self._loop, None
        return await loop.stop() if loop is not None else []

    async def close(self) -> None:
        """To be called when `run` has ended or was cancelled. May be called more than once."""
        await self._stop_loop()
        if self.shards is not None:
            await self.shards.close()
            self.shards = None
        await self._shard_groups.close()
