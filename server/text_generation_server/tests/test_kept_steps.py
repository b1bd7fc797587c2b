"""Keys and values that outlive a killed shard. `make test-kept` kills 2,000 times."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def test_no_bit_of_keys_and_values_differs_after_kills_in_the_middle_of_steps(model: Path) -> None:
    """In a process of its own, which has no threads as it forks."""
    argv = [sys.executable, TESTS / "kept_steps.py", "--kills", "8", "--model", model]
    done = subprocess.run(argv, cwd=TESTS, env=os.environ | {"PYTHONPATH": str(TESTS)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "4 kills in steps of" in done.stdout and "no bit differs" in done.stdout
