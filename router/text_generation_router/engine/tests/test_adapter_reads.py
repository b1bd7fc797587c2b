"""The engine has an adapter read before the step that loads it, and its requests fail alone if that is not possible."""

from dataclasses import replace

from text_generation_router.engine.shards import WarmupAnswer
from text_generation_router.engine.tests.fakes import (
    INFO,
    MANY,
    FakeShards,
    Listener,
    World,
    expected_tokens,
    prompt,
    served,
)
from text_generation_router.errors import ShardsError
from text_generation_router.scheduling.adapter_slots import AdapterRoom
from text_generation_router.scheduling.request import GenerationRequest
from text_generation_router.scheduling.step import AdapterStep, ForwardStep, Step, StepAnswer

A, B, C = ("a" * 64, "b" * 64, "c" * 64)


class ShardsWithOneSlot(FakeShards):
    info = replace(INFO, adapters=frozenset((A, B, C)), adapter_room=AdapterRoom((A, B, C), 1, 4))

    def __init__(self, unreadable: str = "", unloadable: str = "") -> None:
        super().__init__()
        self.unreadable = unreadable
        self.unloadable = unloadable
        self.read: list[str] = []

    async def warmup(self, *wanted: int | None, content: int, known_content: int) -> WarmupAnswer:
        answer = await super().warmup(*wanted, content=content, known_content=known_content)
        return replace(answer, adapters_in_slots=(A,))

    async def prepare_adapter(self, digest: str, folder: str = "") -> str:
        assert not any(isinstance(step, AdapterStep) and step.adapter == digest for step in self.steps)
        self.read.append(digest)
        return "the files have gone" if digest == self.unreadable else ""

    def _compute(self, step: Step) -> StepAnswer | None:
        if isinstance(step, AdapterStep):
            return StepAnswer(0, refusal="no room" if step.adapter == self.unloadable else "")
        return super()._compute(step)


def ask(world: World, number: int, adapter: str) -> Listener:
    listener = Listener(lambda _: None)
    listener.index = world.engine.submit(GenerationRequest(tuple(prompt(number)), 5, adapter=adapter), listener, MANY)
    return listener


async def test_an_adapter_without_a_slot_is_read_then_loaded_then_computed() -> None:
    async with served(ShardsWithOneSlot) as world:
        listeners = [ask(world, number, adapter) for number, adapter in enumerate((A, B, "", C))]
        ids = [await listener.all_ids() for listener in listeners]
        assert ids == [expected_tokens(prompt(number), 5) for number in range(4)]
        shards = world.groups.made[-1]
        assert isinstance(shards, ShardsWithOneSlot) and shards.read == [B, C]
        loads = [step.adapter for step in shards.steps if isinstance(step, AdapterStep)]
        assert loads == [B, C]
        first = next(step for step in shards.steps if isinstance(step, ForwardStep))
        assert first.number == 1, "others wait for no adapter"


async def test_requests_of_an_adapter_that_cannot_be_read_or_loaded_fail_alone() -> None:
    for options, reason in (({"unreadable": B}, "the files have gone"), ({"unloadable": B}, "no room")):
        async with served(lambda options=options: ShardsWithOneSlot(**options)) as world:
            good, bad, other = (ask(world, number, adapter) for number, adapter in enumerate((A, B, C)))
            assert reason in await bad.failure()
            assert [await good.all_ids(), await other.all_ids()] == [
                expected_tokens(prompt(0), 5),
                expected_tokens(prompt(2), 5),
            ]


class SlowShards(ShardsWithOneSlot):
    """Do not answer the first time, and live."""

    async def prepare_adapter(self, digest: str, folder: str = "") -> str:
        if digest not in self.read:
            self.read.append(digest)
            raise ShardsError("Deadline Exceeded")
        return await super().prepare_adapter(digest, folder)


async def test_shards_that_did_not_answer_are_asked_again() -> None:
    async with served(SlowShards) as world:
        assert await ask(world, 1, B).all_ids() == expected_tokens(prompt(1), 5)
        shards = world.groups.made[-1]
        assert isinstance(shards, SlowShards) and shards.read == [B, B]


class ShardsThatLackOne(ShardsWithOneSlot):
    """Room for all, and the files of B had gone when they started."""

    info = replace(INFO, adapters=frozenset((A, B)), adapter_room=AdapterRoom((A, B), 2, 4))

    async def warmup(self, *wanted: int | None, content: int, known_content: int) -> WarmupAnswer:
        return replace(
            await super().warmup(*wanted, content=content, known_content=known_content), adapters_in_slots=(A, "")
        )


async def test_only_requests_of_an_adapter_that_the_shards_did_not_find_fail() -> None:
    async with served(lambda: ShardsThatLackOne(unreadable=B)) as world:
        good, bad, other = (ask(world, number, adapter) for number, adapter in enumerate((A, B, "")))
        assert "the files have gone" in await bad.failure()
        assert [await good.all_ids(), await other.all_ids()] == [expected_tokens(prompt(n), 5) for n in (0, 2)]
        assert not any(isinstance(step, AdapterStep) for step in world.groups.made[-1].steps)


class GrowingShards(ShardsWithOneSlot):
    """Started with A, and take others."""

    info = replace(INFO, adapters=frozenset((A,)), adapter_room=AdapterRoom((A,), 1, 4, grows=True))


async def test_adapters_that_came_since_the_start_are_known_after_a_loss() -> None:
    async with served(GrowingShards, GrowingShards) as world:
        await world.engine.learn_adapters({B: "folder"})
        world.groups.made[-1].lost.set_result("gone")
        assert await ask(world, 1, B).all_ids() == expected_tokens(prompt(1), 5)
        assert len(world.groups.made) == 2 and world.engine.snapshot().model.adapters == {A, B}
