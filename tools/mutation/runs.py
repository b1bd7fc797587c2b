"""Runs of a room's tests, forked one by one from a process that has imported the libraries."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from mutation.copies import Copy

KILLED, SURVIVED, TIMED_OUT = "killed", "survived", "timed out"
STOP_S = 10
# What the tests import and take seconds for.
LIBRARIES = (
    "pytest", "hypothesis", "hypothesis.stateful", "numpy", "torch", "torch._dynamo", "safetensors.torch",
    "transformers.models.llama.modeling_llama", "tokenizers", "fastapi", "uvicorn", "httpx", "orjson", "pydantic",
    "typer", "grpc.aio", "psutil", "prometheus_client",
)  # fmt: skip


class RunsOfTests:
    def __init__(self, copy: Copy, tests: list[str], libraries: tuple[str, ...] = LIBRARIES) -> None:
        self._log = copy.root / "mutant.log"
        script = Path(__file__).parent / "fork_server.py"
        self._server = subprocess.Popen(
            [sys.executable, str(script), str(self._log), " ".join(libraries), *tests],
            cwd=copy.root, env=copy.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> "RunsOfTests":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.killpg(self._server.pid, signal.SIGKILL)
        with self._server:  # closes the pipes
            self._server.wait(STOP_S)

    def outcome(self, limit_s: float) -> str:
        """Of the tests as the copy is now."""
        assert self._server.stdin is not None and self._server.stdout is not None
        print(limit_s, file=self._server.stdin, flush=True)
        answer = self._server.stdout.readline().strip()
        if answer not in (KILLED, SURVIVED, TIMED_OUT):
            raise RuntimeError(f"the process that runs the tests has ended: {self.last_words()}")
        return answer

    def last_words(self) -> str:
        return self._log.read_text(errors="replace")[-4000:] if self._log.exists() else ""
