"""Three replicas on three machines under 64 mixed streams, with faults of all kinds: `make test-cluster`."""

import argparse
import importlib.util
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import cluster_record
import machines
import psutil
import ray_nodes
from asks import Ask, mixed_asks
from cluster import ARGUMENTS, ENVIRONMENT, Deployment, DeploymentByHand
from cluster_faults import KINDS, RAY_KINDS, Begin, ClusterFault, Injector, turns
from cluster_ray import RayDeployment
from cluster_record import ClusterResult
from faults import Run, poison_beside, poison_rule
from machines import Network
from outcome import CELLS, Outcome, Report, table
from scale import SHORT
from server_process import LAUNCHER, ServerProcess, wait_until
from streams import StreamAnswer, answers_meanwhile, ask_again, undisturbed

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
REPLACED_LIMIT_S = 120.0
# Times that the deployment may fail to recover before the run gives up.
MAX_PROBLEMS = 3
# What dies of a poisoned request's token, as a rule of FAILPOINTS.
POINTS = {"a shard": "shard.chunk", "an engine's step": "engine.step", "an engine's Submit": "engine.submit"}


@dataclass(frozen=True, slots=True)
class WayToStart:
    """How replicas are started: the machines beside that of the fronts, and what can be done to them."""

    deployment: Callable[..., Deployment]
    kinds: Mapping[str, Begin]
    machines: int
    table: str  # name of the table of faults
    poison_table: str


BY_HAND = WayToStart(DeploymentByHand, KINDS, REPLICAS, "cluster", "cluster poison")
# A spare machine, and one for Redis.
ON_RAY = WayToStart(RayDeployment, RAY_KINDS, REPLICAS + 2, "cluster on Ray", "cluster poison on Ray")


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
        injector = Injector(self._deployment, rng, dict(self._way.kinds))
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
            if len(self.problems) >= MAX_PROBLEMS:
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


tell = partial(print, flush=True)


@dataclass(frozen=True, slots=True)
class Cases:
    """What runs of one command have in common."""

    way: WayToStart
    folder: Path
    launcher: Path
    asked: Sequence[Ask] = ()
    expected: Sequence[StreamAnswer] = ()

    @contextmanager
    def deployment(
        self, name: str, failpoints: str = SLOWER, arguments: Sequence[str] = ARGUMENTS
    ) -> Iterator[Deployment]:
        folder = made(self.folder / name)
        with (
            Network(1 + self.way.machines) as network,
            self.way.deployment(network, folder, arguments, failpoints, self.launcher) as deployment,
        ):
            tell("the deployment is whole")
            yield deployment

    def with_faults(self, plan: Plan) -> ClusterResult:
        with self.deployment("faults") as deployment:
            injection = Injection(deployment, plan, self.way, tell)
            found = self._found(deployment, injection.run, plan.seed, injection.faults)
            return replace(found, problems=tuple(injection.problems))

    def without_head(self, minutes: float) -> tuple[ClusterResult, list[float]]:
        """Ray's head is dead for minutes. Also the seconds from the start of the new head to a whole deployment, and
        those in which it then had a replica replaced whose launcher was killed."""
        times: list[float] = []
        with self.deployment("head") as deployment:
            assert isinstance(deployment, RayDeployment)

            def whole_since(began_s: float, what: str) -> None:
                deployment.until_whole()
                times.append(time.monotonic() - began_s)
                tell(f"{what}: whole after {times[-1]:.1f} s")

            def hurt() -> None:
                deployment.kill_head()
                tell(f"the head is dead for {minutes:g} minutes")
                time.sleep(60 * minutes)
                deployment.start_head()
                whole_since(time.monotonic(), "the head is started")
                before, began_s = set(deployment.report().endpoints), time.monotonic()
                Injector(deployment, random.Random(1)).inject("launcher killed")
                ended = "Ray notices that a replica has ended"
                wait_until(lambda: set(deployment.report().endpoints) != before, REPLACED_LIMIT_S, ended)
                whole_since(began_s, "a replica's launcher was killed")

            return self._found(deployment, hurt), times

    def _found(
        self, deployment: Deployment, work: Callable[[], None], seed: int = 0, faults: Sequence[ClusterFault] = ()
    ) -> ClusterResult:
        answers = answers_meanwhile(deployment.url, self.asked, work)
        different = ask_again(deployment.url, self.asked, answers)
        notices = deployment.notices()
        return cluster_record.result(seed, faults, notices, self.asked, self.expected, answers, different)

    def poisoned(self, what: str, times: int) -> Outcome:
        """Requests that kill what computes them, one after the other, on three replicas: no two may be down at a time
        because of one."""
        run = Run(SHORT, expected=SHORT.undisturbed(1))
        arguments = ("--dtype", "float32", "--json-output", *SHORT.arguments)
        name = f"poison{list(POINTS).index(what)}"
        with self.deployment(name, poison_rule(POINTS[what]), arguments) as deployment:
            return poison_beside(
                deployment.url, lambda: [deployment.log_of(each) for each in deployment.others], run, times=times
            )


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
    parser.add_argument("--poison-times", type=int, default=1, help="number of poisoned requests of each of these")
    parser.add_argument("--write", type=Path, help="a Markdown file whose marked tables are replaced")
    parser.add_argument("--keep", type=Path, help="a folder for logs, which is not removed")
    parser.add_argument("--launcher", type=Path, default=LAUNCHER, help="another version's launcher")
    asked = parser.parse_args()
    asked.way = BY_HAND if asked.by_hand else ON_RAY
    asked.is_whole = asked.faults is None and asked.kinds is None
    asked.kinds = list(asked.way.kinds) if asked.kinds is None else asked.kinds
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


def run_all(asked: argparse.Namespace, folder: Path, report: Report) -> None:
    cases = Cases(asked.way, folder, asked.launcher)
    if asked.faults or asked.head_minutes:
        asks = mixed_asks(NUM_STREAMS, TOKENS)
        cases = replace(cases, asked=asks, expected=undisturbed(ServerProcess(*ARGUMENTS, environ=ENVIRONMENT), asks))
    if asked.faults:
        found = cases.with_faults(Plan(asked.seed, asked.kinds, asked.faults))
        for line in found.stalls:
            tell(f"stalled: {line}")
        few = found.shortfalls(*LEAST) if asked.is_whole else []
        report.take(asked.way.table, cluster_record.as_table(found), [*found.failures(), *found.details(), *few])
    if asked.head_minutes:
        found, times = cases.without_head(asked.head_minutes)
        head = "head away, min|streams|lost|different|whole after, s|then a lost replica replaced after, s"
        counts = [f"{asked.head_minutes:g}", found.streams, len(found.lost), len(found.different)]
        text = table(head, [[*counts, *(f"{seconds:.1f}" for seconds in times)]])
        report.take("cluster without head", text, [*found.failures(), *found.details()])
    if asked.poison:
        rows = {what: cases.poisoned(what, asked.poison_times) for what in asked.poison}
        failures = [f"poison of {what}: {failure}" for what, each in rows.items() for failure in each.failures()]
        text = table(f"a request that kills|{CELLS}", [[what, *each.cells()] for what, each in rows.items()])
        report.take(asked.way.poison_table, text, failures)


def without_ray() -> str:
    """What is missing for Ray; empty if nothing is."""
    if importlib.util.find_spec("ray") is None:
        return "needs the package ray (`pip install tgi-py[ray]`)"
    return "" if ray_nodes.has_redis() else ray_nodes.WITHOUT_REDIS


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
    return report.status


def made(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
