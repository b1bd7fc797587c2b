"""A slow cable: forwards frames between two network interfaces with a delay, and drops or holds up some.

    python slow_link.py ONE OTHER --delay 0.1 --drop 0.02 --freeze-every 5 --freeze-for 2 --seed 1

Linux only, as root. Kernels without the queueing discipline netem can do without it so."""

import argparse
import heapq
import random
import select
import socket
import time
from dataclasses import dataclass

ETH_P_ALL = 3
SOL_PACKET, PACKET_OUTGOING, PACKET_VNET_HDR = 263, 4, 15
# A large segment that its receiver's kernel is to cut has more bytes than a frame: 64 KiB with all headers.
MAX_BYTES = 1 << 17
RECEIVE_BYTES = 1 << 23


@dataclass(frozen=True, slots=True)
class Slowness:
    delay_s: float = 0.0
    drop: float = 0.0  # share of frames
    freeze_every_s: float = 0.0  # seconds from the end of one freeze to the next; 0: no freezes
    freeze_for_s: float = 0.0  # frames of this time are held up until its end

    def due_s(self, now_s: float, since_s: float) -> float:
        """When a frame that comes at `now_s` goes on. Counted from `since_s`, the start."""
        if self.freeze_every_s:
            turn_s = self.freeze_every_s + self.freeze_for_s
            place_s = (now_s - since_s) % turn_s
            if place_s >= self.freeze_every_s:
                return now_s + (turn_s - place_s) + self.delay_s
        return now_s + self.delay_s


def forward(names: tuple[str, str], slowness: Slowness, rng: random.Random) -> None:
    """Forwards frames for ever. Frames of one direction keep their order."""
    ends = [_opened(name) for name in names]
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    since_s = time.monotonic()
    number = 0  # makes the order of frames that are due at the same time their order of arrival
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    while True:
        left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(ends, [], [], left_s)[0]:
            frame, about = end.recvfrom(MAX_BYTES)
            if about[2] == PACKET_OUTGOING or rng.random() < slowness.drop:
                continue
            number += 1
            heapq.heappush(waiting, (slowness.due_s(time.monotonic(), since_s), number, other[end], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(waiting)
            try:
                to.send(frame)
            except (BlockingIOError, OSError):
                continue  # a cable loses what it cannot carry


def _opened(name: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    # Frames come and go with a header of the kernel's, which says what is left to do: checksums, cutting into segments.
    opened.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    opened.bind((name, 0))
    return opened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("one", help="name of an interface")
    parser.add_argument("other")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds, for each direction")
    parser.add_argument("--drop", type=float, default=0.0, help="share of frames that is lost")
    parser.add_argument("--freeze-every", type=float, default=0.0, help="seconds between two freezes")
    parser.add_argument("--freeze-for", type=float, default=0.0, help="seconds of a freeze")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    slowness = Slowness(asked.delay, asked.drop, asked.freeze_every, asked.freeze_for)
    forward((asked.one, asked.other), slowness, random.Random(asked.seed))


if __name__ == "__main__":
    main()
