"""The parts in the profile of a decode step add up to the whole step."""

import pytest

from text_generation_benchmark.step_profile import PARTS, REST, as_markdown, profile_step
from text_generation_common.model_folder import demo_directory


def test_the_parts_of_a_step_make_up_the_step() -> None:
    profile = profile_step(demo_directory(), rows=3, context=20, steps=3, dtype="bfloat16")
    assert set(profile.parts) <= {*PARTS.values(), REST}
    assert {PARTS["attend"], PARTS["draw"], REST} <= set(profile.parts)
    assert all(seconds > 0 for seconds in profile.parts.values())
    assert sum(profile.parts.values()) == pytest.approx(profile.step_s)
    # 5 layers, 2 of keys and values, 4 heads of 32 numbers of 2 bytes.
    assert profile.kv_bytes == 3 * 20 * 5 * 2 * 4 * 32 * 2
    lines = as_markdown(profile).splitlines()
    assert lines[0].startswith("3 rows of 20 tokens, kernels ")
    assert len(lines) == 4 + len(profile.parts)
