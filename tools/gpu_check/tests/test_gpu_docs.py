"""What docs/gpu.md says is there: the tests that close a defect, the stages of the plans."""

import re
from pathlib import Path

from gpu_check.plans import PLANS

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "gpu.md").read_text()


def test_every_test_that_is_named_exists():
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    files = [path for part in ("launcher", "server", "tools") for path in (ROOT / part).rglob("test_*.py")]
    there = set(
        re.findall(r"^ *(?:async )?def (test_\w+)", "\n".join(path.read_text() for path in files), re.MULTILINE)
    )
    assert named and named <= there, named - there


def test_the_stages_of_each_plan_are_named_in_their_order():
    for plan, stages in PLANS.items():
        (line,) = re.findall(rf"^\| {plan} \|.*\|(.*)\|$", TEXT, re.MULTILINE)
        names = list(dict.fromkeys(stage.name.rstrip(" 0123456789") for stage in stages))
        assert ["environment", *line.replace("*", "").strip().split(", ")] == names
