"""Starts an engine-only launcher that outlives the actor, and writes its pid and its start into a file.

The actor runs this program and waits for its end: `python -m text_generation_launcher.ray.starter RECORD LOG ARGV…`.
The launcher is then not a child of the actor, and in a session of its own, so Ray, which kills the children of its
workers, does not know it. The actor's lock on the machine's folder is inherited here: even if the actor is killed
meanwhile, no other actor looks before the record is written.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

from text_generation_launcher.ray.processes import ProcessIdentity


def main(arguments: Sequence[str]) -> int:
    record, log, *argv = arguments
    with open(log, "ab", opener=private) as output:
        engine = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
    identity = ProcessIdentity.of(engine.pid)
    # An engine that has ended already is told by a start that no process has.
    started = identity.started_ticks if identity is not None else 0
    text = f"{engine.pid} {started}\n"
    partial = f"{record}.partial"
    with open(partial, "w", opener=private) as file:
        file.write(text)
    os.replace(partial, record)
    return 0


def private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
