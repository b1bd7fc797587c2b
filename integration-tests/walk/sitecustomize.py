"""Records which Python functions a router or a shard calls on a token's way, for `walk.py`."""

import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

# First and last call of a walk, with the file of each function: a shard's is from the result of a step to its frame, a
# router's from the frame to the event.
BEGINS = {"_answer_oldest": "worker.py", "data_received": "step_connection.py"}
ENDS = {"send": "step_socket.py", "write": "sse.py"}
PACKAGES = ("text_generation_router", "text_generation_common", "text_generation_server")
NOT_CALLS = ("<listcomp>", "<dictcomp>", "<genexpr>")


def record(file_name: str) -> None:
    """Writes a line for each walk: `file function` of each call, separated by tabs."""
    out = os.open(file_name, os.O_CREAT | os.O_WRONLY)
    walk: list[str] | None = None

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal walk
        code = frame.f_code
        name, (folder, _, file) = code.co_name, code.co_filename.rpartition("/")
        place = next((folder[folder.rindex(each) :] for each in PACKAGES if each in folder), "")
        if event != "call" or not place or name in NOT_CALLS:
            return
        if BEGINS.get(name) == file:
            walk = []
        if walk is not None:
            walk.append(f"{place}/{file} {code.co_qualname}")
            if ENDS.get(name) == file:
                os.write(out, ("\t".join(walk) + "\n").encode())
                walk = None

    sys.setprofile(note)
    threading.setprofile(note)


program = Path("/proc/self/cmdline").read_text().split("\0")[1].rpartition("/")[2]
if program in ("text-generation-router", "text-generation-server"):
    record(f"{os.environ['WALK']}/{program}.{os.getpid()}")
