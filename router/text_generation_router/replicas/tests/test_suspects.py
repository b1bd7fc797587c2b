"""A request that ends engines is found, whatever else happens, and costs one engine at a time."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from text_generation_router.replicas.suspects import MAX_ALONE, Suspects, meeting_engine


class Front:
    """A front with its engines. A bad request ends its engine in the step in which it begins."""

    def __init__(self, num_engines: int, num_bad: int, random: random.Random) -> None:
        self.random = random
        self.suspects = Suspects()
        self.engines: dict[int, dict[int, bool]] = {
            engine: {} for engine in range(num_engines)
        }  # request: has it begun
        self.waiting: list[int] = []
        self.bad = set[int]()
        self.num_bad = num_bad
        self.tokens = Counter[int]()
        self.failed = list[int]()
        self.kills = Counter[int]()
        self.next_request, self.next_loss = 0, 0

    def arrive(self) -> None:
        if self.random.random() < 0.3 and len(self.bad) < self.num_bad:
            self.bad.add(self.next_request)
        self.waiting.append(self.next_request)
        self.next_request += 1

    def send(self) -> None:
        """Submits what may go, in any order. An engine may not begin all of it in its next step."""
        self.random.shuffle(self.waiting)
        for request in [*self.waiting]:
            if engines := self.suspects.engines_for(request, self.engines):
                engine = self.random.choice(engines)
                self.suspects.send(request, engine)
                self.engines[engine][request] = False
                self.waiting.remove(request)
        self.check()

    def check(self) -> None:
        for requests in self.engines.values():
            groups = {self.suspects.key(each) for each in requests if each in self.suspects}
            assert len(groups) <= 1, "suspects of two losses share an engine"
        for key in {self.suspects.key(each) for each in self.waiting if each in self.suspects}:
            having = [
                engine
                for engine, requests in self.engines.items()
                if any(each in self.suspects and self.suspects.key(each) == key for each in requests)
            ]
            assert len(having) <= 1, "a group is on two engines"

    def step(self, engine: int) -> None:
        requests = self.engines[engine]
        for request in requests:
            requests[request] |= self.random.random() < 0.7
        begun = [request for request, has_begun in requests.items() if has_begun]
        killers = self.bad.intersection(begun)
        if killers:
            self.kills.update(killers)
            self.lose(engine, begun)
            return
        for request in begun:
            self.tokens[request] += 1
            self.suspects.clear(request)
            if self.tokens[request] == 3:
                del requests[request]

    def lose(self, engine: int, begun: list[int], is_outside: bool = False) -> None:
        self.next_loss += 1
        failed = self.suspects.lose(engine, f"loss {self.next_loss}", sorted(begun), is_outside)
        self.failed += failed
        self.waiting += [request for request in self.engines[engine] if request not in failed]
        self.engines[engine] = {}


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), num_engines=st.integers(1, 5), num_bad=st.integers(0, 2))
def test_bad_requests_fail_by_name_and_all_others_end(seed: int, num_engines: int, num_bad: int) -> None:
    front = Front(num_engines, num_bad, random.Random(seed))
    for turn in range(400):
        if turn < 30:
            front.arrive()
        front.send()
        engine = front.random.randrange(num_engines)
        if front.random.random() < 0.02:
            begun = [request for request, has_begun in front.engines[engine].items() if has_begun]
            front.lose(engine, begun, is_outside=True)
        else:
            front.step(engine)
    assert sorted(front.failed) == sorted(front.bad)
    assert all(front.tokens[request] == 3 for request in range(30) if request not in front.bad)
    assert all(count <= 3 + MAX_ALONE for count in front.kills.values())
    assert not front.suspects._groups and not front.suspects._trials


def lost_with(suspects: Suspects, *aboard: int, engine: int = 0) -> list[int]:
    for request in aboard:
        suspects.send(request, engine)
    return suspects.lose(engine, "loss", aboard)


def groups(suspects: Suspects, *requests: int) -> list[str]:
    return [suspects.key(request) for request in requests]


def test_a_group_parts_into_halves_and_then_into_single_requests() -> None:
    suspects = Suspects()
    assert not lost_with(suspects, 1, 2, 3, 4)
    assert groups(suspects, 1, 2, 3, 4) == ["loss"] * 4
    assert not lost_with(suspects, 1, 2, 3, 4, engine=1)
    assert groups(suspects, 1, 2, 3, 4) == ["loss/0", "loss/0", "loss/1", "loss/1"]
    assert not lost_with(suspects, 3, 4, engine=1)
    assert groups(suspects, 3, 4) == ["loss/1/3", "loss/1/4"] and suspects.losses(4) == 3
    assert [lost_with(suspects, 4) for _ in range(MAX_ALONE)] == [[], [], [4]]
    assert 4 not in suspects and 3 in suspects


def test_an_engine_that_tries_a_suspect_alone_takes_no_other_request() -> None:
    suspects = Suspects()
    lost_with(suspects, 1)
    assert suspects.engines_for(1, range(3)) == [0, 1, 2] and suspects.engines_for(9, range(3)) == [0, 1, 2]
    suspects.send(1, 2)
    assert suspects.engines_for(9, range(3)) == [0, 1]
    suspects.clear(1)
    assert suspects.engines_for(9, range(3)) == [0, 1, 2]


def test_suspects_of_another_loss_wait_for_an_engine_of_their_own() -> None:
    suspects = Suspects()
    for engine in (0, 1):
        lost_with(suspects, 10 * engine, 10 * engine + 1, engine=engine)
    suspects.send(0, 0)
    assert suspects.engines_for(1, [0, 1]) == [0] and suspects.engines_for(11, [0, 1]) == [1]
    suspects.send(11, 1)
    assert suspects.engines_for(7, [0, 1]) == [0, 1]
    suspects.clear(0)
    assert suspects.engines_for(10, [0, 1]) == [1] and suspects.engines_for(1, [0, 1]) == [0]


def test_a_loss_from_outside_makes_no_suspects() -> None:
    suspects = Suspects()
    suspects.send(1, 0)
    assert not suspects.lose(0, "killed", [1], is_outside=True) and 1 not in suspects


def test_requests_that_had_not_begun_stay_in_their_group() -> None:
    suspects = Suspects()
    lost_with(suspects, 1, 2, 3)
    for request in (1, 2, 3):
        suspects.send(request, 0)
    suspects.lose(0, "second", [1, 2])
    assert groups(suspects, 1, 2, 3) == ["loss/0", "loss/1", "loss"]


@pytest.mark.parametrize("lost", [None, 0, 1, 2])
def test_fronts_choose_the_same_engine_for_a_group(lost: int | None) -> None:
    """Whatever numbers they gave to the engines, and the same as before if another engine has gone."""
    names = {0: "a:1", 1: "b:1", 2: "c:1"}
    chosen = names[meeting_engine("loss", names)]
    others = {9 - engine: name for engine, name in names.items() if engine != lost or name == chosen}
    assert others[meeting_engine("loss", others)] == chosen
    assert {meeting_engine(f"loss {i}", names) for i in range(40)} == {0, 1, 2}
