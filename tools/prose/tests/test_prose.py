"""Every pattern finds its wrong examples and not its right ones; prose is found in all kinds of files."""

import subprocess
from pathlib import Path

import pytest
from prose.__main__ import main, sample, table
from prose.check import Checker
from prose.texts import COMMENT, DOCSTRING, MARKDOWN, NAME, PAIR, STRING, TRAILING, ProseText, texts_of

CHECKER = Checker.from_file()
PATTERNS = {pattern.name: pattern for pattern in CHECKER.patterns}


def names_found(words: str, kind: str) -> set[str]:
    return {finding.pattern.name for finding in CHECKER.findings("some.py", [ProseText(kind, ((1, words),))])}


def kinds_of(name: str) -> list[str]:
    return sorted(PATTERNS[name].kinds) or [DOCSTRING, COMMENT, TRAILING, STRING, NAME, MARKDOWN]


@pytest.mark.parametrize(("name", "words"), [(p.name, words) for p in CHECKER.patterns for words in p.wrong])
def test_a_wrong_example_is_found_by_its_own_pattern(name: str, words: str) -> None:
    assert all(name in names_found(words, kind) for kind in kinds_of(name))


@pytest.mark.parametrize(("name", "words"), [(p.name, words) for p in CHECKER.patterns for words in p.right])
def test_a_right_example_is_found_by_no_pattern(name: str, words: str) -> None:
    assert not set().union(*(names_found(words, kind) for kind in kinds_of(name)))


def test_every_pattern_has_a_wrong_and_a_right_example_and_says_what_to_write() -> None:
    assert all(p.wrong and p.right and p.why and p.say for p in CHECKER.patterns)
    assert len(PATTERNS) == len(CHECKER.patterns)


PYTHON = '''"""The module.

Second paragraph."""

KEY = "two words"
LIMIT = 1  # seconds
NEXT = 2  # rows


# A comment
# of two lines.
def test_a_name_is_prose(path):
    """A function."""
    raise ValueError(
        f"--flag {path} has # no end: "
        "check the path"
    )


class Some:
    "A class."

    text = """not a
docstring, but prose"""
'''


def found(tmp_path: Path, name: str, source: str) -> list[tuple[str, int, str]]:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(source)
    return [(text.kind, text.line, text.joined.strip()) for text in texts_of(tmp_path / name)]


def test_the_prose_of_a_python_file(tmp_path: Path) -> None:
    assert found(tmp_path, "some.py", PYTHON) == [
        (DOCSTRING, 1, "The module.  ¶ Second paragraph."),
        (TRAILING, 6, "seconds"),
        (PAIR, 6, "seconds ⏎ rows"),
        (TRAILING, 7, "rows"),
        (COMMENT, 10, "A comment of two lines."),
        (NAME, 12, "test a name is prose"),
        (DOCSTRING, 13, "A function."),
        (STRING, 15, "--flag {} has # no end: check the path"),
        (DOCSTRING, 21, "A class."),
        (STRING, 23, "not a docstring, but prose"),
    ]


def test_only_fields_of_f_strings_are_left_out(tmp_path: Path) -> None:
    source = 'A = "one {two} three"\nB = f"one {two} three {f(1)} four"\n'
    assert [words for _, _, words in found(tmp_path, "some.py", source)] == ["one {two} three", "one {} three {} four"]


def test_comments_for_tools_are_not_prose(tmp_path: Path) -> None:
    source = "# --- part ---\nA = 1  # noqa: E402\nB = 2  # type: ignore\nC = (\n    3,\n)  # fmt: skip\n# type of a\n"
    assert found(tmp_path, "some.py", source) == [(COMMENT, 7, "type of a")]


def test_a_program_in_a_literal_is_not_prose(tmp_path: Path) -> None:
    source = 'SCRIPT = """\nimport os\nos.kill(nobody, 9)\n"""\nTEXT = """\nimports stay\nprose"""\n'
    assert found(tmp_path, "some.py", source) == [(STRING, 5, "¶ imports stay prose")]


def test_the_line_of_a_finding_is_that_of_its_first_word(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text('"""First line.\n\nA key that is\nno digest, and no rest."""\n')
    (finding,) = CHECKER.findings("some.py", texts_of(tmp_path / "some.py"))
    assert (finding.pattern.name, finding.line) == ("is-no", 3)


def test_code_in_a_text_and_words_of_two_paragraphs_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text('"""The state `is no state`, and that is\n\nno problem."""\n')
    assert not list(CHECKER.findings("some.py", texts_of(tmp_path / "some.py")))


def test_the_prose_of_c_and_proto_files(tmp_path: Path) -> None:
    source = '/* One\n * block. */\nint a; // after code\n// before\n// code\nputs("a // text of words");\n'
    expected = [
        (COMMENT, 1, "One block."),
        (TRAILING, 3, "after code"),
        (COMMENT, 4, "before code"),
        (STRING, 6, "a // text of words"),
    ]
    assert found(tmp_path, "some.c", source) == found(tmp_path, "some.proto", source) == expected


def test_the_prose_of_makefiles_toml_and_scripts(tmp_path: Path) -> None:
    source = '# One comment.\nkey = "a # value here"  # trailing\nother#hash = 1\n'
    expected = [(COMMENT, 1, "One comment."), (STRING, 2, "a # value here"), (TRAILING, 2, "trailing")]
    names = ("Makefile", "some.toml", "some.yml", ".ci/run")
    assert all(found(tmp_path, name, source) == expected for name in names)
    assert found(tmp_path, "some.json", source) == []


def test_the_prose_of_markdown_is_its_paragraphs_without_code(tmp_path: Path) -> None:
    source = "# Title\n\nTwo\nlines.\n- item\n\n```\ncode\n```\n| cell |\n"
    assert found(tmp_path, "some.md", source) == [
        (MARKDOWN, 1, "# Title"),
        (MARKDOWN, 3, "Two lines."),
        (MARKDOWN, 5, "- item"),
        (MARKDOWN, 10, "| cell |"),
    ]


def repository(folder: Path, **sources: str) -> Path:
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the command in a repository with two files, and returns exit status and output."""
    repository(tmp_path, bad='"""A key is no digest."""\n', good='"""A key is not a digest."""\n')
    monkeypatch.setattr("prose.__main__.ROOT", tmp_path)

    def run_with(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["prose", *arguments])
        return main(), capsys.readouterr().out

    return run_with


def test_the_command_fails_with_place_reason_and_advice(run) -> None:
    status, output = run()
    assert status == 1
    assert output.startswith("bad.py:1: “A key is no digest.” (is-no): ")
    assert "say `is not a …`" in output


def test_the_command_passes_where_nothing_is_found(run) -> None:
    assert run("good.py") == (0, "")


def test_counts_are_printed_for_each_pattern(run) -> None:
    status, output = run("--counts")
    assert status == 0 and "| is-no | 1 | 1 |" in output


def test_a_sample_shows_texts_with_their_places_and_without_code(run) -> None:
    status, output = run("--sample", "5", "--seed", "x")
    assert status == 0
    assert output == (
        "seed x\n\nbad.py:1 (docstring)\n    A key is no digest.\n\ngood.py:1 (docstring)\n    A key is not a digest.\n"
    )


def test_one_seed_draws_one_sample_and_another_seed_another() -> None:
    texts = {"some.py": [ProseText(COMMENT, ((line, f"comment number {line}"),)) for line in range(1, 100)]}
    assert sample(texts, 10, "a") == sample(texts, 10, "a") != sample(texts, 10, "b")
    assert len(sample(texts, 10, "a")) == 10


ALLOWED = """
[[pattern]]
name = "is-no"
why = "why"
say = "say"
regex = '\\bis no\\b'
wrong = []
right = []
[[data]]
path = "data/"
[[allowed]]
path = "a.py"
text = "this is no"
"""


@pytest.fixture
def lenient(tmp_path: Path) -> Checker:
    (tmp_path / "patterns.toml").write_text(ALLOWED)
    return Checker.from_file(tmp_path / "patterns.toml")


def test_an_allowed_wording_is_allowed_in_its_file_only(lenient: Checker) -> None:
    text = [ProseText(COMMENT, ((1, "but this is no error, and that is no error"),))]
    assert [finding.words[-14:] for finding in lenient.findings("a.py", text)] == ["at is no error"]
    assert len(list(lenient.findings("b.py", text))) == 2


def test_an_entry_that_allows_nothing_any_longer_is_named(lenient: Checker) -> None:
    assert [entry.text for entry in lenient.unused({"a.py"})] == ["this is no"]
    assert lenient.unused({"b.py"}) == []
    list(lenient.findings("a.py", [ProseText(COMMENT, ((1, "this is no error"),))]))
    assert lenient.unused({"a.py"}) == []


def test_literals_of_data_files_are_not_prose(lenient: Checker) -> None:
    texts = [ProseText(STRING, ((1, "it is no error"),)), ProseText(COMMENT, ((2, "it is no error"),))]
    assert [finding.line for finding in lenient.findings("data/words.py", texts)] == [2]


def test_a_table_has_one_row_for_each_pattern_and_the_sums() -> None:
    text = [ProseText(COMMENT, ((1, "Nobody is no body"),))]
    findings = [f for path in ("a/x.py", "b/y.py") for f in CHECKER.findings(path, text)]
    assert table(findings).splitlines()[2:] == ["| body | 1 | 1 | 2 |", "| is-no | 1 | 1 | 2 |", "| all | 2 | 2 | 4 |"]
