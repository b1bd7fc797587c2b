"""The engine with the best score is chosen; queued requests move where they start earlier."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from text_generation_router.replicas.choice import LOAD_WEIGHT, EngineChoice, EngineLoad
from text_generation_router.replicas.moves import Move, QueuedRequest, plan_moves


def choice_of(*loads: EngineLoad, turn: int = 0) -> EngineChoice:
    choice = EngineChoice(len(loads), turn)
    for engine, load in enumerate(loads):
        choice.tell(engine, load, 0)
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
        EngineLoad(rows, queued // 3, queued - queued // 3, is_ready=up, is_draining=drains)
        for queued, rows, up, drains in loads
    ]
    counts = st.lists(st.integers(0, 20), min_size=len(told), max_size=len(told))
    matched, blocks = np.array(data.draw(counts)), 20
    without = data.draw(st.sets(st.integers(0, len(told) - 1), max_size=2))
    chosen = choice_of(*told, turn=3).choose(matched, blocks, without)
    open_engines = [i for i, each in enumerate(told) if each.is_ready and not each.is_draining and i not in without]
    if not open_engines:
        assert chosen is None
        return
    load = {i: told[i].running + told[i].uncomputed for i in open_engines}
    mean, least = sum(load.values()) / len(load), min(load.values())
    score = {i: matched[i] / blocks - LOAD_WEIGHT * (load[i] - least) / (mean + 1) for i in open_engines}
    assert chosen in open_engines and score[chosen] >= max(score.values()) - 1e-9


def test_of_equal_scores_the_less_loaded_engine_is_chosen_then_the_next_in_turn() -> None:
    idle = choice_of(*[EngineLoad()] * 3, turn=1)
    assert [idle.choose(NOTHING, 0) for _ in range(4)] == [2, 0, 1, 2]
    # 1/2 cached makes up for LOAD_WEIGHT × (load − least) / (mean + 1) = 0.5 × 15 / 15.
    uneven = choice_of(EngineLoad(running=20), EngineLoad(running=5), EngineLoad(running=17))
    assert uneven.choose(np.array([1, 0, 0]), 2) == 1


def test_what_was_sent_counts_until_the_engine_has_told_of_it() -> None:
    choice = choice_of(EngineLoad(), EngineLoad(running=3))
    choice.send(0, index=1, tokens=100)
    choice.send(0, index=2, tokens=10)
    assert choice.load(0) == 112 and choice.choose(NOTHING[:2], 0) == 1
    choice.tell(0, EngineLoad(running=1, computing_tokens=60), newest=1)
    assert choice.load(0) == 72
    choice.tell(0, EngineLoad(running=2), newest=2)
    assert choice.load(0) == 2 and choice.choose(NOTHING[:2], 0) == 0


def test_engines_that_are_unready_draining_or_lost_are_out_until_they_tell_otherwise() -> None:
    choice = EngineChoice(3)
    assert choice.choose(NOTHING, 0) is None
    choice.tell(0, EngineLoad(is_ready=False), 0)
    choice.tell(1, EngineLoad(is_draining=True), 0)
    choice.tell(2, EngineLoad(running=9), 0)
    assert choice.open == [2]
    choice.lose(2)
    assert choice.choose(NOTHING, 0) is None and choice.told(2) is None
    choice.tell(0, EngineLoad(), 0)
    assert choice.choose(np.array([0, 9, 9]), 9) == 0


def waiting(index: int, engine: int, tokens: int = 100, has_moved: bool = False) -> QueuedRequest:
    return QueuedRequest(index, engine, tokens, has_moved)


BUSY, FREE = EngineLoad(running=9, waiting_tokens=1000, wait_s=10.0), EngineLoad()


def test_newest_queued_requests_move_until_the_waits_are_about_equal() -> None:
    moves = plan_moves([waiting(i, 0) for i in range(1, 11)], {0: BUSY, 1: FREE})
    assert [move.index for move in moves] == [10, 9, 8] and {(m.source, m.target) for m in moves} == {(0, 1)}


def test_a_request_moves_once_and_only_for_a_gain() -> None:
    assert not plan_moves([waiting(1, 0, has_moved=True)], {0: BUSY, 1: FREE})
    assert not plan_moves([waiting(1, 0)], {0: EngineLoad(1, 1000, wait_s=0.9), 1: FREE})
    assert not plan_moves([waiting(1, 0)], {0: BUSY, 1: EngineLoad(9, 1000, wait_s=5.0)})
    assert not plan_moves([waiting(1, 0)], {0: BUSY, 1: EngineLoad(is_ready=False), 2: EngineLoad(is_draining=True)})
    assert not plan_moves([waiting(1, 0)], {0: BUSY})


def test_queued_requests_leave_a_draining_engine_at_once() -> None:
    loads = {0: EngineLoad(is_draining=True), 1: BUSY}
    assert plan_moves([waiting(1, 0, has_moved=True)], loads) == [Move(1, 0, 1)]
