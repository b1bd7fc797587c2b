"""Three replicas on three machines under 64 mixed streams, with faults of all kinds: `make test-cluster`."""

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import cluster_poison
import cluster_record
import machines
import mixed
import scenarios
from cluster import ARGUMENTS, ENVIRONMENT, Deployment
from cluster_faults import ClusterFault, Injector, turns
from cluster_poison import POINTS, ClusterPoisoned
from cluster_record import ClusterResult
from machines import Network
from mixed import MixedAnswer, MixedAsk, MixedClients
from scale import SHORT
from server_process import LAUNCHER, ServerProcess

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


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    kinds: Sequence[str]
    count: int
    num_streams: int = NUM_STREAMS
    tokens: tuple[int, int] = TOKENS


def undisturbed(plan: Plan) -> tuple[list[MixedAsk], list[MixedAnswer]]:
    """The asks, and their answers from one process on one machine."""
    asked = mixed.mixed_asks(plan.num_streams, plan.tokens)
    with ServerProcess(*ARGUMENTS, environ=ENVIRONMENT) as server:
        answers = mixed.all_answers(server.url, asked)
    broken = [answer.error for answer in answers if answer.error]
    if broken:
        raise RuntimeError(f"{len(broken)} streams fail without any fault: {broken[0]}")
    return asked, answers


def inject(deployment: Deployment, plan: Plan, note: Callable[[str], None]) -> list[ClusterFault]:
    rng = random.Random(plan.seed)
    injector = Injector(deployment, rng)
    faults = []
    for number, kind in enumerate(turns(plan.kinds, plan.count, rng), start=1):
        overlaps = rng.random() < OVERLAPPING
        if not overlaps:
            deployment.until_whole()
        time.sleep(rng.uniform(*GAP_S))
        fault = injector.inject(kind)
        faults.append(fault)
        note(
            f"{number:4d} {fault.at_s:.2f} +{fault.lifted_s - fault.at_s:.1f} s: {kind}, {fault.victim},"
            f" {fault.rows} requests"
        )
    deployment.until_whole()
    time.sleep(SETTLED_S)
    return faults


async def under_streams(
    deployment: Deployment, plan: Plan, asked: Sequence[MixedAsk], note: Callable[[str], None]
) -> tuple[list[ClusterFault], list[MixedAnswer]]:
    clients = MixedClients(asked, plan.num_streams)
    async with asyncio.TaskGroup() as tasks:
        # Each request has a connection of its own, so that its port tells which front it was with.
        tasks.create_task(clients.run(deployment.url, {"connection": "close"}))
        await asyncio.sleep(SETTLED_S)
        try:
            faults = await asyncio.to_thread(inject, deployment, plan, note)
        finally:
            clients.finish()
    return faults, clients.answers


def ask_again(url: str, asked: Sequence[MixedAsk], answers: Sequence[MixedAnswer]) -> list[str]:
    """Asks for each text of best_of alone, with the seed that was drawn for it. Returns the kinds that differ."""
    again = [
        pair
        for answer in answers
        if asked[answer.ask].kind == "best_of" and not answer.error
        for pair in mixed.asks_for_each_text(asked[answer.ask], answer)
    ]
    found = mixed.all_answers(url, [ask for ask, _ in again])
    return ["best_of" for answer, (_, text) in zip(found, again, strict=True) if answer.outcome != (text,)]


def tell(text: str) -> None:
    print(text, flush=True)


def run(plan: Plan, folder: Path, launcher: Path = LAUNCHER, note: Callable[[str], None] = tell) -> ClusterResult:
    asked, expected = undisturbed(plan)
    note(f"{len(asked)} streams without faults")
    with (
        Network(1 + REPLICAS) as network,
        Deployment(network, folder, failpoints=SLOWER, launcher=launcher) as deployment,
    ):
        note("the deployment is whole")
        faults, answers = asyncio.run(under_streams(deployment, plan, asked, note))
        different = ask_again(deployment.url, asked, answers)
        return cluster_record.result(plan.seed, faults, deployment.notices(), asked, expected, answers, different)


def run_poison(what: str, folder: Path, launcher: Path = LAUNCHER) -> ClusterPoisoned:
    expected = scenarios.undisturbed(SHORT, 1)
    arguments = ("--dtype", "float32", "--json-output", *SHORT.arguments)
    with (
        Network(1 + REPLICAS) as network,
        Deployment(network, folder, arguments, cluster_poison.rule(what), launcher) as deployment,
    ):
        return cluster_poison.poison(deployment, what, SHORT.asks(), expected)


def asked_for() -> argparse.Namespace:
    kinds = list(Injector(None, random.Random()).kinds)  # type: ignore[arg-type]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="which faults, when, and where")
    parser.add_argument("--faults", type=int, default=10 * len(kinds), help="number of faults; 0: none")
    parser.add_argument("--kinds", nargs="*", default=kinds, metavar="KIND", help=f"of: {', '.join(kinds)}")
    parser.add_argument("--poison", nargs="*", default=list(POINTS), metavar="WHAT", help=f"of: {', '.join(POINTS)}")
    parser.add_argument("--write", type=Path, help="a Markdown file whose marked tables are replaced")
    parser.add_argument("--keep", type=Path, help="a folder for logs, which is not removed")
    parser.add_argument("--launcher", type=Path, default=LAUNCHER, help="another version's launcher")
    asked = parser.parse_args()
    if unknown := (set(asked.kinds) - set(kinds)) | (set(asked.poison) - set(POINTS)):
        parser.error(f"no such kind: {', '.join(unknown)}")
    return asked


def main() -> int:
    asked = asked_for()
    if not machines.can_be_made():
        raise SystemExit(machines.WITHOUT)
    folder = asked.keep or Path(tempfile.mkdtemp(prefix="tgi-cluster-"))
    tables, failures = {}, []
    try:
        if asked.faults:
            found = run(Plan(asked.seed, asked.kinds, asked.faults), made(folder / "faults"), asked.launcher)
            tables["cluster"] = cluster_record.as_table(found)
            for line in found.stalls:
                print(f"stalled: {line}")
            failures += [*found.failures(), *found.lost, *found.different]
        poisoned = []
        for number, what in enumerate(asked.poison):
            poisoned.append(run_poison(what, made(folder / f"poison{number}"), asked.launcher))
            print(poisoned[-1], flush=True)
            failures += [f"poison of {what}: {failure}" for failure in poisoned[-1].failures()]
        if poisoned:
            tables["cluster poison"] = cluster_poison.as_table(poisoned)
    finally:
        if not asked.keep:
            shutil.rmtree(folder, ignore_errors=True)
    for name, table in tables.items():
        print(f"\n{table}\n")
        if asked.write is not None:
            asked.write.write_text(replace_table(asked.write.read_text(), table, name))
    for line in failures:
        print(f"FAILED: {line}")
    return 1 if failures else 0


def made(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
