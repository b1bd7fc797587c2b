"""The commands of README.md and docs/, and what shows that each of them works.

`python integration-tests/documented.py` prints every command: `run` (a test runs it), or `parsed` by its program, or
compared with the files that it names, because it needs a network, a daemon, other machines or much time.
"""

import itertools
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import typer
from manifests import REPOSITORY, launched
from pages import FILLED, PAGES

from text_generation_launcher import cli

# What a shell puts in the place of ${VARIABLE}, and a reader in the place of PORT.
MORE_FILLED = ((re.compile(r"\$\{\w+\}"), "0"), (re.compile(r"\bPORT$"), "3000"))
ASSIGNMENT = re.compile(r"[A-Z][A-Z_]*=\S*")
SERVER = re.compile(r"localhost:(?:3000|8080)\b")  # itself, and in a container
IMAGE = "tgi-py"
CONTROL = ("certs", "scale", "replicas", "restart-fronts", "completion")


@dataclass(frozen=True, slots=True)
class Documented:
    page: str  # path within the repository
    words: tuple[str, ...]  # one command of a shell, without variables before it

    @property
    def program(self) -> str:
        return Path(self.words[0]).name

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def blocks(page: Path) -> Iterator[list[str]]:
    """The lines of each code block of a page, fenced or indented, without their indentation."""
    block: list[str] = []
    is_fenced = False
    for line in (*page.read_text().splitlines(), ""):
        if line.startswith("```"):
            is_fenced = not is_fenced
        elif is_fenced or line.startswith("    "):
            block.append(line if is_fenced else line.strip())
            continue
        if block:
            yield block
        block = []


def shell_lines(block: list[str]) -> Iterator[str]:
    """The lines of a block as a shell reads them: a line goes on after a backslash, and within quotes."""
    waiting = ""
    for line in block:
        waiting = f"{waiting}{line}"
        try:
            shlex.split(waiting, comments=True)
        except ValueError:  # a quote or a backslash is open
            waiting = waiting.removesuffix("\\") if line.endswith("\\") else f"{waiting}\n"
            continue
        yield waiting
        waiting = ""


def inline(page: Path) -> Iterator[list[str]]:
    """The commands within sentences and tables, `like this`. A command with `…` is not whole."""
    for found in re.findall(r"(?<!`)`([a-z][\w-]* [^`…\n]+)`(?!`)", page.read_text()):
        yield [found]


def documented() -> list[Documented]:
    return [command for page in PAGES for block in (*blocks(page), *inline(page)) for command in _commands(page, block)]


def _commands(page: Path, block: list[str]) -> Iterator[Documented]:
    """Commands of the programs in WAYS. All other lines of blocks are output, configuration or drawings."""
    for line in shell_lines(block):
        for pattern, word in (*FILLED, *MORE_FILLED):
            line = pattern.sub(word, line)
        words: list[str] = []
        for word in (*shlex.split(line.removeprefix("ExecStart="), comments=True), "&&"):
            if word != "&&":
                words.append(word)
                continue
            while words and ASSIGNMENT.fullmatch(words[0]):
                del words[0]
            if words and Path(words[0]).name in WAYS:
                yield Documented(str(page.relative_to(REPOSITORY)), tuple(words))
            words = []


def check(command: Documented) -> str:
    """What shows that the command works. AssertionError if its program does not take it."""
    return WAYS[command.program](command.words)


def _launcher(words: tuple[str, ...]) -> str:
    if words[1:2] and words[1] in CONTROL:
        command = typer.main.get_command(cli.COMMANDS[words[1]]())
        if words[2:]:
            command.make_context(words[1], list(words[2:]))
    elif words[1:] != ("--help",):
        launched(list(words))
    return "parsed by text-generation-launcher"


def _benchmark(words: tuple[str, ...]) -> str:
    from text_generation_benchmark.cli import app

    command = typer.main.get_command(app)
    if len(words) > 2:
        parse(command, list(words[1:]))
    else:  # a sentence names the command without what it needs
        assert words[1] in command.commands, words  # type: ignore[attr-defined]
    return "parsed by text-generation-benchmark"


def _router(words: tuple[str, ...]) -> str:
    assert words[1:] == ("print-schema",), words
    return "run: test_router_cli.py"


def parse(command: object, words: list[str]) -> None:
    """Parses as click does, subcommands included, and calls nothing."""
    context = command.make_context("documented", list(words), resilient_parsing=False)  # type: ignore[attr-defined]
    if rest := [*getattr(context, "_protected_args", []), *context.args]:
        name, found, further = command.resolve_command(context, rest)  # type: ignore[attr-defined]
        assert found is not None, words
        found.make_context(name, further, parent=context)


def _make(words: tuple[str, ...]) -> str:
    variables = dict(word.split("=", 1) for word in words[1:] if "=" in word)
    targets = [word for word in words[1:] if "=" not in word]
    known = set(re.findall(r"^([\w-]+):(?!=)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert targets and known.issuperset(targets), words
    if targets == ["run"]:
        launched(["text-generation-launcher", *shlex.split(variables.get("ARGS", ""))])
    return "parsed: a target of the Makefile" if targets != ["run"] else "parsed by text-generation-launcher"


def _curl(words: tuple[str, ...]) -> str:
    assert any(SERVER.search(word) for word in words), words
    if any("/admin/" in word for word in words):
        return "run: test_replicas.py"
    if any(word.endswith("load_lora_adapter") for word in words):
        return "run: test_adapters_loaded_served.py"
    return "run: test_documented_commands.py"


def _kubectl(words: tuple[str, ...]) -> str:
    return _files(words, "-f", "--filename")


def _files(words: tuple[str, ...], *flags: str) -> str:
    for file in (word for flag, word in itertools.pairwise(words) if flag in flags):
        assert any((REPOSITORY / folder / file).exists() for folder in ("", "deploy/kubernetes")), file
    return "parsed: its files are those of deploy/"


def _docker(words: tuple[str, ...]) -> str:
    """What a container runs: the launcher, which is the image's entry point, or a command that names it."""
    if "text-generation-launcher" in words:
        return _launcher(words[words.index("text-generation-launcher") :])
    if words[1] == "run":
        return _launcher(("text-generation-launcher", *words[words.index(IMAGE) + 1 :]))
    return _files(words, "--file", "-f")


def _pip(words: tuple[str, ...]) -> str:
    """An extra of our package, or requirements that pyproject.toml has in one of its extras."""
    assert words[1] == "install", words
    project = (REPOSITORY / "pyproject.toml").read_text()
    for word in words[2:]:
        extra = re.fullmatch(r"\.\[(\w+)\]", word)
        is_known = re.search(rf"^{extra[1]} = \[", project, re.MULTILINE) if extra else f'"{word}"' in project
        assert is_known or (REPOSITORY / word).is_dir(), word
    return "parsed: in pyproject.toml"


def _ray(_: tuple[str, ...]) -> str:
    return "parsed by ray: test_ray_cluster_yaml.py"  # importing Ray takes a second, and that test does


def _wrapped(words: tuple[str, ...]) -> str:
    """A command that runs the launcher: in a shell of its own, or behind options of one letter with a value."""
    inner = shlex.split(words[-1]) if "bash" in words else [*words[3:]]
    return _launcher(tuple(inner))


def _python(words: tuple[str, ...]) -> str:
    """A module or a file of this repository."""
    name = words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1]
    assert any((REPOSITORY / folder / name).exists() for folder in ("", "tools", "server", "router")), name
    return "parsed: a file of the repository"


WAYS: Mapping[str, Callable[[tuple[str, ...]], str]] = {
    "text-generation-launcher": _launcher,
    "text-generation-benchmark": _benchmark,
    "text-generation-router": _router,
    "make": _make,
    "curl": _curl,
    "kubectl": _kubectl,
    "docker": _docker,
    "pip": _pip,
    "ray": _ray,
    "srun": _wrapped,
    "taskset": _wrapped,
    "python": _python,
}


if __name__ == "__main__":
    for each in documented():
        print(f"{check(each):40} {' '.join(str(each).split())}")
