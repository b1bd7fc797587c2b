"""The kinds of faults that a deployment on Ray has beside those of every deployment."""

import contextlib
import random
import signal
import time
from dataclasses import replace

import psutil
from cluster_faults import SHORT_OR_LONG_S, ClusterFault, Injector
from cluster_ray import RayDeployment


class RayInjector(Injector):
    def __init__(self, deployment: RayDeployment, rng: random.Random) -> None:
        super().__init__(deployment, rng)
        self._on_ray = deployment
        self.kinds |= {
            "actor killed": lambda: self._kill("actor"),
            "actor stopped": lambda: beside_streams(self._stop("actor")),
            "raylet killed": lambda: self._kill("raylet"),
            "raylet stopped": lambda: beside_streams(self._stop("raylet")),
            "driver killed": self._kill_driver,
            "driver stopped": self._stop_driver,
            "head killed": self._kill_head,
        }

    def _drivers(self) -> list[psutil.Process]:
        """The process of the fronts' launcher that asks Ray for replicas, if it is alive."""
        return self._on_ray.find(self._on_ray.front_machine, "driver")

    def _kill_driver(self) -> ClusterFault | None:
        for driver in self._drivers():
            at_s = time.time()
            driver.kill()
            return ClusterFault("driver killed", f"process {driver.pid}", "", at_s, time.time(), 0)
        return None

    def _stop_driver(self) -> ClusterFault | None:
        for driver in self._drivers():
            at_s = time.time()
            driver.send_signal(signal.SIGSTOP)
            self._pause(SHORT_OR_LONG_S)
            with contextlib.suppress(psutil.NoSuchProcess):
                driver.send_signal(signal.SIGCONT)
            return ClusterFault("driver stopped", f"process {driver.pid}", "", at_s, time.time(), 0)
        return None

    def _kill_head(self) -> ClusterFault:
        at_s = time.time()
        self._on_ray.kill_head()
        self._pause(SHORT_OR_LONG_S)
        self._on_ray.start_head()
        return ClusterFault("head killed", self._on_ray.front_machine.address, "", at_s, time.time(), 0)


def beside_streams(fault: ClusterFault | None) -> ClusterFault | None:
    """A fault of a process that no stream passes through: it is counted as hitting none."""
    return None if fault is None else replace(fault, rows=0)
