"""A front's sum of the tokens that other engines have served does not depend on how often, when or in which order the
engines report."""

import random

from hypothesis import given
from hypothesis import strategies as st

from text_generation_router.fleet.choice import IDLE_S, MAX_LIVES, ServiceBook
from text_generation_router.scheduling.request import Share

ANN, BOB = Share("ann"), Share("bob", "team")

# Reports: engine and life, then the tokens that the engine had served to each of two tenants, rising within a life.
tales = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(1, MAX_LIVES)),
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=5),
    max_size=12,
)


@given(tales, st.randoms(use_true_random=False))
def test_repeats_losses_and_another_order_change_nothing(
    told: dict[tuple[int, int], list[tuple[int, int]]], random: random.Random
) -> None:
    messages, last = [], {}
    for (engine, life), steps in told.items():
        sums = {ANN: 0.0, BOB: 0.0}
        for ann, bob in steps:
            sums = {ANN: sums[ANN] + ann, BOB: sums[BOB] + bob}
            messages.append((engine, life, sums))
        last[engine, life] = sums
    kept = [each for each in messages if each[2] is last[each[:2]] or random.random() < 0.5]
    kept += [each for each in messages if random.random() < 0.5]
    random.shuffle(kept)
    book = ServiceBook()
    for engine, life, sums in kept:
        book.take_report(engine, life, sums, 0.0)
    for share in (ANN, BOB):
        for asked in [*last, (9, 1)]:
            expected = sum(sums[share] for each, sums in last.items() if each != asked)
            assert book.elsewhere(*asked, share) == expected


def test_lives_beyond_the_remembered_ones_count_as_a_sum() -> None:
    book = ServiceBook()
    for life in range(1, 20):
        book.take_report(0, life, {ANN: 10.0}, 0.0)
    book.take_report(0, 1, {ANN: 15.0}, 0.0)
    assert book.elsewhere(0, 19, ANN) == 180.0 and book.elsewhere(1, 1, ANN) == 190.0


def test_tenants_without_new_service_are_forgotten() -> None:
    book = ServiceBook()
    book.take_report(0, 1, {ANN: 10.0, BOB: 10.0}, 0.0)
    book.take_report(0, 1, {ANN: 11.0, BOB: 10.0}, 1.0)
    book.take_report(0, 1, {}, IDLE_S)
    assert len(book) == 1 and book.elsewhere(1, 1, ANN) == 11.0 and book.elsewhere(1, 1, BOB) == 0.0


def test_tenants_whose_names_change_all_the_time_do_not_add_up() -> None:
    book = ServiceBook()
    for second in range(600):
        book.take_report(0, 1, {Share("", str(second)): 1.0}, float(second))
    assert len(book) <= 2 * IDLE_S
