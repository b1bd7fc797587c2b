from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from text_generation_common.flags.kinds import AdmissionMode
from text_generation_router.scheduling.admission import DRAWS, ENOUGH, AdmissionControl, Futures, OutputLengths, peak
from text_generation_router.scheduling.chunks import shares, shares_by_owner
from text_generation_router.scheduling.request import GenerationRequest
from text_generation_router.scheduling.running import Running


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=12))
def test_the_peak_equals_the_most_slots_held_in_a_simulation(requests: list[tuple[int, int]]) -> None:
    """Compares with a simulation step by step: each request grows by one slot a step, and stays for `left` steps."""
    held, left = (np.array(values) for values in zip(*requests, strict=True))
    steps = range(1, int(left.max()) + 1)
    walked = max(int(sum(h + t for h, stays in requests if stays >= t)) for t in steps)
    assert peak(held, left[None, :]) == walked


def test_the_highest_peak_of_several_futures_counts() -> None:
    held, left = np.array([5, 5]), np.array([[1, 1], [10, 10], [2, 3]])
    assert peak(held, left) == 5 + 5 + 20


def draws(lengths: OutputLengths, longer_than: int, most: int) -> set[int]:
    return set(lengths.draw(np.full(500, longer_than), np.full(500, most)).tolist())


def test_sampled_lengths_are_recent_ones_above_the_tokens_made_so_far() -> None:
    lengths = OutputLengths()
    for length in (10, 20, 30, 300):
        lengths.add(length)
    assert draws(lengths, longer_than=15, most=100) == {20, 30, 100}
    assert draws(lengths, longer_than=300, most=400) == {400}


def test_a_mean_length_is_that_of_the_recent_ones_above_the_tokens_made_so_far() -> None:
    lengths = OutputLengths()
    for length in (10, 20, 30, 300):
        lengths.add(length)
    cases = [(0, 1000, 90), (15, 1000, 117), (15, 100, 100), (299, 1000, 300), (300, 1000, 1000)]
    longer_than, most, means = (np.array(values) for values in zip(*cases, strict=True))
    assert lengths.mean(longer_than, most).tolist() == means.tolist(), "rounded up; the most where none is longer"


def test_lengths_are_sampled_only_from_enough_outputs() -> None:
    admission = AdmissionControl(AdmissionMode.PAST_FUTURE)
    request = Running(1, GenerationRequest((1,), 500))
    for _ in range(ENOUGH):
        assert set(admission.expect(request)) == {500}
        admission.learn(7)
    assert set(admission.expect(request)) == {7} and len(admission.expect(request)) == DRAWS


def test_only_guesses_that_a_request_has_reached_are_sampled_anew() -> None:
    lengths = OutputLengths()
    for i in range(200):
        lengths.add(i % 100 + 1)
    futures = Futures(lengths)
    requests = [Running(i, GenerationRequest((1,), 500)) for i in range(100)]
    for request in requests:
        futures.join(request)
    before = futures.totals(requests)
    for request, guesses in zip(requests, before, strict=True):
        request.output_ids.extend([0] * int(np.sort(guesses)[2]))
    after = futures.totals(requests)
    made = np.array([[len(request.output_ids)] for request in requests])
    outlived = before <= made
    assert (after[~outlived] == before[~outlived]).all() and (after > made).all() and outlived.any(axis=1).all()
    for request in requests:
        futures.leave(request)
    assert (requests[3].expected == after[3]).all()


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 100))
def test_an_unsatisfied_prompt_gets_as_much_of_the_budget_as_any_other(needs: list[int], budget: int) -> None:
    given_out = shares(needs, budget)
    assert sum(given_out) == min(budget, sum(needs))
    unserved = [share for share, need in zip(given_out, needs, strict=True) if share < need]
    assert not unserved or min(unserved) >= max(given_out) - 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 100), st.data())
def test_replayed_prompts_get_all_they_need_in_turn_and_the_others_share_the_rest(
    needs: list[int], budget: int, data: st.DataObject
) -> None:
    num_first = data.draw(st.integers(0, len(needs)))
    given_out = shares(needs, budget, num_first)
    for i in range(num_first):
        assert given_out[i] == min(needs[i], budget - sum(given_out[:i]))
    rest = budget - sum(given_out[:num_first])
    assert given_out[num_first:] == shares(needs[num_first:], rest)


Prompts = st.lists(st.tuples(st.integers(1, 50), st.sampled_from("abc")), max_size=12)


@given(Prompts, st.integers(1, 100), st.integers(1, 100))
def test_owners_get_equal_shares_of_a_step_up_to_the_most_that_one_may_have(
    prompts: list[tuple[int, str]], budget: int, most: int
) -> None:
    needs, owners = [need for need, _ in prompts], [owner for _, owner in prompts]
    given_out = shares_by_owner(needs, owners, budget, most)
    need_of, given_to = Counter[str](), Counter[str]()
    for need, owner, share in zip(needs, owners, given_out, strict=True):
        need_of[owner] += need
        given_to[owner] += share
        assert share <= need
    wanted = {owner: min(need, most) for owner, need in need_of.items()}
    assert given_to.total() == min(budget, sum(wanted.values()))
    unserved = [given_to[owner] for owner in wanted if given_to[owner] < wanted[owner]]
    assert not unserved or min(unserved) >= max(given_to.values()) - 1


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 100))
def test_the_prompts_of_one_owner_share_its_part_as_they_share_a_whole_step(needs: list[int], budget: int) -> None:
    owners = ["a"] * len(needs)
    assert shares_by_owner(needs, owners, budget, budget) == shares(needs, budget)
    assert shares_by_owner(needs, owners, 100, budget) == shares(needs, budget)
