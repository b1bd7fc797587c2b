"""A request that ends engines is found, whatever else happens, and costs one engine at a time."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_common.tests.examples import examples
from text_generation_router.fleet.suspects import (
    FIRST_WAIT_S,
    MAX_ALONE,
    WAIT_S,
    LostRequests,
    Suspects,
    meeting_engine,
)


class Front:
    """A front with its engines. A bad request ends its engine in the step in which it begins, or before."""

    def __init__(self, num_engines: int, num_bad: int, random: random.Random) -> None:
        self.random = random
        self.suspects = Suspects("front")
        self.engines: dict[int, dict[int, int | None]] = {
            engine: {} for engine in range(num_engines)
        }  # request: tokens that it has made there; None: it has not begun
        self.down: dict[int, set[int]] = {}  # lost engines, and which bad requests ended each
        self.waiting: list[int] = []
        self.bad = dict[int, bool]()  # each bad request, and whether its engine can report that it has begun
        self.num_bad = num_bad
        self.tokens = Counter[int]()
        self.failed = list[int]()
        self.kills = Counter[int]()
        self.next_request, self.next_loss = 0, 0

    def arrive(self) -> None:
        if self.random.random() < 0.3 and len(self.bad) < self.num_bad:
            self.bad[self.next_request] = self.random.random() < 0.7
        self.waiting.append(self.next_request)
        self.next_request += 1

    def send(self) -> None:
        """Submits the requests that may go, in random order. An engine need not begin all of them in its next step."""
        self.random.shuffle(self.waiting)
        up = [engine for engine in self.engines if engine not in self.down]
        for request in [*self.waiting]:
            if engines := self.suspects.engines_for(request, up, 0.0):
                engine = self.random.choice(engines)
                self.suspects.send(request, engine)
                self.engines[engine][request] = None
                self.waiting.remove(request)
        self.check()

    def check(self) -> None:
        having: dict[str, set[int]] = {}
        for engine, requests in self.engines.items():
            groups = {trial.group for each in requests if (trial := self.suspects.trial(each)) is not None}
            assert len(groups) <= 1, "suspects of two groups share an engine"
            for group in groups:
                having.setdefault(group, set()).add(engine)
        assert all(len(engines) == 1 for engines in having.values()), "a group is on two engines"
        for bad in self.bad:
            num_down = sum(bad in killers for killers in self.down.values())
            assert num_down <= 1, "a request has two engines down"

    def step(self, engine: int) -> None:
        requests = self.engines[engine]
        starting = [each for each, made in requests.items() if made is None and self.random.random() < 0.7]
        killers = {each for each in self.bad if each in starting}
        for request in starting:
            if self.bad.get(request, True):
                requests[request] = 0
        if killers:
            self.kills.update(killers)
            self.lose(engine, killers)
            return
        for request, made in list(requests.items()):
            if made is not None:
                requests[request] = made + 1
                self.tokens[request] += 1
                self.suspects.clear(request)
                if self.tokens[request] == 3:
                    del requests[request]

    def lose(self, engine: int, killers: set[int], is_outside: bool = False) -> None:
        self.next_loss += 1
        requests = self.engines[engine]
        begun = sorted(each for each, made in requests.items() if made is not None)
        lost = LostRequests(
            f"loss {self.next_loss}",
            begun,
            [each for each in begun if requests[each]],
            sorted(each for each, made in requests.items() if made is None),
        )
        failed = self.suspects.lose(engine, LostRequests(lost.name) if is_outside else lost, 0.0)
        self.failed += failed
        self.waiting += [request for request in requests if request not in failed]
        self.engines[engine] = {}
        self.down[engine] = killers

    def come_back(self, engine: int) -> None:
        del self.down[engine]
        self.suspects.returned(engine)


@examples(50)
@given(seed=st.integers(0, 2**32), num_engines=st.integers(1, 5), num_bad=st.integers(0, 2))
def test_bad_requests_fail_by_name_and_all_others_end(seed: int, num_engines: int, num_bad: int) -> None:
    front = Front(num_engines, num_bad, random.Random(seed))
    for turn in range(1500):
        if turn < 30:
            front.arrive()
        front.send()
        engine = front.random.randrange(num_engines)
        if engine in front.down:
            if front.random.random() < 0.3:
                front.come_back(engine)
        elif front.random.random() < 0.02:
            front.lose(engine, set(), is_outside=True)
        else:
            front.step(engine)
    assert sorted(front.failed) == sorted(front.bad)
    assert all(front.tokens[request] == 3 for request in range(30) if request not in front.bad)
    for bad, count in front.kills.items():
        # A bad request that does not begin may end the engine that tries another bad request alone, MAX_ALONE times.
        assert count <= 3 + MAX_ALONE + (0 if front.bad[bad] else MAX_ALONE)
    assert not front.suspects._groups and not front.suspects._trials


def lost_with(suspects: Suspects, *aboard: int, engine: int = 0, name: str = "loss") -> list[int]:
    for request in aboard:
        suspects.send(request, engine)
    ended = suspects.lose(engine, LostRequests(name, aboard, aboard), 0.0)
    suspects.returned(engine)
    return ended


def groups(suspects: Suspects, *requests: int) -> list[str]:
    return [trial.group if (trial := suspects.trial(each)) else "" for each in requests]


def test_a_group_parts_into_halves_and_then_into_single_requests() -> None:
    suspects = Suspects("f")
    assert not lost_with(suspects, 1, 2, 3, 4)
    assert groups(suspects, 1, 2, 3, 4) == ["loss"] * 4
    assert not lost_with(suspects, 1, 2, 3, 4, engine=1, name="two")
    assert groups(suspects, 1, 2, 3, 4) == ["two/0", "two/0", "two/1", "two/1"]
    assert not lost_with(suspects, 3, 4, engine=1, name="three")
    assert groups(suspects, 3, 4) == ["three/f.3", "three/f.4"] and suspects.losses(4) == 3
    assert [lost_with(suspects, 4) for _ in range(MAX_ALONE)] == [[], [], [4]]
    assert 4 not in suspects and 3 in suspects


def test_an_engine_that_tries_a_suspect_alone_takes_no_other_request() -> None:
    suspects = Suspects()
    lost_with(suspects, 1)
    lost_with(suspects, 1)
    assert suspects.trial(1) == ("loss/.1", True)
    assert suspects.engines_for(1, range(3), 0.0) == suspects.engines_for(9, range(3), 0.0) == [0, 1, 2]
    suspects.send(1, 2)
    assert suspects.engines_for(9, range(3), 0.0) == [0, 1]
    suspects.clear(1)
    assert suspects.engines_for(9, range(3), 0.0) == [0, 1, 2]


def test_suspects_of_another_loss_wait_for_an_engine_of_their_own() -> None:
    suspects = Suspects()
    for engine in (0, 1):
        lost_with(suspects, 10 * engine, 10 * engine + 1, engine=engine, name=f"loss {engine}")
    suspects.send(0, 0)
    assert suspects.engines_for(1, [0, 1], 0.0) == [0] and suspects.engines_for(11, [0, 1], 0.0) == [1]
    suspects.send(11, 1)
    assert suspects.engines_for(7, [0, 1], 0.0) == [0, 1]
    suspects.clear(0)
    assert suspects.engines_for(10, [0, 1], 0.0) == [1] and suspects.engines_for(1, [0, 1], 0.0) == [0]


def test_a_suspect_that_its_engine_refuses_may_go_to_another_one() -> None:
    suspects = Suspects()
    lost_with(suspects, 1)
    suspects.send(1, 0)
    assert suspects.engines_for(1, [1], 0.0) == []
    suspects.take_back(1)
    assert suspects.engines_for(1, [1], 0.0) == [1] and 1 in suspects


def test_a_loss_from_outside_makes_no_suspects() -> None:
    suspects = Suspects()
    suspects.send(1, 0)
    assert not suspects.lose(0, LostRequests("killed"), 0.0) and 1 not in suspects


def test_requests_that_had_not_begun_stay_in_their_group() -> None:
    suspects = Suspects()
    lost_with(suspects, 1, 2, 3)
    for request in (1, 2, 3):
        suspects.send(request, 0)
    suspects.lose(0, LostRequests("second", [1, 2], (), [3]), 0.0)
    assert groups(suspects, 1, 2, 3) == ["second/.1", "second/.2", "loss"]


def test_requests_that_had_made_no_token_wait_until_their_engine_is_back_and_streams_go_on() -> None:
    suspects = Suspects()
    suspects.lose(0, LostRequests("loss", [1, 2], [1]), 5.0)
    assert groups(suspects, 1, 2) == ["loss", "loss/new"]
    assert suspects.engines_for(1, [1, 2], 5.0) == [1, 2] and suspects.engines_for(2, [1, 2], 5.0) == []
    assert suspects.engines_for(2, [1, 2], 5.0 + FIRST_WAIT_S) == [1, 2], "the engine's machine may be lost"
    suspects.returned(0)
    assert suspects.engines_for(2, [0, 1, 2], 5.0) == [0, 1, 2]


def test_all_suspects_wait_after_their_second_loss_until_both_engines_are_back() -> None:
    suspects = Suspects()
    suspects.lose(0, LostRequests("first", [1, 2], [1, 2]), 5.0)
    for request in (1, 2):
        suspects.send(request, 1)
    suspects.lose(1, LostRequests("second", [1, 2]), 6.0)
    for back in (1, 0):
        assert all(suspects.engines_for(request, [1, 2], 6.0) == [] for request in (1, 2))
        suspects.returned(back)
    assert suspects.engines_for(1, [1, 2], 6.0) == [1, 2]


def test_a_request_in_the_queue_is_a_suspect_from_its_second_loss_on_and_begins_anew_with_a_token() -> None:
    suspects = Suspects()
    for name in ("one", "two"):
        assert 7 not in suspects
        suspects.lose(0, LostRequests(name, [], [], [7]), 0.0)
        suspects.returned(0)
    assert groups(suspects, 7) == ["two/queued"] and suspects.losses(7) == 2
    suspects.clear(7)
    suspects.lose(0, LostRequests("three", [], [], [7]), 0.0)
    assert 7 not in suspects


def test_a_request_in_the_queue_waits_until_its_engine_is_back_that_it_may_have_ended() -> None:
    suspects = Suspects()
    suspects.lose(0, LostRequests("loss", [], [], [7]), 5.0)
    assert suspects.engines_for(7, [1, 2], 5.0) == [] and not suspects.are_free and 7 not in suspects
    assert suspects.engines_for(8, [1, 2], 5.0) == [1, 2], "no other request waits"
    assert suspects.engines_for(7, [1, 2], 5.0 + FIRST_WAIT_S) == [1, 2], "the engine's machine may be lost"
    suspects.inherit(7, 9)
    suspects.returned(0)
    assert suspects.engines_for(7, [0, 1], 5.0) == suspects.engines_for(9, [0, 1], 5.0) == [0, 1]
    assert suspects.are_free


def test_a_request_whose_engine_lives_waits_for_nothing() -> None:
    suspects = Suspects()
    suspects.lose(0, LostRequests("cut off", queued=[7], has_died=False), 5.0)
    assert suspects.engines_for(7, [1], 5.0) == [1] and suspects.are_free


def test_the_loss_of_an_engine_that_tries_a_suspect_alone_counts_against_no_other() -> None:
    suspects = Suspects()
    lost_with(suspects, 1)
    lost_with(suspects, 1)
    for name in ("three", "four", "five"):
        suspects.send(1, 0)
        suspects.lose(0, LostRequests(name, [1], [], [7]), 0.0)
        suspects.returned(0)
    assert 7 not in suspects


def test_requests_are_cleared_if_their_engine_lives() -> None:
    suspects = Suspects()
    lost_with(suspects, 1, 2, name="cut")
    suspects.absolve("cut")
    assert 1 not in suspects and 2 not in suspects
    lost_with(suspects, 3, name="death")
    lost_with(suspects, 3, name="death 2")
    lost_with(suspects, 3, name="cut")
    assert suspects.losses(3) == 3
    suspects.absolve("cut")
    assert suspects.losses(3) == 2


@pytest.mark.parametrize("lost", [None, 0, 1, 2])
def test_fronts_choose_the_same_engine_for_a_group(lost: int | None) -> None:
    """Whatever numbers the fronts gave to the engines; and their choice stays the same if another engine is lost."""
    names = {0: "a:1", 1: "b:1", 2: "c:1"}
    chosen = names[meeting_engine("loss", names)]
    others = {9 - engine: name for engine, name in names.items() if engine != lost or name == chosen}
    assert others[meeting_engine("loss", others)] == chosen
    assert {meeting_engine(f"loss {i}", names) for i in range(40)} == {0, 1, 2}


def silent(name: str, *requests: int, is_sure: bool = True) -> LostRequests:
    return LostRequests(name, silent=requests, is_sure=is_sure)


def test_a_request_that_hangs_each_engine_is_found_and_costs_one_engine_at_a_time_after_the_second() -> None:
    suspects = Suspects("f")
    for engine in (0, 1):
        assert 7 not in suspects and suspects.engines_for(7, [2], 0.0) == [2], "one silence makes no suspects"
        suspects.send(7, engine)
        suspects.send(8, engine)
        assert not suspects.lose(engine, silent(f"life {engine}", 7, 8), 0.0)
    assert groups(suspects, 7, 8) == ["life 1/silent"] * 2
    assert suspects.engines_for(7, [2], 0.0) == [], "two engines may be hung"
    ended, losses = list[int](), 2
    while not ended:
        for engine in (0, 1, 2):
            suspects.returned(engine, "another life")
        assert suspects.engines_for(7, [2], 0.0) == [2]
        suspects.send(7, 2)
        if 8 in suspects and not suspects.trial(8).is_alone:
            suspects.send(8, 2)
        ended = suspects.lose(2, silent(f"life {losses}", 7, *([8] if losses == 2 else [])), 0.0)
        losses += 1
    assert ended == [7] and losses == 3 + MAX_ALONE and suspects.trial(8).is_alone
    suspects.clear(8)
    assert suspects.are_free


def test_a_token_or_an_engine_that_had_one_clears_a_request_of_silences() -> None:
    suspects = Suspects()
    for turn in range(8):
        suspects.send(7, 0)
        suspects.lose(0, silent(f"life {turn}", 7), 0.0)
        suspects.returned(0, "next")
        suspects.clear(7)
    assert 7 not in suspects and not suspects._silences._met


def test_a_silence_that_may_be_the_fronts_own_counts_until_the_engine_comes_back_with_the_same_life() -> None:
    suspects = Suspects()
    for life in ("a", "a", "b", "c"):
        suspects.send(7, 0)
        suspects.lose(0, silent(life, 7, is_sure=False), 0.0)
        assert not suspects.returned(0, life), "the link was cut"
        assert 7 not in suspects
    for life in ("d", "e"):
        assert 7 not in suspects
        suspects.send(7, 0)
        suspects.lose(0, silent(life, 7, is_sure=False), 0.0)
        assert suspects.engines_for(7, [1], 0.0) == ([1] if life == "d" else []), "the second waits for the engine"
        suspects.returned(0, life + "'")
    assert groups(suspects, 7) == ["e/silent"] and suspects.engines_for(7, [0], 0.0) == [0]
    ended = list[int]()
    for number in range(1 + MAX_ALONE):
        suspects.send(7, 0)
        assert not ended and not suspects.lose(0, silent(f"life {number}", 7, is_sure=False), 0.0)
        ended = suspects.returned(0, f"life {number + 1}")
    assert ended == [7] and suspects.are_free


def test_silences_that_may_be_the_fronts_own_count_for_a_request_that_has_gone_on_elsewhere() -> None:
    suspects = Suspects()
    for engine in (0, 1):
        assert 7 not in suspects
        suspects.send(7, engine)
        suspects.lose(engine, silent(f"life {engine}", 7, is_sure=False), 0.0)
    assert groups(suspects, 7) == ["life 1/silent"]
    for engine in (0, 1):
        assert suspects.engines_for(7, [2], 0.0) == [], "engine 0 or 1 may be hung"
        suspects.returned(engine, "another life")
    assert suspects.engines_for(7, [2], 0.0) == [2]


def test_a_suspects_silence_that_may_be_the_fronts_own_counts_only_if_the_suspect_waits_for_the_engine() -> None:
    suspects = Suspects()
    for engine in (0, 1):
        suspects.send(7, engine)
        suspects.lose(engine, silent(f"life {engine}", 7), 0.0)
    for engine in (0, 1):
        suspects.returned(engine, "another life")
    for later, losses in ((0.0, 3), (WAIT_S, 3), (0.0, 4)):
        suspects.send(7, 2)
        suspects.lose(2, silent("life", 7, is_sure=False), 0.0)
        assert suspects.engines_for(7, [0], 1.0) == []
        if suspects.engines_for(7, [0], later):
            suspects.send(7, 0)
            suspects.take_back(7)
        suspects.returned(2, "another life")
        assert suspects.losses(7) == losses


def test_suspects_of_two_fronts_that_are_tried_alone_have_groups_of_their_own() -> None:
    """The halves of a group on two fronts may have one request each: one engine must not try both at once."""
    fronts = [Suspects("a"), Suspects("b")]
    for suspects in fronts:
        for loss in ("first", "second"):
            suspects.send(1, 0)
            suspects.lose(0, LostRequests(loss, [1]), 0.0)
    assert all(suspects.trial(1).is_alone for suspects in fronts)
    assert len({suspects.trial(1).group for suspects in fronts}) == 2


def test_a_suspect_that_ends_engines_before_they_tell_of_its_begin_is_ended() -> None:
    suspects = Suspects()
    losses, ended = 0, list[int]()
    while not ended:
        suspects.send(1, 0)
        is_told = losses == 0
        ended = suspects.lose(0, LostRequests(f"loss {losses}", [1] * is_told, (), [1] * (not is_told)), 0.0)
        losses += 1
    assert ended == [1] and losses == 3 + MAX_ALONE
