"""Three replicas on three machines under 64 mixed streams, with faults of all kinds: `make test-cluster`."""

import argparse
import importlib.util
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import cluster_head
import cluster_poison
import cluster_record
import machines
import psutil
import redis_server
import scenarios
from cluster import Deployment
from cluster_by_hand import DeploymentByHand
from cluster_faults import ClusterFault, Injector, turns
from cluster_head import HeadLost, lose_head
from cluster_poison import POINTS, ClusterPoisoned
from cluster_ray import RayDeployment
from cluster_ray_faults import RayInjector
from cluster_record import ClusterResult
from cluster_streams import answers_meanwhile, ask_again, undisturbed
from machines import Network
from mixed import MixedAnswer, MixedAsk
from scale import SHORT
from server_process import LAUNCHER

from text_generation_benchmark.output import replace_table

REPLICAS = 3
NUM_STREAMS = 64
# Least and most tokens of a text: long enough that streams are met in mid-text.
TOKENS = (60, 200)
# Each step of a shard takes that much longer: texts last longer in time, and three shards leave the cores some time
# for the fronts and the clients.
SLOWER = "shard.step:delay=0.03@every 1"
# Seconds from a whole deployment to the next fault.
GAP_S = (0.2, 4.0)
# Share of the faults before which the deployment need not be whole: then the next fault meets a recovery.
OVERLAPPING = 0.2
SETTLED_S = 2.0
# What a run of all faults has to have at least: faults, faults of each kind, and requests on their victims.
LEAST = (100, 10, 200)
# Minutes for which Ray's head is away in a run of all faults.
HEAD_MINUTES = 5.0
# Times that the deployment may fail to recover before the run gives up.
MOST_PROBLEMS = 3


@dataclass(frozen=True, slots=True)
class WayToStart:
    """How replicas are started: the machines beside that of the fronts, and what can be done to them."""

    deployment: Callable[..., Deployment]
    injector: Callable[..., Injector]
    machines: int
    table: str  # name of the table of faults
    poison_table: str

    @property
    def kinds(self) -> list[str]:
        return list(self.injector(None, random.Random()).kinds)


BY_HAND = WayToStart(DeploymentByHand, Injector, REPLICAS, "cluster", "cluster poison")
# A spare machine, and one for Redis.
ON_RAY = WayToStart(RayDeployment, RayInjector, REPLICAS + 2, "cluster on Ray", "cluster poison on Ray")


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    kinds: Sequence[str]
    count: int


class Injection:
    """The faults of a plan, one after the other. `problems`: what the deployment did not recover from in time."""

    def __init__(self, deployment: Deployment, plan: Plan, way: WayToStart, note: Callable[[str], None]) -> None:
        self.faults: list[ClusterFault] = []
        self.problems: list[str] = []
        self._deployment = deployment
        self._plan = plan
        self._way = way
        self._note = note

    def run(self) -> None:
        rng = random.Random(self._plan.seed)
        injector = self._way.injector(self._deployment, rng)
        for kind in turns(self._plan.kinds, self._plan.count, rng):
            overlaps = rng.random() < OVERLAPPING
            whole = "not whole before" if overlaps else f"whole after {self._whole_s():.1f} s"
            time.sleep(rng.uniform(*GAP_S))
            try:
                fault = injector.inject(kind)
            except (RuntimeError, OSError, psutil.Error, subprocess.SubprocessError) as error:
                self._complain(f"{kind}: {error}")
            else:
                self.faults.append(fault)
                self._note(f"{len(self.faults):4d} {fault}, {whole}")
            if len(self.problems) >= MOST_PROBLEMS:
                return
        self._whole_s()
        time.sleep(SETTLED_S)

    def _whole_s(self) -> float:
        """Waits until the deployment is whole, and returns how long that took."""
        began_s = time.monotonic()
        try:
            self._deployment.until_whole()
        except RuntimeError as error:
            self._complain(str(error))
        return time.monotonic() - began_s

    def _complain(self, problem: str) -> None:
        self.problems.append(f"after {len(self.faults)} faults: {problem}")
        self._note(f"PROBLEM {self.problems[-1]}")


def tell(text: str) -> None:
    print(text, flush=True)


@dataclass(frozen=True, slots=True)
class Cases:
    """What runs of one command have in common."""

    way: WayToStart
    folder: Path
    launcher: Path
    asked: Sequence[MixedAsk]
    expected: Sequence[MixedAnswer]
    note: Callable[[str], None] = tell

    @contextmanager
    def deployment(self, name: str) -> Iterator[Deployment]:
        folder = made(self.folder / name)
        with (
            Network(1 + self.way.machines) as network,
            self.way.deployment(network, folder, failpoints=SLOWER, launcher=self.launcher) as deployment,
        ):
            self.note("the deployment is whole")
            yield deployment

    def with_faults(self, plan: Plan) -> ClusterResult:
        with self.deployment("faults") as deployment:
            injection = Injection(deployment, plan, self.way, self.note)
            answers = answers_meanwhile(deployment.url, self.asked, injection.run)
            different = ask_again(deployment.url, self.asked, answers)
            found = cluster_record.result(
                plan.seed, injection.faults, deployment.notices(), self.asked, self.expected, answers, different
            )
            return replace(found, problems=tuple(injection.problems))

    def without_head(self, minutes: float) -> HeadLost:
        with self.deployment("head") as deployment:
            assert isinstance(deployment, RayDeployment)
            return lose_head(deployment, minutes, self.asked, self.expected, self.note)


def run_poison(way: WayToStart, what: str, folder: Path, launcher: Path = LAUNCHER) -> ClusterPoisoned:
    expected = scenarios.undisturbed(SHORT, 1)
    arguments = ("--dtype", "float32", "--json-output", *SHORT.arguments)
    with (
        Network(1 + way.machines) as network,
        way.deployment(network, folder, arguments, cluster_poison.rule(what), launcher) as deployment,
    ):
        return cluster_poison.poison(deployment, what, SHORT.asks(), expected)


def asked_for() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--ray", action="store_true", help="Ray chooses the machines, and is hurt as well; the default")
    way.add_argument("--by-hand", action="store_true", help="the replicas' launchers are started on their machines")
    parser.add_argument("--seed", type=int, default=1, help="which faults, when, and where")
    parser.add_argument(
        "--faults", type=int, help="number of faults; 0: none; not given: ten of each kind, a lost head, and poison"
    )
    parser.add_argument("--kinds", nargs="*", metavar="KIND", help=f"of: {', '.join(ON_RAY.kinds)}")
    parser.add_argument("--head-minutes", type=float, help="on Ray: then a run without its head, so long")
    parser.add_argument("--poison", nargs="*", metavar="WHAT", help=f"of: {', '.join(POINTS)}")
    parser.add_argument("--write", type=Path, help="a Markdown file whose marked tables are replaced")
    parser.add_argument("--keep", type=Path, help="a folder for logs, which is not removed")
    parser.add_argument("--launcher", type=Path, default=LAUNCHER, help="another version's launcher")
    asked = parser.parse_args()
    asked.way = BY_HAND if asked.by_hand else ON_RAY
    asked.is_whole = asked.faults is None and asked.kinds is None
    asked.kinds = asked.way.kinds if asked.kinds is None else asked.kinds
    asked.faults = 10 * len(asked.kinds) if asked.faults is None else asked.faults
    if asked.poison is None:
        asked.poison = list(POINTS) if asked.is_whole else []
    if asked.head_minutes is None:
        asked.head_minutes = HEAD_MINUTES if asked.is_whole and not asked.by_hand else 0.0
    if asked.head_minutes and asked.by_hand:
        parser.error("--head-minutes is for Ray")
    if unknown := (set(asked.kinds) - set(asked.way.kinds)) | (set(asked.poison) - set(POINTS)):
        parser.error(f"no such kind: {', '.join(unknown)}")
    return asked


class Report:
    """Tables, printed and written as they come, and failures."""

    def __init__(self, write: Path | None) -> None:
        self.failures: list[str] = []
        self._write = write

    def take(self, name: str, table: str, failures: Sequence[str]) -> None:
        tell(f"\n{table}\n")
        if self._write is not None:
            self._write.write_text(replace_table(self._write.read_text(), table, name))
        for failure in failures:
            tell(f"FAILED: {failure}")
        self.failures += failures


def run_all(asked: argparse.Namespace, folder: Path, report: Report) -> None:
    if asked.faults or asked.head_minutes:
        cases = Cases(asked.way, folder, asked.launcher, *undisturbed(NUM_STREAMS, TOKENS))
    if asked.faults:
        found = cases.with_faults(Plan(asked.seed, asked.kinds, asked.faults))
        for line in found.stalls:
            tell(f"stalled: {line}")
        failures = [*found.failures(), *found.lost, *found.different]
        failures += found.shortfalls(*LEAST) if asked.is_whole else []
        report.take(asked.way.table, cluster_record.as_table(found), failures)
    if asked.head_minutes:
        away = cases.without_head(asked.head_minutes)
        failures = [*away.found.failures(), *away.found.lost, *away.found.different]
        report.take("cluster without head", cluster_head.as_table(away), failures)
    poisoned = []
    for number, what in enumerate(asked.poison):
        poisoned.append(run_poison(asked.way, what, made(folder / f"poison{number}"), asked.launcher))
        tell(str(poisoned[-1]))
    if poisoned:
        failures = [f"poison of {each.what}: {failure}" for each in poisoned for failure in each.failures()]
        report.take(asked.way.poison_table, cluster_poison.as_table(poisoned), failures)


def without_ray() -> str:
    """What is missing for Ray; empty if nothing is."""
    if importlib.util.find_spec("ray") is None:
        return "needs the package ray (`pip install tgi-py[ray]`)"
    return "" if redis_server.is_installed() else redis_server.WITHOUT


def main() -> int:
    asked = asked_for()
    if not machines.can_be_made():
        raise SystemExit(machines.WITHOUT)
    if not asked.by_hand and (problem := without_ray()):
        raise SystemExit(f"{problem}; --by-hand does without")
    folder = asked.keep or Path(tempfile.mkdtemp(prefix="tgi-cluster-"))
    report = Report(asked.write)
    try:
        run_all(asked, folder, report)
    finally:
        if not asked.keep:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if report.failures else 0


def made(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
