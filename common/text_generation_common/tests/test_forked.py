"""How a template forks."""

import os
import subprocess
import sys

# A template whose first fork, the process between it and the new one, is killed as it ends.
KILLED_BETWEEN = """
import os, signal
from text_generation_common.forked import fork_below
template, leave = os.getpid(), os._exit
os._exit = lambda status: leave(status) if os.getpid() == template else os.kill(os.getpid(), signal.SIGKILL)
print("went on:", fork_below(os.getppid(), "new"), flush=True)
"""


def test_a_template_that_does_not_know_whether_it_has_forked_takes_no_place_of_what_it_may_have_forked() -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_BETWEEN], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", os.EX_OSERR)
