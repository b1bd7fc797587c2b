"""Runs a stage in processes: stops it at its limit, and starts it again behind a case that broke its process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gpu_check.findings import FailedCase, Journal, JournalContent, Known, Request
from gpu_check.plans import STOP_S, Stage
from gpu_check.results import StageResult

LOG_LINES = 100
MOST_RESTARTS = 6  # number of times that a stage is started again: each costs the start of a process and its context
AGAIN_S = 60  # seconds that a broken case gets when it is run again

Process = subprocess.Popen[bytes]
# Starts the process of a stage: the stage, its only case (empty: all), its journal, its log, additional variables.
Launch = Callable[[Stage, str, Path, Path, Mapping[str, str]], Process]


def command_of(request: Path) -> list[str]:
    return [sys.executable, "-m", "gpu_check.stages", str(request)]


def with_variables(variables: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """The command with these variables, beside those of this process."""
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *command]


def launcher(known: Known, interpret: bool) -> Launch:
    """`interpret`: without a GPU, kernels run in Triton's interpreter."""

    def launch(stage: Stage, only: str, journal: Path, log: Path, variables: Mapping[str, str]) -> Process:
        request = journal.with_suffix(f"{journal.suffix}.json")
        Request(stage.function, str(journal), known, only).write(request)
        added = {**variables, "PYTHONUNBUFFERED": "1"}
        if interpret and stage.computes:
            added["TRITON_INTERPRET"] = "1"
        command = with_variables(added, command_of(request))
        with log.open("ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)

    return launch


def stop(*processes: Process) -> None:
    """Ends all of them within STOP_S."""
    for process in processes:
        process.terminate()
    until_s = time.monotonic() + STOP_S
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until_s - time.monotonic()))
        kill_group(process)


def kill_group(process: Process) -> None:
    """Kills the process and all that it has started, such as a server."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class RunningStage:
    """A stage until its end, over all processes that it takes."""

    def __init__(self, stage: Stage, folder: Path, launch: Launch, limit_s: float) -> None:
        stem = stage.name.replace(" ", "-")
        self.stage = stage
        self.limit_s = limit_s
        self._launch = launch
        self._journal, self._log = folder / f"{stem}.journal", folder / f"{stem}.log"
        self._again_log = folder / f"{stem}.again.log"
        self._started_s = time.monotonic()
        self._restarts = 0
        self._begun = 0  # cases that had begun when the process was started
        self._was_stopped = False  # at its limit
        self._again = False  # the process runs the first broken case again
        self._failure = ""  # how the stage's last process failed
        self.process = self._start()

    @property
    def is_late(self) -> bool:
        return self._seconds() >= self.limit_s

    def result(self) -> StageResult | None:
        """The stage's result, or None while the stage runs within its limit."""
        status = None if self._was_stopped else self.process.poll()
        in_time = not self.is_late
        if status is None and in_time:
            return None
        if status is None:
            stop_late([self])
        else:
            kill_group(self.process)
        if self._again:
            return self._finished()
        if status is None:
            self._failure = f"not done after {self._seconds():.0f} s"
        elif status:
            self._failure = f"ended with status {status}: {self._last_words()}"
        content = self._close()
        if status and in_time and self._may_restart(content):
            self._restarts += 1
            self.process = self._start()
            return None
        if content.broken and self._seconds() + AGAIN_S < self.limit_s:
            self._run_again(content.broken[0])
            return None
        return self._finished()

    def _seconds(self) -> float:
        return time.monotonic() - self._started_s

    def _start(self) -> Process:
        self._begun = len(self._content().begun)
        self._failure = ""
        return self._launch(self.stage, "", self._journal, self._log, {})

    def _run_again(self, case: str) -> None:
        """Every launch waits for its kernel, so the log names the line that launched the kernel that fails."""
        self._again = True
        self.limit_s = min(self.limit_s, self._seconds() + AGAIN_S)
        self._again_log.write_text(f"\n{case}, again with CUDA_LAUNCH_BLOCKING=1:\n")
        journal = self._journal.with_suffix(".again")
        self.process = self._launch(self.stage, case, journal, self._again_log, {"CUDA_LAUNCH_BLOCKING": "1"})

    def _content(self) -> JournalContent:
        return Journal(self._journal).read()

    def _close(self) -> JournalContent:
        """Notes the failure of the case in which the process ended, if the process has not done so itself."""
        content = self._content()
        if name := content.unended:
            journal = Journal(self._journal)
            journal.add(name, replace(content.begun[name], failure=self._failure or "its process ended"))
            journal.end(name, broken=True)
        return self._content()

    def _may_restart(self, content: JournalContent) -> bool:
        """Only behind a case: a process that ends before its first case would do so again."""
        return self._restarts < MOST_RESTARTS and len(content.begun) > self._begun and bool(content.broken)

    def _finished(self) -> StageResult:
        content = self._content()
        failed = [FailedCase(self.stage.name, self.stage.function, name) for name in content.failed]
        result = StageResult(self.stage.name, self._seconds(), content.findings, self._failure, failed_cases=failed)
        if result.passed:
            return result
        logs = [*self._log_lines(self._log)[-LOG_LINES:], *self._log_lines(self._again_log)[-LOG_LINES:]]
        return replace(result, log="\n".join(logs))

    def _last_words(self) -> str:
        return next(
            (line.strip() for line in reversed(self._log_lines(self._log)) if line.strip()), "it printed nothing"
        )

    def _log_lines(self, log: Path) -> list[str]:
        return log.read_text(errors="replace").splitlines() if log.exists() else []


def stop_late(stages: Iterable[RunningStage]) -> None:
    """Stops the stages that are at their limits, all at once."""
    late = [stage for stage in stages if stage.is_late and not stage._was_stopped and stage.process.poll() is None]
    for stage in late:
        stage._was_stopped = True
    stop(*(stage.process for stage in late))
