"""Draws mutants (small changes of the code) from every room (part of a package), runs the room's tests against each
mutant, and prints the mutants that no test noticed.

mutmut and cosmic-ray start a whole pytest for each mutant, which here imports torch for seconds: 500 mutants would take
most of a day. This program forks every run of the tests from a process that has imported the libraries already, and
needs no other library. Each run has a copy of the repository and a session of its own, and each test a time limit.
"""

import argparse
import hashlib
import json
import os
import random
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue

from mutation.copies import Copy
from mutation.mutants import Mutant, mutants_of
from mutation.rooms import ROOMS, MutatedRoom, files
from mutation.runs import KILLED, SURVIVED, TIMED_OUT, RunsOfTests

ROOT = Path(__file__).parent.parent.parent
EQUIVALENT = "equivalent"
OUTCOMES = (KILLED, SURVIVED, TIMED_OUT, EQUIVALENT)


def main() -> int:
    options = _options()
    equivalents = tomllib.loads((Path(__file__).parent / "equivalents.toml").read_text())
    print(f"seed {options.seed}", flush=True)
    draws = draw(ROOMS, options.seed, options.total, options.least)
    rows = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [Copy(ROOT, Path(folder, str(i)), os.environ) for i in range(options.workers)]
        for room, (drawn, of) in zip(ROOMS, draws, strict=True):
            if options.room in (None, room.name):
                outcomes = Outcomes(options.out, drawn, equivalents)
                try_room(room, [mutant for mutant in drawn if mutant.id not in outcomes.known], copies, outcomes)
                rows.append((room.name, of, Counter(outcomes.known.values())))
    print(table(rows))
    return 0 if all(share_killed(outcomes) >= 0.85 for _, _, outcomes in rows) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutate ARGS=...", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="which mutants are drawn")
    parser.add_argument("--total", type=int, default=500, help="mutants that are drawn from all rooms together")
    parser.add_argument("--least", type=int, default=60, help="mutants that are drawn from a small room")
    parser.add_argument("--room", choices=[room.name for room in ROOMS], help="only mutants of this room")
    parser.add_argument("--workers", type=int, default=2, help="runs of tests at a time")
    parser.add_argument(
        "--out", type=Path, help="a JSON Lines file: mutants in the file are not tried again, other mutants are added"
    )
    return parser.parse_args()


def draw(
    rooms: Sequence[MutatedRoom], seed: int, total: int, least: int, root: Path = ROOT
) -> list[tuple[list[Mutant], int]]:
    """For each room: the drawn mutants, whose number is in proportion to all mutants of the room, and the number of
    all.

    Whether a mutant is drawn depends on the mutant alone, so a change of other code moves few mutants in or out.
    """
    all_of = [[m for name in files(root, room.sources) for m in mutants_of(root / name, name)] for room in rooms]
    spare = max(0, total - least * len(rooms))
    everything = sum(map(len, all_of))
    draws = []
    for mutants in all_of:
        count = least + -(-spare * len(mutants) // everything)
        by_chance = sorted(mutants, key=lambda m: hashlib.sha256(f"{seed} {m.id}".encode()).digest())
        draws.append((by_chance[:count], len(mutants)))
    return draws


class Outcomes:
    """The outcomes of the drawn mutants. `known` begins with the outcomes that an earlier run left in the file."""

    def __init__(self, path: Path | None, drawn: Sequence[Mutant], equivalents: dict[str, str]) -> None:
        self._path = path
        ids = {mutant.id for mutant in drawn}
        self.known: dict[str, str] = {}
        if path and path.exists():
            rows = map(json.loads, path.read_text().splitlines())
            self.known |= {row["id"]: row["outcome"] for row in rows if row["id"] in ids}
        self.known |= dict.fromkeys(ids & equivalents.keys(), EQUIVALENT)

    def add(self, mutant: Mutant, outcome: str, **more: str | float) -> None:
        self.known[mutant.id] = outcome
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(mutant) | {"outcome": outcome} | more) + "\n")


def try_room(room: MutatedRoom, mutants: Sequence[Mutant], copies: Sequence[Copy], outcomes: Outcomes) -> None:
    tests = files(ROOT, room.tests)
    left: SimpleQueue[Mutant] = SimpleQueue()
    for mutant in mutants:
        left.put(mutant)
    print(f"{room.name}: {len(mutants)} mutants", flush=True)

    def work(copy: Copy, runs: RunsOfTests) -> None:
        with suppress(Empty):
            while True:
                try_mutant(left.get_nowait(), copy, runs, baseline.times_s, outcomes)

    if not mutants:
        return
    with ExitStack() as stack:
        all_runs = [stack.enter_context(RunsOfTests(copy, tests)) for copy in copies]
        baseline = all_runs[0].run()
        if baseline.outcome != SURVIVED:
            sys.exit(
                f"{room.name}: {baseline.outcome} in {baseline.test} without a mutant:\n{all_runs[0].last_words()}"
            )
        workers = stack.enter_context(ThreadPoolExecutor(len(copies)))
        list(workers.map(work, copies, all_runs))


def try_mutant(mutant: Mutant, copy: Copy, runs: RunsOfTests, usual_s: Mapping[str, float], outcomes: Outcomes) -> None:
    began = time.monotonic()
    source = copy.change(mutant)
    run = runs.run(Path(mutant.path).stem.removesuffix("s"), usual_s)
    copy.restore(mutant.path, source)
    outcomes.add(mutant, run.outcome, test=run.test, seconds=round(time.monotonic() - began, 1))
    if run.outcome != KILLED:
        head = f"{run.outcome} {mutant.id}: {mutant.operator}, {mutant.where}, {mutant.path}"
        print(f"{head}\n{mutant.diff(source)}", flush=True)


def share_killed(outcomes: Counter[str]) -> float:
    """Share of the mutants whose tests ended and that are not equivalent to the original."""
    decided = outcomes[KILLED] + outcomes[SURVIVED]
    return outcomes[KILLED] / decided if decided else 1.0


def table(rows: Sequence[tuple[str, int, Counter[str]]]) -> str:
    lines = ["| room | mutants | drawn | " + " | ".join(OUTCOMES) + " | killed of decided |", "|---" * 8 + "|"]
    whole: Counter[str] = Counter()
    for _, _, outcomes in rows:
        whole.update(outcomes)
    for name, of, outcomes in [*rows, ("all", sum(of for _, of, _ in rows), whole)]:
        cells = [name, of, sum(outcomes.values()), *(outcomes[o] for o in OUTCOMES), f"{share_killed(outcomes):.0%}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
