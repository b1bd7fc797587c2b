"""How the pool and a child talk: frames of a 4-byte big-endian length and that many bytes. Nothing is unpickled.

The pool sends one frame of setup, then for each job two frames: the handler's name, the content. A child answers the
setup, once it is ready, and each job: one byte that is a `JobOutcome`, one byte that says whether the child ends now,
and a frame.
"""

import struct
from enum import IntEnum

LENGTH = struct.Struct(">I")
ANSWER_HEAD = struct.Struct(">BBI")  # the outcome, whether the child ends now, the length of what follows


class JobOutcome(IntEnum):
    DONE = 0
    FAILED = 1
