"""Draws mutants from every room, runs the room's tests against each, and prints who survived.

mutmut and cosmic-ray start a whole pytest for each mutant, which here imports torch for seconds: 500 mutants would take
most of a day. This one forks every run of the tests from a process that has the libraries already, and needs none of
its own. Each run has a copy of the repository, a session of its own and a deadline.
"""

import argparse
import random
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mutation.copies import Copy
from mutation.mutants import Mutant, mutants_of
from mutation.rooms import ROOMS, Room, files
from mutation.runs import KILLED, SURVIVED, TIMED_OUT, RunsOfTests

ROOT = Path(__file__).parent.parent.parent
EQUIVALENT = "equivalent"
OUTCOMES = (KILLED, SURVIVED, TIMED_OUT, EQUIVALENT)


def main() -> int:
    options = _options()
    equivalents = tomllib.loads((Path(__file__).parent / "equivalents.toml").read_text())
    rooms = [room for room in ROOMS if options.room in (None, room.name)]
    print(f"seed {options.seed}", flush=True)
    draws = draw(rooms, options.seed, options.total, options.least)
    rows = []
    for room, (drawn, of) in zip(rooms, draws, strict=True):
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            outcomes = try_room(room, drawn, Copy(ROOT, Path(folder)), equivalents)
        rows.append((room.name, of, outcomes))
    print(table(rows))
    return 0 if all(share_killed(outcomes) >= 0.85 for _, _, outcomes in rows) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutate ARGS=...", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="which mutants are drawn")
    parser.add_argument("--total", type=int, default=500, help="how many, over all rooms")
    parser.add_argument("--least", type=int, default=60, help="how many from a small room")
    parser.add_argument("--room", choices=[room.name for room in ROOMS], help="only this one")
    return parser.parse_args()


def draw(rooms: Sequence[Room], seed: int, total: int, least: int) -> list[tuple[list[Mutant], int]]:
    """For each room: the mutants that are tried, in proportion to how many it has, and how many it has."""
    chance = random.Random(seed)
    all_of = [[m for name in files(ROOT, room.sources) for m in mutants_of(ROOT / name, name)] for room in rooms]
    spare = max(0, total - least * len(rooms))
    everything = sum(map(len, all_of))
    draws = []
    for mutants in all_of:
        count = min(len(mutants), least + -(-spare * len(mutants) // everything))
        draws.append((chance.sample(mutants, count), len(mutants)))
    return draws


def try_room(room: Room, drawn: Sequence[Mutant], copy: Copy, equivalents: dict[str, str]) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    tests = files(copy.root, room.tests)
    with RunsOfTests(copy, tests) as runs:
        started = time.monotonic()
        if (baseline := runs.outcome(limit_s=900)) != SURVIVED:
            sys.exit(f"{room.name}: its tests do not pass without a mutant ({baseline}):\n{runs.last_words()}")
        seconds = time.monotonic() - started
        print(f"{room.name}: {len(drawn)} mutants, the tests take {seconds:.0f} s", flush=True)
        for mutant in drawn:
            if mutant.id in equivalents:
                outcomes[EQUIVALENT] += 1
                continue
            source = copy.change(mutant)
            outcome = runs.outcome(limit_s=10 + 4 * seconds)
            copy.restore(mutant.path, source)
            outcomes[outcome] += 1
            if outcome != KILLED:
                print(f"{outcome} {mutant.id}: {mutant.operator}, {mutant.where}, {mutant.path}", flush=True)
                print(mutant.diff(source), flush=True)
    return outcomes


def share_killed(outcomes: Counter[str]) -> float:
    """Of those that could be told from the original, and whose tests came to an end."""
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
