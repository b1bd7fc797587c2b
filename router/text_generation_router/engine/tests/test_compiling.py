"""Grammars are compiled before their requests are queued: no step waits for a compiler."""

import asyncio

from text_generation_router.engine.tests.fakes import FakeShards, Serve, World, dies_at, expected_tokens, prompt
from text_generation_router.engine.tests.fakes import serve as in_this_process
from text_generation_router.scheduling.request import EndReason


def carried(world: World) -> set[int]:
    """The requests that were in a step of the newest shards."""
    return {request_id for step in world.forward_steps for request_id in step.request_ids}


def test_a_request_is_in_no_step_before_its_grammar_is_compiled(serve: Serve) -> None:
    async def use(world: World) -> None:
        shards = world.groups.made[0]
        shards.may_compile.clear()
        slow = world.ask(prompt(0), 6, grammar="slow")
        free = world.ask(prompt(1), 9)
        assert await free.all_ids() == expected_tokens(prompt(1), 9)
        assert shards.compiled == ["slow"] and carried(world) == {free.index}
        shards.may_compile.set()
        assert await slow.all_ids() == expected_tokens(prompt(0), 6)

    serve(use)


def test_a_refused_grammar_fails_its_request_before_any_step(serve: Serve) -> None:
    async def use(world: World) -> None:
        world.groups.made[0].refusals = {"bad": "its grammar is bad"}
        bad, good = world.ask(prompt(0), 6, grammar="bad"), world.ask(prompt(1), 6, grammar="good")
        assert await bad.failure() == "its grammar is bad"
        assert await good.all_ids() == expected_tokens(prompt(1), 6)
        assert carried(world) == {good.index}

    serve(use)


def test_one_grammar_is_compiled_at_a_time_and_owners_take_turns(serve: Serve) -> None:
    async def use(world: World) -> None:
        shards = world.groups.made[0]
        shards.may_compile.clear()
        crowd = [world.ask(prompt(i), 2, grammar=f"crowd {i}", owner="crowd") for i in range(4)]
        other = world.ask(prompt(4), 2, grammar="other", owner="other")
        while world.engine._requests.num_open < 5 or not shards.compiled:
            await asyncio.sleep(0.001)
        assert shards.compiled == ["crowd 0"]
        shards.may_compile.set()
        await asyncio.gather(*(listener.all_ids() for listener in [*crowd, other]))
        assert shards.compiled[:2] == ["crowd 0", "other"] and len(shards.compiled) == 5

    serve(use)


def test_a_request_that_ends_before_its_turn_is_not_compiled() -> None:
    async def use(world: World) -> None:
        shards = world.groups.made[0]
        shards.may_compile.clear()
        first, late, left = (world.ask(prompt(i), 2, t, grammar=f"{i}") for i, t in enumerate((None, 0.005, None)))
        world.engine.cancel(left.index)
        assert (await late.until_end()).reason is EndReason.DEADLINE
        shards.may_compile.set()
        assert len(await first.all_ids()) == 2
        await asyncio.sleep(0.01)
        assert shards.compiled == ["0"] and carried(world) == {first.index}

    in_this_process(use)


def test_a_request_whose_shards_are_lost_meanwhile_goes_on_with_the_next(serve: Serve) -> None:
    async def use(world: World) -> None:
        shards = world.groups.made[0]
        shards.may_compile.clear()
        waiting, free = world.ask(prompt(0), 6, grammar="g"), world.ask(prompt(1), 9)
        assert await free.all_ids() == expected_tokens(prompt(1), 9)
        shards.lost.done() or shards.lost.set_result("killed")
        shards.may_compile.set()
        assert await waiting.all_ids() == expected_tokens(prompt(0), 6)

    serve(use, dies_at(3), FakeShards)


def test_a_request_whose_turn_comes_after_its_shards_were_lost_is_compiled_by_the_next(serve: Serve) -> None:
    async def use(world: World) -> None:
        old = world.groups.made[0]
        old.may_compile.clear()
        first, second = (world.ask(prompt(i), 6, grammar=f"{i}") for i in range(2))
        free = world.ask(prompt(2), 9)
        assert await free.all_ids() == expected_tokens(prompt(2), 9)
        old.lost.done() or old.lost.set_result("killed")
        while not (len(world.groups.made) == 2 and world.engine.load().is_ready):
            await asyncio.sleep(0.005)
        old.may_compile.set()
        assert await first.all_ids() == expected_tokens(prompt(0), 6)
        assert await second.all_ids() == expected_tokens(prompt(1), 6)
        assert (old.compiled, world.groups.made[1].compiled) == (["0"], ["1"])

    serve(use, dies_at(3), FakeShards)


def test_a_request_whose_grammar_meets_an_error_of_ours_does_not_wait_for_ever() -> None:
    async def use(world: World) -> None:
        async def broken(grammar: str) -> str:
            raise LookupError(grammar)

        world.groups.made[0].compile = broken
        assert await world.ask(prompt(0), 6, grammar="g").all_ids() == expected_tokens(prompt(0), 6)

    in_this_process(use)
