"""Tests which pieces of a source are changed, which are not, and that a run tells noticed mutants from unnoticed
ones."""

import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from mutation.__main__ import ROOT, Outcomes, draw, share_killed, table
from mutation.copies import Copy
from mutation.mutants import Mutant, mutants_of
from mutation.rooms import ROOMS, WHOLE, MutatedRoom, files
from mutation.runs import KILLED, SURVIVED, TIMED_OUT, RunsOfTests

SOURCE = '''"""A docstring."""
import logging
log = logging.getLogger("ä")

def largest(values: list[int], least: int = 0) -> int | None:
    """Another."""
    best = least
    for value in values:
        if value > best and not value % 2:
            best = value
            log.info("found %d", value + 1)
    if best < 0:
        raise ValueError(f"{best + 1} of {len(values)}")
    return min(best, 9)
'''


def mutants(tmp_path: Path, source: str = SOURCE) -> list[Mutant]:
    path = tmp_path / "source.py"
    path.write_text(source)
    return mutants_of(path, "source.py")


def changed_lines(mutant: Mutant, source: str = SOURCE) -> list[str]:
    pairs = zip(source.splitlines(), mutant.applied(source).splitlines(), strict=True)
    return [after.strip() for before, after in pairs if before != after]


def test_each_mutant_changes_one_line_of_what_the_code_does(tmp_path: Path) -> None:
    lines = [changed_lines(mutant) for mutant in mutants(tmp_path)]
    assert all(len(line) == 1 for line in lines)
    found = {line[0] for line in lines}
    assert found >= {
        "def largest(values: list[int], least: int = (1)) -> int | None:",
        "if (value >= best) and not value % 2:",
        "if (value > best or not value % 2):",
        "if value > best and (value % 2):",
        "if value > best and not (value // 2):",
        "if value > best and not value % (3):",
        "if (best <= 0):",
        "pass",
        "return (max(best, 9))",
        "return None",
    }


def test_messages_docstrings_annotations_and_imports_stay(tmp_path: Path) -> None:
    changed = " ".join(line for mutant in mutants(tmp_path) for line in changed_lines(mutant))
    assert not any(word in changed for word in ("docstring", "Another", "import", "found", "len(values)"))
    assert "list[int]" in changed and "-> int & None" not in changed


def test_an_id_is_a_mutants_own_and_outlives_changes_elsewhere(tmp_path: Path) -> None:
    before = {m.id: changed_lines(m) for m in mutants(tmp_path)}
    assert len(before) == len(mutants(tmp_path))
    longer = "FIRST = 5\n" + SOURCE.replace("Another.", "Something else, and longer.")
    after = {m.id: changed_lines(m, longer) for m in mutants(tmp_path, longer)}
    assert before.items() <= after.items() and len(after) == len(before) + 1


def test_only_what_was_decided_counts() -> None:
    outcomes = Counter({KILLED: 9, SURVIVED: 1, TIMED_OUT: 5, "equivalent": 2})
    assert share_killed(outcomes) == pytest.approx(0.9) and share_killed(Counter()) == 1.0
    assert table([("here", 40, outcomes)]).splitlines()[-2:] == [
        "| here | 40 | 17 | 9 | 1 | 5 | 2 | 90% |",
        "| all | 40 | 17 | 9 | 1 | 5 | 2 | 90% |",
    ]


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    source, root = tmp_path / "here", tmp_path / "there"
    (source / "server").mkdir(parents=True)
    for name in ("proto/text_generation_proto", "server/text_generation_server/kernels/cpu/built"):
        (source / name).mkdir(parents=True)
    (source / "server" / "counted.py").write_text("def count(n):\n    while n < 3:\n        n += 1\n    return n\n")
    (source / "test_counted.py").write_text("from counted import count\ndef test_it():\n    assert count(0) == 3\n")
    for command in (["git", "init", "-q"], ["git", "add", "-A"]):
        subprocess.run(command, cwd=source, check=True)
    root.mkdir()
    return Copy(source, root, os.environ)


def test_the_dead_the_survivors_and_those_that_never_end_are_told_apart(copy: Copy, tmp_path: Path) -> None:
    path = tmp_path / "here" / "server" / "counted.py"
    seen: dict[str, set[str]] = {}
    with RunsOfTests(copy, ["test_counted.py"], libraries=("pytest",), limit_s=1.0) as runs:
        baseline = runs.run()
        assert (baseline.outcome, baseline.test, baseline.times_s.keys()) == (
            SURVIVED,
            "",
            {"test_counted.py::test_it"},
        )
        for mutant in mutants_of(path, "server/counted.py"):
            source = copy.change(mutant)
            run = runs.run("", baseline.times_s)
            assert run.test == "test_counted.py::test_it"
            seen.setdefault(run.outcome, set()).update(changed_lines(mutant, source))
            copy.restore(mutant.path, source)
        assert runs.run().outcome == SURVIVED
    assert "while (n <= 3):" in seen[KILLED] and "pass" in seen[TIMED_OUT]
    assert "return None" in seen[KILLED] and SURVIVED not in seen
    assert path.read_text().count("\n") == 4  # the original is unchanged


def test_likely_killers_come_first_and_quick_tests_before_slow_ones(copy: Copy) -> None:
    names = ("test_slow.py", "test_late.py", "test_counted.py")
    for name, seconds in zip(names, (0.2, 0.0, 0.1), strict=True):
        fails = f"import time\ndef test_it():\n    time.sleep({seconds})\n    assert not FAILS"
        (copy.root / name).write_text(f"FAILS = False\n{fails}\n")
    with RunsOfTests(copy, list(names), libraries=("pytest",)) as runs:
        usual_s = runs.run().times_s
        for name in names:
            (copy.root / name).write_text((copy.root / name).read_text().replace("FAILS = False", "FAILS = True"))
        assert [runs.run(first, usual_s).test for first in ("", "counted", "slow")] == [
            "test_late.py::test_it", "test_counted.py::test_it", "test_slow.py::test_it",
        ]  # fmt: skip


def test_a_draw_is_the_seeds_own_and_has_enough_of_every_room(tmp_path: Path) -> None:
    for name, copies in (("small", 1), ("large", 6)):
        (tmp_path / f"{name}.py").write_text("\n".join(f"A{i} = {i} + 1" for i in range(10 * copies)))
    rooms = [MutatedRoom("small", ("small.py",), ()), MutatedRoom("large", ("large.py",), ())]
    draws = draw(rooms, 12, 50, 10, tmp_path)
    assert draws == draw(rooms, 12, 50, 10, tmp_path) != draw(rooms, 13, 50, 10, tmp_path)
    (small, of_small), (large, of_large) = draws
    assert (of_small, of_large) == (30, 180) and 10 < len(small) < len(large)
    assert len({mutant.id for mutant in small + large}) == len(small) + len(large) in (50, 51)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_has_all_the_files_and_tests_that_it_names(room: MutatedRoom) -> None:
    assert [glob for glob in (*room.sources, *room.tests) if not files(ROOT, (glob,))] == []


def test_each_file_belongs_to_one_room() -> None:
    found = Counter(name for room in ROOMS for name in files(ROOT, room.sources))
    assert set(found.values()) == {1}
    all_files = files(ROOT, tuple(f"{folder}/**/*.py" for folder in WHOLE))
    assert [name for name in all_files if "/tests/" not in name and name not in found] == []


def test_a_run_that_was_cut_off_goes_on_where_it_stood(tmp_path: Path) -> None:
    first, second, third, *_ = drawn = mutants(tmp_path)
    out = tmp_path / "out.jsonl"
    outcomes = Outcomes(out, drawn, {})
    outcomes.add(first, SURVIVED, test="")
    outcomes.add(second, KILLED, test="test_it")
    again = Outcomes(out, drawn, {third.id: "why"})
    assert again.known == {first.id: SURVIVED, second.id: KILLED, third.id: "equivalent"}
    assert Outcomes(out, drawn[1:], {}).known == {second.id: KILLED}
