"""The parts in the profile of a step add up to the whole step, and each is compared with its own limit."""

import pytest

from text_generation_benchmark.micro.profile import (
    ATTENTION,
    PARTS,
    PRODUCTS,
    REST,
    SAMPLING,
    StepProfile,
    as_markdown,
    profile_step,
)
from text_generation_benchmark.roofline import Ceilings, StepPart

KEYS = 5 * 2 * 4 * 32 * 2  # bytes of a token: layers, keys and values, heads, numbers of a head, bytes of a number


def part(profile: StepProfile, name: str) -> StepPart:
    return next(part for part in profile.work if part.name == name)


def test_the_parts_of_a_step_make_up_the_step() -> None:
    profile = profile_step(rows=3, context=20, steps=3, dtype="bfloat16")
    assert set(profile.parts) <= {*PARTS.values(), REST}
    assert {ATTENTION, SAMPLING, REST} <= set(profile.parts)
    assert all(seconds > 0 for seconds in profile.parts.values())
    assert sum(profile.parts.values()) == pytest.approx(profile.step_s)
    assert part(profile, "attention").bytes == 3 * 20 * KEYS


def test_weights_keys_and_values_in_8_bits_are_counted_as_such() -> None:
    profile = profile_step(
        rows=3, context=20, steps=3, dtype="bfloat16", quantize="int8", activations="int8", kv_cache="int8"
    )
    assert set(profile.parts) <= {*PARTS.values(), REST}
    assert part(profile, "attention").bytes == 3 * 20 * (KEYS // 2 + KEYS // 2 // 32 * 4)
    whole = part(profile_step(rows=3, context=20, steps=3, dtype="bfloat16"), "weights")
    assert part(profile, "weights").bytes == whole.bytes // 2


def test_a_prompt_behind_other_tokens_is_computed_again_in_each_step() -> None:
    profile = profile_step(prompt=16, depth=8, steps=3, dtype="bfloat16")
    assert set(profile.parts) <= {*PARTS.values(), REST}
    assert sum(profile.parts.values()) == pytest.approx(profile.step_s)
    assert part(profile, "attention").bytes == 24 * KEYS
    assert profile.about.startswith("16 tokens of a prompt behind 8, kernels ")


def test_each_part_of_the_table_has_its_share_of_its_limit() -> None:
    """Products: 1 GB in 50 ms at 40 GB/s. Attention: 2 GFLOP in 4 ms at 1,000 GFLOPS."""
    seconds = {PRODUCTS: 0.05, ATTENTION: 0.004, SAMPLING: 0.002, REST: 0.004}
    work = (StepPart("weights", 8 * 10**8, 10**9), StepPart("attention", 10**6, 2 * 10**9), StepPart("head", 2 * 10**8))
    text = as_markdown(StepProfile("m", 0.06, seconds, work, False), Ceilings(4e10, 1e12))
    assert text.startswith("m: 60.00 ms a step. Memory reads 40.0 GB/s, products make 1,000 GFLOPS.")
    assert "| matrix products | 50.00 | 83.3% | 20.0 | 20 | 50.0% |" in text
    assert "| attention | 4.00 | 6.7% | 0.2 | 500 | 50.0% |" in text
    assert "| everything else: Python, torch | 4.00 | 6.7% |  |  |  |" in text
    assert text.endswith("| the step | 60.00 | 100.0% | 16.7 | 50 | 45.0% |")
    experts = as_markdown(StepProfile("m", 0.06, seconds, work, True), Ceilings(4e10, 1e12))
    assert "| matrix products | 50.00 | 83.3% |  |  |  |" in experts
