"""The protocol of the pool and its children. A frame is a 4-byte big-endian length and its content; no pickle is read.

The pool sends one frame of setup, then for each job two frames: the handler's name, the content. A child answers the
setup (once the child is ready) and each job with one byte that is a `JobOutcome`, one byte that says whether the child
ends now, and a frame.
"""

import struct
from enum import IntEnum

LENGTH = struct.Struct(">I")
ANSWER_HEAD = struct.Struct(">BBI")  # the outcome, whether the child ends now, the length of the answer


class JobOutcome(IntEnum):
    DONE = 0
    FAILED = 1
