"""Log-probabilities of prompts on their way to the sink, through failures too."""

import pytest

from text_generation_router.engine.protocol import FirstStep
from text_generation_router.engine.tests.fakes import (
    FakeShards,
    Listener,
    Serve,
    World,
    dies_at,
    expected_logprobs,
    expected_tokens,
    fails,
    serve,
)
from text_generation_router.errors import StepFailedError
from text_generation_router.scheduling.request import EndReason
from text_generation_router.scheduling.step import ForwardStep

LONG = [i % 50 + 1 for i in range(300)]  # a step computes at most 64 tokens of it


def first_of(listener: Listener) -> FirstStep:
    first = listener.given[0].first
    assert first is not None
    return first


def logprobs_of(listener: Listener) -> list[float]:
    given = first_of(listener).prompt_logprobs
    assert given is not None
    return [float(value) for value in given.logprobs_P]


def test_a_sink_gets_those_of_the_whole_prompt_with_its_first_tokens(serve: Serve) -> None:
    async def use(world: World) -> None:
        asked = [world.ask(LONG, 3, prompt_logprobs=n) for n in (0, 2)] + [world.ask(LONG[:1], 3, prompt_logprobs=1)]
        plain = world.ask(LONG, 3)
        for listener in (*asked[:2], plain):
            assert await listener.all_ids() == expected_tokens(LONG, 3)
        assert await asked[2].all_ids() == expected_tokens(LONG[:1], 3)
        assert [logprobs_of(listener) for listener in asked] == [expected_logprobs(LONG)] * 2 + [[]]
        assert first_of(plain).prompt_logprobs is None
        tops = first_of(asked[1]).prompt_logprobs
        assert tops is not None and tops.top_ids_PK.shape == (299, 2) and (tops.top_ids_PK == asked[1].index).all()

    serve(use, lambda: FakeShards(capacity=2000))


def test_such_a_request_takes_no_cached_prefix_and_leaves_its_own(serve: Serve) -> None:
    async def use(world: World) -> None:
        for prompt_logprobs, cached in ((0, 0), (None, 299), (0, 0)):
            listener = world.ask(LONG, 2, prompt_logprobs=prompt_logprobs)
            assert await listener.all_ids() == expected_tokens(LONG, 2)
            assert first_of(listener).cached_tokens == cached

    serve(use, lambda: FakeShards(capacity=2000))


def test_a_request_for_no_token_ends_with_its_prompt(serve: Serve) -> None:
    async def use(world: World) -> None:
        prompts = [LONG[: 40 * i] for i in range(1, 7)]
        wanted = [world.ask(ids, 0, prompt_logprobs=0) for ids in prompts]
        others = [world.ask(LONG, 0), world.ask([5], 0, prompt_logprobs=0)]
        for listener in (*wanted, *others):
            assert await listener.all_ids() == []
            assert len(listener.given) == 1
        assert [logprobs_of(listener) for listener in wanted] == [expected_logprobs(ids) for ids in prompts]
        assert not any(c.last for step in world.forward_steps for c in step.chunks)
        assert not any(step.decode_ids for step in world.forward_steps)
        estimates = world.metrics.registry.get_sample_value("tgi_request_length_estimate_ratio_count")
        assert estimates == 0, "no length was estimated"

    serve(use, lambda: FakeShards(capacity=2000))


@pytest.mark.parametrize("new", [0, 2])
@pytest.mark.parametrize("step", range(1, 7))
def test_shards_that_die_in_the_middle_cost_no_value_and_give_none_twice(serve: Serve, step: int, new: int) -> None:
    async def use(world: World) -> None:
        listener = world.ask(LONG, new, prompt_logprobs=1)
        assert await listener.all_ids() == expected_tokens(LONG, new)
        assert logprobs_of(listener) == expected_logprobs(LONG)

    serve(use, dies_at(step), lambda: FakeShards())


@pytest.mark.parametrize("step", range(1, 7))
def test_a_step_that_fails_costs_no_value_and_what_is_known_is_not_computed_again(step: int) -> None:
    failures: list[ForwardStep] = []

    def fail(tried: ForwardStep) -> None:
        if tried.number >= step and not failures:
            failures.append(tried)
            raise StepFailedError("it failed")

    async def use(world: World) -> None:
        listener = world.ask(LONG, 2, prompt_logprobs=1)
        assert await listener.all_ids() == expected_tokens(LONG, 2)
        assert logprobs_of(listener) == expected_logprobs(LONG)
        again = [chunk for tried in world.forward_steps for chunk in tried.chunks if chunk.first][-1]
        assert again.start == min(64 * (step - 1), 300), "known values are computed again"

    serve(use, fails(fail))


def test_a_prompt_whose_values_are_not_finite_fails_by_name_alone(serve: Serve) -> None:
    async def use(world: World) -> None:
        good, bad = world.ask(LONG, 2, prompt_logprobs=0), world.ask(LONG, 2, prompt_logprobs=0)
        world.groups.made[0].poisoned.add(bad.index)
        assert await bad.failure() == "the model's logits for it are not finite (NaN or infinity)"
        assert await good.all_ids() == expected_tokens(LONG, 2) and not bad.given
        assert (await good.until_end()).reason is EndReason.LENGTH

    serve(use, lambda: FakeShards(capacity=2000))
