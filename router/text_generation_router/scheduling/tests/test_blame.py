"""Tests which losses count against a request, and which events clear these counts."""

import numpy as np
import pytest

from text_generation_router.scheduling.blame import (
    DECODED,
    MAX_COUNTS,
    MAX_LOSSES,
    MAX_SUSPICIONS,
    MAX_TRIES,
    Blame,
    reaches,
)
from text_generation_router.scheduling.request import Arrival
from text_generation_router.scheduling.step import Chunk, ForwardStep


def arrived(request_id: int) -> Arrival:
    return 0.0, request_id


def suspect() -> Blame:
    blame = Blame()
    for _ in range(MAX_SUSPICIONS):
        blame.meet_loss(8, was_alone=False, newest=arrived(9))
    return blame


def step(number: int, decode_ids: tuple[int, ...], *chunks: tuple[int, int, int]) -> ForwardStep:
    slots = np.arange(len(decode_ids), dtype=np.int32)
    return ForwardStep(number, decode_ids, slots, tuple(Chunk(i, a, b, False, None) for i, a, b in chunks))


def test_a_suspect_with_others_in_its_steps_is_never_ended() -> None:
    blame = suspect()
    for _ in range(20):
        blame.meet_loss(8, was_alone=False, newest=arrived(9))
    assert blame.runs_alone and not blame.ends_request


@pytest.mark.parametrize("was_alone", [True, False])
def test_the_first_losses_only_raise_a_suspicion_alone_or_not(was_alone: bool) -> None:
    blame = Blame()
    for number in range(1, MAX_LOSSES + 1):
        assert not blame.ends_request and blame.runs_alone == (number > MAX_SUSPICIONS)
        blame.meet_loss(8, was_alone=was_alone or blame.runs_alone, newest=arrived(9))
    assert blame.ends_request


def test_a_token_clears_all_blame_and_a_new_chunk_all_but_running_alone() -> None:
    by_chunk, by_token = suspect(), suspect()
    by_chunk.note_chunk(4)
    by_token.note_token()
    assert (by_chunk.runs_alone, by_token.runs_alone) == (True, False)
    for blame in (by_chunk, by_token):
        for _ in range(MAX_LOSSES - 1):
            blame.meet_loss(8, was_alone=True, newest=arrived(9))
            assert not blame.ends_request


def test_a_repeated_chunk_clears_no_blame_and_a_loss_in_proven_tokens_does_not_count() -> None:
    blame = Blame()
    blame.note_chunk(8)
    for _ in range(3 * MAX_LOSSES):
        blame.meet_loss(8, was_alone=True, newest=arrived(9))
    assert blame == Blame(proven=8)
    for _ in range(MAX_LOSSES):
        blame.note_chunk(8)
        blame.meet_loss(16, was_alone=True, newest=arrived(9))
    assert blame.ends_request


def test_a_counted_loss_moves_a_suspect_behind_all_requests_that_are_there() -> None:
    """A suspect goes after requests that are there, but before requests that come later. Otherwise it would never run
    while new requests arrive and shards die."""
    counted, twice = suspect(), suspect()
    for blame, losses in ((counted, 1), (twice, 2)):
        for _ in range(losses):
            blame.meet_loss(8, was_alone=True, newest=arrived(9))
    blames = {1: Blame(), 2: twice, 3: counted, 4: suspect(), 9: Blame(), 10: Blame()}
    assert sorted(blames, key=lambda i: blames[i].turn(arrived(i))) == [1, 4, 9, 3, 2, 10]
    twice.note_token()
    assert sorted(blames, key=lambda i: blames[i].turn(arrived(i))) == [1, 2, 4, 9, 3, 10]


def test_a_counted_loss_moves_a_suspect_behind_what_a_later_loss_has_stopped() -> None:
    counted, stopped = suspect(), Blame()
    counted.note_replay(1, had_chunks=True)
    stopped.note_replay(2, had_chunks=True)
    assert counted.turn(arrived(1)) < stopped.turn(arrived(2))
    counted.meet_loss(8, was_alone=True, newest=arrived(9))
    counted.note_replay(3, had_chunks=True)
    assert counted.turn(arrived(1)) > stopped.turn(arrived(2))


def test_what_an_earlier_loss_has_stopped_starts_first_and_goes_back_after_its_tries() -> None:
    waiting, others, places = Blame(), list[Blame](), []
    for loss in range(1, 2 * MAX_TRIES + 1):
        others.append(Blame())
        for blame in (waiting, others[-1]):
            blame.note_replay(loss, had_chunks=True)
        blames = {1: waiting, **dict(enumerate(others, start=2))}
        places.append(sorted(blames, key=lambda i: blames[i].turn(arrived(i))).index(1))
    assert places == [0] * MAX_TRIES + [MAX_TRIES] * MAX_TRIES
    waiting.note_token()
    assert not waiting.is_replayed and waiting == Blame()


def test_reaches_are_the_furthest_chunk_ends_and_decodes_beyond_any_chunk() -> None:
    steps = [step(1, (5,), (6, 0, 4), (7, 0, 3)), step(2, (5, 6), (7, 3, 9))]
    assert reaches(steps) == {5: DECODED, 6: DECODED, 7: 9}
    assert reaches([]) == {}


def test_a_request_is_ended_at_its_fifth_loss() -> None:
    assert MAX_COUNTS + MAX_SUSPICIONS == MAX_LOSSES == 5
