"""Beside streams, a step carries as many prompt tokens as keep it within its bound, and always some."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_common.flags.kinds import AdmissionMode
from text_generation_common.flags.requests import SchedulingFlags
from text_generation_router.scheduling import costs
from text_generation_router.scheduling.costs import AFTER_A_LOSS, FEWEST_TOKENS, MANY, ChunkBudget, StepWork
from text_generation_router.scheduling.request import GenerationRequest, Limits
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.step import FilterStep, ForwardStep, StepAnswer

LIMIT = 512


@dataclass(slots=True)
class Costs:
    """A step of rows only costs 10 ms, a prompt token 0.1 ms, and 20 ns for each token that it attends to."""

    known: bool = True

    def seconds(self, work: StepWork) -> float | None:
        return 1e-2 + 1e-4 * work.prompt_tokens + 2e-8 * work.prompt_keys if self.known else None

    def learn(self, work: StepWork, seconds: float) -> None:
        self.known = True


def stream() -> Running:
    request = Running(1, GenerationRequest((1,) * 10, 100))
    request.prefilled = request.prefill_to = 10
    return request


def prompt(length: int, done: int = 0) -> Running:
    request = Running(2, GenerationRequest((1,) * length, 10))
    request.prefilled, request.prefill_to = done, length
    return request


def stop(stream: Running) -> None:
    """As a loss does."""
    stream.output_ids.append(1)
    stream.blame.note_replay(1, had_chunks=True)


def make_budget(slowdown: float = 4.0, costs: Costs | None = None) -> ChunkBudget:
    return ChunkBudget(LIMIT, slowdown, costs or Costs())


def work(rows: int, tokens: int, depth: int) -> StepWork:
    return StepWork.of([stream()] * rows, [(depth, depth + tokens)])


@given(depth=st.integers(0, 100_000), slowdown=st.floats(1, 64), is_stopped=st.booleans())
def test_a_long_prompt_gets_the_tokens_that_fit_into_the_bound(depth: int, slowdown: float, is_stopped: bool) -> None:
    long, bound = prompt(200_000, depth), slowdown * 1e-2
    if is_stopped:
        stop(long)
        bound *= AFTER_A_LOSS
    tokens = make_budget(slowdown).choose([stream()] * 8, [long])

    def seconds(tokens: int) -> float:
        return Costs().seconds(work(8, tokens, depth)) or 0

    assert FEWEST_TOKENS <= tokens <= LIMIT
    assert tokens == FEWEST_TOKENS or seconds(tokens) <= bound
    assert tokens == LIMIT or seconds(tokens + 2 * FEWEST_TOKENS) > bound, "it could have been more"


@pytest.mark.parametrize(
    ("slowdown", "known", "is_stopped", "left_out"),
    [
        (4.0, True, True, [1, 1, 0, 1, 1, 0]),
        (4.0, True, False, [0] * 6),
        (0.0, True, True, [0] * 6),
        (4.0, False, True, [0] * 6),
    ],
    ids=["after a loss", "no loss", "off", "unknown"],
)
def test_streams_are_left_out_of_steps_that_keep_to_the_bound_together(
    slowdown: float, known: bool, is_stopped: bool, left_out: list[int]
) -> None:
    """With the whole limit such a step takes 64 ms, and the bound is 160 ms."""
    budget, prompts = make_budget(slowdown, Costs(known)), [prompt(20_000), prompt(20_000)]
    if is_stopped:
        stop(prompts[0])
    else:
        prompts[0].blame.note_replay(1, had_chunks=True)  # has made no token yet, so nothing waits for its next one
    assert [budget.leaves_out([stream()] * 8, prompts) for _ in left_out] == left_out


def test_after_a_loss_without_keys_a_third_of_the_steps_carries_the_streams_that_go_on() -> None:
    scheduler = Scheduler(Limits(100_000, 64, LIMIT), costs=Costs())
    streams = [scheduler.add(GenerationRequest((number,) * 600, 5000)) for number in range(12)]
    carried: list[bool] = []
    for _ in range(2):  # the second time after a loss
        carried.clear()
        scheduler.put_back([])
        scheduler.begin_epoch(100_000)
        while scheduler.queue or any(stream.num_uncomputed for stream in streams):
            step = scheduler.next_step()
            assert isinstance(step, ForwardStep) and step.chunks
            carried.append(bool(step.decode_ids))
            ids = [*step.decode_ids, *(chunk.request_id for chunk in step.chunks if chunk.last)]
            scheduler.apply(StepAnswer(step.number, ids, [7] * len(ids)))
    assert not any(carried[:4]) and carried[4:13] == [True, False, False] * 3


def test_one_long_stream_that_a_loss_has_stopped_does_not_slow_down_many() -> None:
    stopped = prompt(20_000)
    stop(stopped)
    budget, few, many = make_budget(), [stream()] * MANY, [stream()] * (MANY + 1)
    assert budget.leaves_out(few, [stopped]) and not budget.leaves_out(many, [stopped])
    assert budget.choose(few, [stopped]) > budget.choose(many, [stopped]) == budget.choose(many, [prompt(20_000)])


def test_several_prompts_share_what_fits() -> None:
    prompts = [prompt(20_000, 1000), prompt(20_000, 10_000), prompt(20_000, 19_000)]
    tokens = make_budget().choose([stream()] * 8, prompts)
    each = [(r.prefilled, r.prefilled + tokens // 3) for r in prompts]
    assert 3e-2 < (Costs().seconds(StepWork.of([stream()] * 8, each)) or 0) <= 4e-2


@pytest.mark.parametrize(
    ("streams", "slowdown", "known"), [(0, 4.0, True), (8, 0.0, True), (8, 4.0, False)], ids=["alone", "off", "unknown"]
)
def test_a_prompt_gets_the_whole_limit(streams: int, slowdown: float, known: bool) -> None:
    chosen = make_budget(slowdown, Costs(known)).choose([stream()] * streams, [prompt(20_000)])
    assert chosen == LIMIT


def test_a_bound_that_no_chunk_keeps_leaves_a_few_tokens() -> None:
    assert make_budget(slowdown=1).choose([stream()], [prompt(20_000, 10_000)]) == FEWEST_TOKENS


def test_many_short_prompts_do_not_wait_for_the_sake_of_one_stream() -> None:
    prompts = [prompt(30) for _ in range(16)]
    assert make_budget().choose([stream()], prompts) == LIMIT
    assert make_budget().choose([stream()] * 16, prompts) < 16 * 30


def test_costs_are_learned_from_the_steps_that_were_sent() -> None:
    learned: list[tuple[StepWork, float]] = []

    class Learning(Costs):
        def learn(self, work: StepWork, seconds: float) -> None:
            learned.append((work, seconds))

    limits = Limits(4000, 8, 64, SchedulingFlags(waiting_served_ratio=0))
    scheduler = Scheduler(limits, costs=Learning(known=False))
    scheduler.add(GenerationRequest((1,) * 100, 30))
    for _ in range(12):
        step = scheduler.next_step()
        assert isinstance(step, ForwardStep)
        ids = [*step.decode_ids, *(chunk.request_id for chunk in step.chunks if chunk.last)]
        scheduler.apply(StepAnswer(step.number, ids, [7] * len(ids), total_ns=step.number * 10**9))
    assert learned == [
        (StepWork(0, 0, 64, 64 * 65 // 2, 64), 1.0),
        (StepWork(0, 0, 36, 100 * 101 // 2 - 64 * 65 // 2, 100), 2.0),
        (StepWork(1, 103), 5.0),
        (StepWork(1, 108), 10.0),
    ]


def test_a_long_prompt_takes_no_more_time_than_its_chunks_and_the_streams_that_go_on() -> None:
    costs, length, streams = Costs(), 30_000, 8
    limits = Limits(100_000, 64, LIMIT, SchedulingFlags(waiting_served_ratio=0))
    scheduler = Scheduler(limits, costs=costs)
    for _ in range(streams):
        scheduler.add(GenerationRequest((1,) * 10, 5000))
    steps: list[float] = []
    long = None
    while long is None or long.prefilled < length:
        step = scheduler.next_step()
        assert isinstance(step, ForwardStep)
        rows = [stream()] * len(step.decode_ids)
        seconds = costs.seconds(StepWork.of(rows, [(chunk.start, chunk.end) for chunk in step.chunks])) or 0
        ids = [*step.decode_ids, *(chunk.request_id for chunk in step.chunks if chunk.last)]
        scheduler.apply(StepAnswer(step.number, ids, [7] * len(ids), total_ns=round(seconds * 1e9)))
        if long is not None:
            steps.append(seconds)
        else:
            long = scheduler.add(GenerationRequest((1,) * length, 10))
    assert max(steps) <= 4e-2
    chunks_alone = 1e-4 * length + 2e-8 * length * (length + 1) / 2
    assert sum(steps) <= 1.05 * (chunks_alone + 1e-2 * len(steps))
    assert sum(steps) <= 4 / 3 * 1.1 * chunks_alone, "three quarters of a step are the prompt's"


def test_what_admission_promises_holds_although_a_prompt_is_computed_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed at once, the short answer would have ended long before the other one needs its slots."""
    monkeypatch.setattr(costs, "FEWEST_TOKENS", 1)
    flags = SchedulingFlags(waiting_served_ratio=0, admission=AdmissionMode.PEAK, max_prefill_slowdown=1)
    scheduler = Scheduler(Limits(115, 4, 64, flags), costs=Costs())
    scheduler.add(GenerationRequest((1,) * 10, 101))
    steps = 0
    while (step := scheduler.next_step()) is not None:
        assert isinstance(step, ForwardStep | FilterStep)
        if isinstance(step, ForwardStep):
            ids = [*step.decode_ids, *(chunk.request_id for chunk in step.chunks if chunk.last)]
            scheduler.apply(StepAnswer(step.number, ids, [7] * len(ids)))
        else:
            scheduler.apply(StepAnswer(step.number))
        if (steps := steps + 1) == 3:
            scheduler.add(GenerationRequest((2,) * 50, 6))
    assert scheduler.is_idle and scheduler.counters.preemptions == 0
