"""What is changed in a source, what is left alone, and that a run tells the dead from the survivors."""

import subprocess
from collections import Counter
from pathlib import Path

import pytest
from mutation.__main__ import share_killed, table
from mutation.copies import Copy
from mutation.mutants import Mutant, mutants_of
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
    return Copy(source, root)


def test_the_dead_the_survivors_and_those_that_never_end_are_told_apart(copy: Copy, tmp_path: Path) -> None:
    path = tmp_path / "here" / "server" / "counted.py"
    seen: dict[str, set[str]] = {}
    with RunsOfTests(copy, ["test_counted.py"], libraries=("pytest",)) as runs:
        assert runs.outcome(limit_s=60) == SURVIVED
        for mutant in mutants_of(path, "server/counted.py"):
            source = copy.change(mutant)
            seen.setdefault(runs.outcome(limit_s=60 if "n += 1" in mutant.applied(source) else 2), set()).update(
                changed_lines(mutant, source)
            )
            copy.restore(mutant.path, source)
        assert runs.outcome(limit_s=60) == SURVIVED
    assert "while (n <= 3):" in seen[KILLED] and "pass" in seen[TIMED_OUT]
    assert "return None" in seen[KILLED] and SURVIVED not in seen
    assert path.read_text().count("\n") == 4  # the original is as it was
