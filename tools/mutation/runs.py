"""Runs the tests of a room (a group of source files and their tests). Each run is forked from a process that has
imported the libraries.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType

from mutation.copies import Copy

KILLED, SURVIVED, TIMED_OUT = "killed", "survived", "timed out"
STOP_S = 10
LIMIT_S = 20.0  # seconds of CPU time for a test that usually takes no time, see fork_server.py
# Libraries that the tests import, which takes seconds.
LIBRARIES = (
    "pytest", "hypothesis", "hypothesis.stateful", "numpy", "torch", "torch._dynamo", "safetensors.torch",
    "transformers.models.llama.modeling_llama", "tokenizers", "starlette", "uvicorn", "httpx", "orjson", "pydantic",
    "typer", "grpc.aio", "psutil", "prometheus_client",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunResult:
    outcome: str
    test: str  # the test in which the run ended; empty if the mutant survived
    times_s: dict[str, float]  # seconds of each test that came to its end


class RunsOfTests:
    def __init__(
        self, copy: Copy, tests: list[str], libraries: tuple[str, ...] = LIBRARIES, limit_s: float = LIMIT_S
    ) -> None:
        self._log = copy.root / "mutant.log"
        script = Path(__file__).parent / "fork_server.py"
        self._server = subprocess.Popen(
            [sys.executable, str(script), str(self._log), str(limit_s), " ".join(libraries), *tests],
            cwd=copy.root, env=copy.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> "RunsOfTests":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.killpg(self._server.pid, signal.SIGKILL)
        with self._server:  # leaving this context closes the pipes
            self._server.wait(STOP_S)

    def run(self, first: str = "", usual_s: Mapping[str, float] = MappingProxyType({})) -> RunResult:
        """Runs the tests on the copy as it is now. Tests with the word `first` in the name of their file come first.
        `usual_s` has the times of a run without a mutant."""
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps({"first": first, "usual_s": dict(usual_s)}), file=self._server.stdin, flush=True)
        if not (answer := self._server.stdout.readline()):
            raise RuntimeError(f"the process that runs the tests has ended: {self.last_words()}")
        return RunResult(**json.loads(answer))

    def last_words(self) -> str:
        return self._log.read_text(errors="replace")[-4000:] if self._log.exists() else ""
