"""The tests that docs/gpu.md names, because they close a defect, exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_test_that_is_named_exists():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "gpu.md").read_text()))
    files = [path for part in ("launcher", "server", "tools") for path in (ROOT / part).rglob("test_*.py")]
    there = set(
        re.findall(r"^ *(?:async )?def (test_\w+)", "\n".join(path.read_text() for path in files), re.MULTILINE)
    )
    assert named and named <= there, named - there
