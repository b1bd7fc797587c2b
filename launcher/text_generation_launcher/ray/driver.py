"""The process that asks Ray for replicas: `python -m text_generation_launcher.ray.driver FD ADDRESS NAMESPACE NODE`.

It reads `Wanted` messages of the launcher, and writes reports. All that it knows can be found again in the cluster. So
nothing else ends with the driver, which Ray ends when the head node is lost.
"""

import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from text_generation_common.json_values import as_json, from_json
from text_generation_launcher.ray.fronts import FrontCluster, NodeFronts
from text_generation_launcher.ray.keeping import ReplicaCluster, ReplicaKeeper
from text_generation_launcher.ray.values import RayReport, Wanted

# Seconds to wait for answers of actors in each turn, and between two equal reports.
TURN_S, REPORT_S = 0.25, 1.0
# Seconds between two checks whether this machine's node of the Ray cluster lives.
NODE_LOOK_S = 2.0
NO_CLUSTER = 3  # exit status: Ray cannot be reached


class DriverCluster(ReplicaCluster, FrontCluster, Protocol):
    """All calls of Ray that the driver makes."""


class Driver:
    """Starts and ends actors as the newest `Wanted` message says, one turn after another. `report` sends a report."""

    def __init__(
        self, cluster: DriverCluster, report: Callable[[RayReport], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster = cluster
        self._report = report
        self._clock = clock
        self._keepers: dict[str, ReplicaKeeper] = {}
        self._fronts = NodeFronts(cluster)
        self._number = 0  # number of the last `Wanted` message
        self._reported = RayReport(())
        self._reported_s = float("-inf")

    def want(self, wanted: Wanted) -> None:
        """Makes these replicas and fronts the wanted ones. Others are drained, also those of an earlier driver of this
        namespace."""
        self._number = wanted.number
        others = set(self._keepers) | set(self._cluster.names())
        for name, address in wanted.replicas.items():
            if name not in self._keepers:
                self._keepers[name] = ReplicaKeeper(name, wanted.order, self._cluster, address)
        for name in others - set(wanted.replicas):
            if name not in self._keepers:
                self._keepers[name] = ReplicaKeeper(name, wanted.order, self._cluster)
            self._keepers[name].drain()
        self._fronts.want(wanted.fronts, wanted.front_restart)

    def turn(self) -> None:
        for keeper in list(self._keepers.values()):
            keeper.turn(self._clock())
        engines = sorted({keeper.address for keeper in self._keepers.values() if keeper.address})
        self._fronts.turn(self._clock(), engines)
        keepers = (*self._keepers.values(), *self._fronts.keepers.values())
        calls = {keeper.call: keeper for keeper in keepers if keeper.call is not None}
        for call, answer in self._cluster.answers(list(calls), TURN_S).items():
            calls[call].answered(answer, self._clock())
        self._keepers = {name: keeper for name, keeper in self._keepers.items() if not keeper.is_gone}
        self._fronts.drop_those_gone()
        replicas = tuple(keeper.status for keeper in self._keepers.values())
        report = RayReport(replicas, self._number, self._fronts.statuses)
        if report != self._reported or self._clock() - self._reported_s >= REPORT_S:
            self._reported, self._reported_s = report, self._clock()
            self._report(report)


def main(arguments: Sequence[str]) -> int:
    fd, address, namespace, node = arguments
    line = socket.socket(fileno=int(fd))
    messages: queue.SimpleQueue[Wanted] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(line, messages.put), daemon=True).start()
    # Imported here, so that the launcher's death is noticed while Ray is being loaded and connected.
    from text_generation_launcher.ray.cluster import ClusterLost, RayReplicas

    try:
        cluster = RayReplicas(address, namespace, node)
        # Replaces Ray's own handler, which would write a stack trace. The next driver finds all actors again.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Thread(target=end_with_node, args=(cluster.has_node, _end_without_node), daemon=True).start()
        driver = Driver(cluster, lambda report: line.sendall(as_json(report) + b"\n"))
        is_wanted = False
        while True:
            while not messages.empty() or not is_wanted:
                driver.want(messages.get())
                is_wanted = True
            driver.turn()
    except ClusterLost as error:
        print(f"Ray cannot be reached: {error}", flush=True)
        return NO_CLUSTER


def end_with_node(
    is_alive: Callable[[], bool | None], end: Callable[[], None], sleep: Callable[[float], None] = time.sleep
) -> None:
    """Calls `end` once the driver's own node of the cluster is dead. Drivers learn of dead actors through the raylet of
    their own machine. So a driver that outlives its raylet, as on a head that comes back, would report engines of dead
    machines as serving. Without Ray's head it is unknown whether the node lives (None): then the driver stays, because
    another one could not reach the head either."""
    while is_alive() is not False:
        sleep(NODE_LOOK_S)
    end()


def _end_without_node() -> None:
    print("Ray's node of this machine has died", flush=True)
    os._exit(NO_CLUSTER)


def _read(line: socket.socket, take: Callable[[Wanted], None]) -> None:
    """Ends the process when the launcher has closed the line or has ended. The actors go on."""
    with line.makefile("rb") as lines:
        for text in lines:
            take(from_json(Wanted, text))
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
