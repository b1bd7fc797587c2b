"""The engine with the best score is chosen; queued requests move where they start earlier."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from text_generation_router.fleet.choice import (
    LOAD_WEIGHT,
    ROW_TOKENS,
    EngineChoice,
    EngineLoad,
    Move,
    QueuedRequest,
    plan_moves,
)


def choice_of(*loads: EngineLoad, turn: int = 0) -> EngineChoice:
    choice = EngineChoice(len(loads), turn)
    for engine, load in enumerate(loads):
        choice.take_report(engine, load, 0)
    return choice


NOTHING = np.zeros(3, dtype=np.int64)


@given(
    loads=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 40), st.booleans(), st.booleans()), min_size=1),
    data=st.data(),
)
def test_the_chosen_engine_has_the_best_score_of_those_that_are_ready(
    loads: list[tuple[int, int, bool, bool]], data: st.DataObject
) -> None:
    told = [
        EngineLoad(rows // 2, rows - rows // 2, queued // 3, queued - queued // 3, is_ready=up, is_draining=drains)
        for queued, rows, up, drains in loads
    ]
    counts = st.lists(st.integers(0, 20), min_size=len(told), max_size=len(told))
    matched, blocks = np.array(data.draw(counts)), 20
    among = data.draw(st.none() | st.sets(st.integers(0, len(told) - 1)).map(sorted))
    chosen = choice_of(*told, turn=3).choose(matched, blocks, among)
    open_engines = [i for i, each in enumerate(told) if each.is_open and (among is None or i in among)]
    if not open_engines:
        assert chosen is None
        return
    load = {i: told[i].uncomputed + ROW_TOKENS * (told[i].running + told[i].waiting) for i in open_engines}
    mean, least = sum(load.values()) / len(load), min(load.values())
    score = {i: matched[i] / blocks - LOAD_WEIGHT * (load[i] - least) / (mean + 1) for i in open_engines}
    assert chosen in open_engines and score[chosen] >= max(score.values()) - 1e-9


def test_of_equal_scores_the_less_loaded_engine_is_chosen_then_the_next_in_turn() -> None:
    idle = choice_of(*[EngineLoad()] * 3, turn=1)
    assert [idle.choose(NOTHING, 0) for _ in range(4)] == [2, 0, 1, 2]
    # 1/2 cached makes up for LOAD_WEIGHT × (load − least) / (mean + 1) = 0.5 × 15 / 14.
    uneven = choice_of(EngineLoad(running=20), EngineLoad(running=5), EngineLoad(running=17))
    assert uneven.choose(np.array([1, 0, 0]), 2) == 1


def test_what_was_sent_counts_until_the_engine_has_told_of_it() -> None:
    choice = choice_of(EngineLoad(), EngineLoad(running=1))
    choice.send(0, index=1, tokens=100)
    choice.send(0, index=2, tokens=10)
    assert choice.load(0) == 110 + 2 * ROW_TOKENS and choice.choose(NOTHING[:2], 0) == 1
    choice.take_report(0, EngineLoad(running=1, computing_tokens=60), newest=1)
    assert choice.load(0) == 70 + 2 * ROW_TOKENS
    choice.take_report(0, EngineLoad(running=1), newest=2)
    assert choice.load(0) == ROW_TOKENS and choice.choose(NOTHING[:2], 0) == 0


def test_engines_that_are_unready_draining_or_lost_are_out_until_they_tell_otherwise() -> None:
    choice = EngineChoice(3)
    assert choice.choose(NOTHING, 0) is None
    choice.take_report(0, EngineLoad(is_ready=False), 0)
    choice.take_report(1, EngineLoad(is_draining=True), 0)
    choice.take_report(2, EngineLoad(running=9), 0)
    assert choice.open == [2]
    choice.lose(2)
    assert choice.choose(NOTHING, 0) is None and choice.reported(2) is None
    choice.take_report(0, EngineLoad(), 0)
    assert choice.choose(np.array([0, 9, 9]), 9) == 0


def waiting(index: int, engine: int, tokens: int = 100, has_moved: bool = False) -> QueuedRequest:
    return QueuedRequest(index, engine, tokens, has_moved)


BUSY, FREE = EngineLoad(running=9, waiting_tokens=1000, wait_s=10.0), EngineLoad()


def test_the_newest_queued_request_of_an_engine_moves_first_and_one_at_a_time() -> None:
    queued = [waiting(i, engine) for i, engine in enumerate([0, 2, 0, 2, 0])]
    assert plan_moves(queued, {0: BUSY, 1: FREE, 2: BUSY}) == [Move(4, 0, 1), Move(3, 2, 1)]


def test_each_planned_move_counts_for_the_next() -> None:
    """The first move makes a wait of 4 s on engine 1; a second move would make a wait of 8 s, and engine 2 has a wait
    of 10 s."""
    queued = [waiting(1, 0, tokens=400), waiting(2, 2, tokens=400)]
    assert plan_moves(queued, {0: BUSY, 1: FREE, 2: BUSY}) == [Move(2, 2, 1)]


def test_a_request_moves_once_and_only_for_a_gain() -> None:
    assert not plan_moves([waiting(1, 0, has_moved=True)], {0: BUSY, 1: FREE})
    assert not plan_moves([waiting(1, 0)], {0: EngineLoad(waiting_tokens=1000, wait_s=1.9), 1: FREE})
    assert not plan_moves([waiting(1, 0)], {0: BUSY, 1: EngineLoad(waiting_tokens=1000, wait_s=5.0)})
    assert not plan_moves([waiting(1, 0)], {0: BUSY, 1: EngineLoad(is_ready=False), 2: EngineLoad(is_draining=True)})
    assert not plan_moves([waiting(1, 0)], {0: BUSY})


def test_queued_requests_leave_a_draining_engine_at_once() -> None:
    loads = {0: EngineLoad(is_draining=True), 1: BUSY}
    queued = [waiting(1, 0, has_moved=True), waiting(2, 0)]
    assert plan_moves(queued, loads) == [Move(2, 0, 1), Move(1, 0, 1)]
