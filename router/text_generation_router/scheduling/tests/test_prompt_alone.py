"""Requests that want log-probabilities of their prompts, or their prompts computed and no token: what the scheduler
sends, keeps free and ends. `test_scheduler_machine.py` has the values."""

from collections.abc import Callable

from text_generation_router.scheduling.costs import StepWork
from text_generation_router.scheduling.request import GenerationRequest, Limits
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.step import Chunk, ForwardStep, StepAnswer
from text_generation_router.scheduling.tests.answers import answer
from text_generation_router.scheduling.tests.shard_model import ShardModel

CAPACITY, BUDGET = 64, 16


def ask(scheduler: Scheduler, length: int, new: int, prompt_logprobs: int | None = None) -> Running:
    return scheduler.add(GenerationRequest(tuple(range(length)), new, prompt_logprobs=prompt_logprobs))


def forward(scheduler: Scheduler) -> ForwardStep:
    step = scheduler.next_step()
    assert isinstance(step, ForwardStep)
    return step


def chunks_of(scheduler: Scheduler, shard: ShardModel, until: Callable[[], bool] = lambda: False) -> list[Chunk]:
    """All chunks that are sent until nothing is left to send, or `until` is true after a step."""
    chunks: list[Chunk] = []
    while not until() and (step := scheduler.next_step()):
        chunks += step.chunks if isinstance(step, ForwardStep) else ()
        tokens = shard.run(step)
        answer = StepAnswer(step.number, list(tokens), list(tokens.values()), prompt_logprobs=shard.prompts)
        scheduler.apply(answer)
    return chunks


def test_a_prompt_alone_needs_a_slot_for_each_of_its_tokens() -> None:
    scheduler = Scheduler(Limits(CAPACITY, 8, BUDGET))
    fits, too_long = ask(scheduler, 30, 0), ask(scheduler, 31, 0)
    assert (fits.max_slots, too_long.max_slots) == (30, 31)
    assert scheduler.begin_epoch(30) == [too_long]
    chunks_of(scheduler, ShardModel(8))
    assert fits.ended and scheduler.is_idle and scheduler.memory.num_held == 0


def test_a_prompt_alone_is_ending_only_once_all_of_it_is_sent() -> None:
    scheduler = Scheduler(Limits(CAPACITY, 8, BUDGET))
    request, ending = ask(scheduler, 40, 0), []
    for _ in range(3):
        step = forward(scheduler)
        ending.append(request.is_ending)
        last = answer(scheduler, step)
    assert ending == [False, False, True]
    assert (last.computed, last.freed, last.ended) == ([request.id], [request.id], {}) and request.ended


def test_one_that_is_cancelled_or_preempted_while_its_last_chunk_is_computed_ends_once() -> None:
    scheduler = Scheduler(Limits(CAPACITY, 8, BUDGET))
    cancelled, preempted = ask(scheduler, 8, 0), ask(scheduler, 8, 0)
    step = forward(scheduler)
    scheduler.cancel(cancelled.id)
    scheduler._preempt(preempted)
    applied = answer(scheduler, step)
    assert applied.computed == [preempted.id] and sorted(applied.freed) == [cancelled.id, preempted.id]
    assert not chunks_of(scheduler, ShardModel(8)) and scheduler.is_idle and scheduler.memory.num_held == 0


def test_the_shards_are_asked_until_all_log_probabilities_are_known_and_not_again() -> None:
    scheduler, shard = Scheduler(Limits(CAPACITY, 8, BUDGET)), ShardModel(8)
    whole, lone = ask(scheduler, 40, 5, prompt_logprobs=3), ask(scheduler, 1, 5, prompt_logprobs=3)
    sent = chunks_of(scheduler, shard, until=lambda: bool(whole.output_ids))
    asked = {c.request_id: c.first.prompt_logprobs for c in sent if c.first is not None}
    assert asked == {whole.id: 3, lone.id: None}, "the only token of a prompt follows nothing"
    assert {c.scored for c in sent if c.request_id == whole.id} == {True}
    scheduler._preempt(whole)
    again = chunks_of(scheduler, shard)
    assert [c.first.prompt_logprobs for c in again if c.first is not None] == [None]
    assert not any(c.scored for c in again) and again[0].start == 40, "the cache has the prompt"


def test_what_steps_cost_is_not_learned_from_steps_that_compute_log_probabilities() -> None:
    learned: list[StepWork] = []

    class Learning:
        def seconds(self, work: StepWork) -> float | None:
            return None

        def learn(self, work: StepWork, seconds: float) -> None:
            learned.append(work)

    for prompt_logprobs in (0, None):
        scheduler = Scheduler(Limits(CAPACITY, 8, BUDGET), costs=Learning())
        ask(scheduler, 10, 1, prompt_logprobs)
        step = forward(scheduler)
        scheduler.apply(StepAnswer(step.number, [step.chunks[0].request_id], [7], total_ns=10**9))
        assert bool(learned) == (prompt_logprobs is None)
