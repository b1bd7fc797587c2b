"""The sampling parameters that router and shard share: neutral by default, and the same on both sides of the wire."""

from dataclasses import fields, replace

import pytest

from text_generation_common.sampling import NAMES, NEUTRAL, WARPERS, Sampling
from text_generation_common.sampling_wire import LISTS, SCALARS, from_pb, to_pb
from text_generation_proto import generate_pb2 as pb

# For every parameter a value that is not neutral and that 32 bits represent exactly.
EVERYTHING = Sampling(
    do_sample=True, temperature=0.5, top_k=2**32 - 1, top_p=0.25, min_p=0.125, typical_p=0.75, seed=2**64 - 1,
    repetition_penalty=1.5, frequency_penalty=-0.5, watermark=True, top_n_tokens=3, logit_bias=((3, -1.5), (9, 0.0)),
    presence_penalty=0.25, allowed_token_ids=(2**32 - 1, 0, 9), bad_words_ids=((5,), (6, 0, 7)),
    min_new_tokens=2**32 - 1, end_token_ids=(0, 7), grammar='{"grammars": []}',
)  # fmt: skip


def sent(sampling: Sampling) -> pb.Request:
    request = pb.Request()
    to_pb(sampling, request)
    received = pb.Request()
    received.ParseFromString(request.SerializeToString())
    return received


def test_the_default_draws_nothing_and_changes_no_logit() -> None:
    assert Sampling(False, 1.0, 0, 1.0, 0.0, 1.0, 0, 1.0, 0.0, False, 0, ()) == NEUTRAL
    assert not NEUTRAL.warps


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_comes_over_the_wire(name: str) -> None:
    value = getattr(EVERYTHING, name)
    assert value != getattr(NEUTRAL, name)
    assert from_pb(sent(replace(NEUTRAL, **{name: value}))) == replace(NEUTRAL, **{name: value})


def test_parameters_do_not_touch_each_other_on_the_wire() -> None:
    assert from_pb(sent(EVERYTHING)) == EVERYTHING
    assert from_pb(sent(NEUTRAL)) == NEUTRAL


def test_each_field_of_the_wire_is_a_parameter_and_has_its_number() -> None:
    numbers = {field.name: field.number for field in pb.NextTokenChooserParameters.DESCRIPTOR.fields}
    names = {field.name for field in fields(Sampling)} - {"top_n_tokens"}
    assert set(numbers) == {*SCALARS, *LISTS, "logit_bias", "bad_words_ids"} == names
    assert {name: number for name, number in numbers.items() if number < 100} == {
        "temperature": 1, "top_k": 2, "top_p": 3, "typical_p": 4, "do_sample": 5, "seed": 6, "repetition_penalty": 7,
        "watermark": 8, "frequency_penalty": 9, "grammar": 10,
    }  # fmt: skip


def test_warpers_and_only_they_warp() -> None:
    for name in NAMES:
        assert replace(NEUTRAL, **{name: getattr(EVERYTHING, name)}).warps == (name in WARPERS)
    assert not EVERYTHING.without_warpers().warps
    others = {name: getattr(EVERYTHING, name) for name in NAMES if name not in WARPERS}
    assert EVERYTHING.without_warpers() == Sampling(**others)
