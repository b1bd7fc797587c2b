"""A rolling upgrade: engines and fronts of the protocol's version before work with those of the newest, and no stream
notices that engines are replaced one after the other."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from asks import asks
from calls import metric
from engine_port import EngineProcess
from scale import SHORT
from server_process import LAUNCHER, ServerProcess, wait_until
from streams import StreamAnswer, answers_meanwhile, compare, run_streams

LIMIT_S = 120.0
ENGINES = 1  # number of engines of each version: one more takes 30 s, and shows the same
INSECURE = "--insecure-cluster"
# Programs of this build that speak the version of proto/engine.proto before the newest, as the build before does.
PROGRAM = """#!{python}
from text_generation_router.wire import version

version.VERSION -= 1  # before any other module reads it
from {module} import main

main()
"""
LAUNCHER_PROGRAM = """#!{python}
from pathlib import Path

from text_generation_launcher.cli import main

main(program_directories=[Path(__file__).parent])
"""
MODULES = {
    "text-generation-router": "text_generation_router.cli",
    "text-generation-engine": "text_generation_router.engine_cli",
}
ASKED = asks(24, 80)


def make_programs(folder: Path) -> Path:
    """Makes the programs in `folder`, and returns the launcher that starts them."""
    for name, module in MODULES.items():
        _write(folder / name, PROGRAM.format(python=sys.executable, module=module))
    (folder / "text-generation-server").symlink_to(LAUNCHER.with_name("text-generation-server"))
    launcher = folder / "text-generation-launcher"
    _write(launcher, LAUNCHER_PROGRAM.format(python=sys.executable))
    return launcher


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@dataclass(frozen=True, slots=True)
class Deployment:
    before: Sequence[EngineProcess]  # speak the version before
    after: Sequence[EngineProcess]
    engines_file: Path
    older: Path  # the launcher of the version before

    def list_engines(self, *engines: EngineProcess) -> None:
        """Tells fronts of these engines."""
        new = self.engines_file.with_suffix(".new")
        new.write_text("".join(f"{engine.address}\n" for engine in engines))
        new.replace(self.engines_file)

    def front(self, launcher: Path) -> ServerProcess:
        words = ("--engines-file", str(self.engines_file), INSECURE, "--dtype", "float32", *SHORT.arguments)
        return ServerProcess(*words, launcher=launcher)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    older = make_programs(tmp_path_factory.mktemp("older"))
    file = tmp_path_factory.mktemp("engines") / "engines"
    with ExitStack() as stack:
        before, after = (
            [stack.enter_context(EngineProcess(INSECURE, launcher=launcher)) for _ in range(ENGINES)]
            for launcher in (older, LAUNCHER)
        )
        for engine in (*before, *after):
            engine.wait_until_ready()
        yield Deployment(before, after, file, older)


def connected(front: ServerProcess, engine: EngineProcess) -> int:
    return front.log().count(f"engine {engine.address} is connected")


def steps(engine: EngineProcess) -> float:
    return metric(f"http://127.0.0.1:{engine.port}", "tgi_shard_decode_steps")


def assert_computes(engines: Sequence[EngineProcess], had: Sequence[float]) -> None:
    """Each engine has computed more steps than it `had`. Its metrics may be some seconds old."""
    pairs = list(zip(engines, had, strict=True))
    wait_until(lambda: all(steps(engine) > before for engine, before in pairs), 60, "each engine has computed")


def test_a_front_of_the_version_before_serves_with_newer_engines(deployment, one_shard: list[StreamAnswer]) -> None:
    deployment.list_engines(*deployment.after)
    with deployment.front(deployment.older) as front:
        answers, _ = run_streams(front.url, SHORT.asks(), SHORT.num_streams)
    assert compare(one_shard, answers).failures() == []
    assert_computes(deployment.after, [0.0] * ENGINES)


def test_no_stream_notices_that_engines_are_upgraded_one_after_the_other(deployment) -> None:
    serving = list(deployment.before)
    deployment.list_engines(*serving)
    with deployment.front(LAUNCHER) as front:
        wait_until(lambda: all(connected(front, engine) for engine in serving), LIMIT_S, "they connect")
        expected, _ = run_streams(front.url, ASKED, len(ASKED))
        for old, new in zip(deployment.before, deployment.after, strict=True):
            had = steps(new)

            def upgrade(old: EngineProcess = old, new: EngineProcess = new) -> None:
                serving.append(new)
                deployment.list_engines(*serving)
                wait_until(lambda: connected(front, new), LIMIT_S, "the newer connects")
                os.kill(old.pid, signal.SIGTERM)
                wait_until(lambda: old.running.poll() == 0, LIMIT_S, "the older drains")
                serving.remove(old)
                deployment.list_engines(*serving)

            answers = answers_meanwhile(front.url, ASKED, upgrade, settled_s=0)
            assert compare([expected[answer.ask] for answer in answers], answers).failures() == []
            assert_computes([new], [had])
