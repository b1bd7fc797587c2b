"""Weights in every form: what they are, and their parts."""

import pytest
import torch
from weight_forms import FORMS, numbers_of, random_weight

from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_common.quantized.tensors.splits import inputs_of, joined, on_outputs, padded_inputs, size_of


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [16, 24, 48])
def test_every_form_becomes_the_numbers_that_it_stands_for(form: str, size: int) -> None:
    weight = random_weight(form, 3, 48, size)
    assert size_of(weight) == (3, 48)
    assert torch.equal(exact_weight(weight), numbers_of(weight))


@pytest.mark.parametrize("form", FORMS)
def test_some_outputs_of_a_weight_are_these_rows(form: str) -> None:
    weight = random_weight(form, 8, 32, 16)
    for rows in (slice(2, 7), [5, 0, 5]):
        assert torch.equal(exact_weight(on_outputs(weight, lambda t, rows=rows: t[rows])), exact_weight(weight)[rows])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", [range(32), range(32, 64), range(48, 90), range(8, 16), range(90, 104)], ids=str)
def test_some_inputs_of_a_weight_are_these_columns_even_if_groups_are_cut(form: str, part: range) -> None:
    weight = random_weight(form, 4, 104, 32)
    of_part = exact_weight(inputs_of(weight, part))
    assert torch.equal(of_part, exact_weight(weight)[:, part.start : part.stop])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [16, 20, 40])
def test_more_inputs_leave_the_others_as_they_are(form: str, size: int) -> None:
    weight = random_weight(form, 4, 40, size)
    padded = padded_inputs(weight, 32)
    assert size_of(padded) == (4, 64)
    numbers = exact_weight(padded)
    assert torch.equal(numbers[:, :40], exact_weight(weight)) and bool(numbers.isfinite().all())


def test_neighbours_of_one_form_become_one_weight() -> None:
    forms = ["int4 zeros", "int4 zeros", "int4", "dense", "dense", "int4", "int8", "int8", "table4", "table4", "fp8"]
    weights = [random_weight(form, 2 + i, 32, 16, seed=0 if form == "table4" else i) for i, form in enumerate(forms)]
    ones = joined(weights)
    assert [size_of(weight)[0] for weight in ones] == [2 + 3 + 4, 5 + 6, 7, 8 + 9, 10 + 11, 12]
    together = torch.cat([exact_weight(weight) for weight in weights])
    assert torch.equal(torch.cat([exact_weight(weight) for weight in ones]), together)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (random_weight("int4", 4, 64, 32), random_weight("int4", 4, 64, 20)),
        (random_weight("int4 order", 4, 64, 32, 1), random_weight("int4 order", 4, 64, 32, 2)),
        (random_weight("int4 order", 4, 64, 32), random_weight("int4", 4, 64, 32)),
        (random_weight("table4", 4, 64, 32, 1), random_weight("table4", 4, 64, 32, 2)),
        (random_weight("int8 zeros", 4, 64, 32), random_weight("int8 offsets", 4, 64, 32)),
    ],
    ids=["size", "order", "sorted", "table", "offsets"],
)  # fmt: skip
def test_weights_of_other_forms_stay_apart(first: object, second: object) -> None:
    assert len(joined([first, second])) == 2  # type: ignore[list-item]
