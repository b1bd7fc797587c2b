"""Runs the stages, and writes the results file after each of them.

Each stage runs in a process of its own, with a time limit: a stage that fails, hangs or breaks the GPU's context does
not affect the others.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from gpu_check.findings import read
from gpu_check.results import CheckReport, StageResult
from gpu_check.stages import STAGES, Stage
from text_generation_benchmark.process import exit_on_sigterm

RESULTS = Path(__file__).parents[2] / "benchmark" / "results"
LIMIT_S = 525  # seconds that all stages together may take
STOP_S = 15  # seconds that a stage gets after SIGTERM to stop its server and end
MAX_BESIDE = 4  # most stages that run at the same time, if none of them measures time
POLL_S = 0.1
LOG_LINES = 100


@dataclass(slots=True)
class RunningStage:
    stage: Stage
    process: "subprocess.Popen[bytes]"
    started_s: float
    limit_s: float
    findings: Path
    log: Path

    def result(self) -> StageResult | None:
        """The stage's result, or None while the stage runs within its limit."""
        seconds = time.monotonic() - self.started_s
        status = self.process.poll()
        if status is None and seconds < self.limit_s:
            return None
        failure = ""
        if status is None:
            stop(self.process)
            failure = f"not done after {seconds:.0f} s"
        elif status:
            failure = f"ended with status {status}: {self._last_words()}"
        result = StageResult(self.stage.name, seconds, list(read(self.findings)), failure)
        return result if result.passed else replace(result, log="\n".join(self._log_lines()[-LOG_LINES:]))

    def _last_words(self) -> str:
        return next((line.strip() for line in reversed(self._log_lines()) if line.strip()), "it printed nothing")

    def _log_lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()


def stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def start(stage: Stage, folder: Path, figures: dict[str, float], limit_s: float, on_gpu: bool) -> RunningStage:
    stem = stage.name.replace(" ", "-")
    findings, log = folder / f"{stem}.jsonl", folder / f"{stem}.log"
    environment = dict(os.environ)
    if stage.computes and not on_gpu:
        environment["TRITON_INTERPRET"] = "1"
    command = [
        sys.executable, "-m", "gpu_check.stages", stage.name, str(findings), json.dumps(figures)
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    return RunningStage(stage, process, time.monotonic(), limit_s, findings, log)


def rounds(stages: Sequence[Stage], beside: int) -> Iterator[list[Stage]]:
    """Stages to run at the same time: up to `beside` neighbours that measure no time, or one stage that does."""
    together: list[Stage] = []
    for stage in stages:
        if together and not (stage.beside_others and together[-1].beside_others and len(together) < beside):
            yield together
            together = []
        together.append(stage)
    if together:
        yield together


def run_together(
    stages: Sequence[Stage], folder: Path, figures: dict[str, float], deadline_s: float, on_gpu: bool
) -> Iterator[StageResult]:
    running: list[RunningStage] = []
    try:
        for stage in stages:
            left_s = deadline_s - time.monotonic() - STOP_S
            if left_s <= 0:
                yield StageResult(stage.name, 0, [], "not run: no time was left")
                continue
            running.append(start(stage, folder, figures, min(stage.limit_s, left_s), on_gpu))
        while running:
            for some in list(running):
                if result := some.result():
                    running.remove(some)
                    yield result
            time.sleep(POLL_S)
    finally:
        for some in running:
            stop(some.process)


def _say(result: StageResult) -> None:
    print(f"{result.name}: {result.verdict} ({result.seconds:.0f} s)", flush=True)
    for finding in result.findings:
        if finding.failure:
            print(f"    {', '.join(finding.cells.values())}: {finding.failure}", flush=True)


def check(out: Path | None, only: Sequence[str]) -> bool:
    """True if every stage has passed and every target is met."""
    deadline_s = time.monotonic() + LIMIT_S
    on_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    if out is None and on_gpu:
        out = RESULTS / f"{device}-{date[:10]}".lower().replace(" ", "-")
    if not on_gpu:
        print("There is no GPU: this is a rehearsal, in the Triton interpreter and on the CPU. No target is measured.")
    stages = [stage for stage in STAGES if not only or stage.name in only]
    done: list[StageResult] = []

    def report() -> CheckReport:
        ran = {result.name for result in done}
        return CheckReport(device, on_gpu, date, tuple(done), [stage.name for stage in stages if stage.name not in ran])

    with tempfile.TemporaryDirectory(prefix="tgi-gpu-check-") as folder:
        for together in rounds(stages, MAX_BESIDE if on_gpu else 1):
            for result in run_together(together, Path(folder), report().figures, deadline_s, on_gpu):
                done.append(result)
                _say(result)
                if out is not None:
                    report().write(out)
    print(f"\n{report().as_markdown()}")
    if out is not None:
        print(f"written: {out}.json and {out}.md")
    return all(result.passed for result in done) and (
        not on_gpu or all(verdict.startswith("met") for _, verdict in report().verdicts())
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="writes OUT.json and OUT.md; default on a GPU: benchmark/results/…")
    parser.add_argument(
        "--only", action="append", default=[], choices=[stage.name for stage in STAGES], metavar="STAGE"
    )
    arguments = parser.parse_args()
    exit_on_sigterm()
    sys.exit(0 if check(arguments.out, arguments.only) else 1)


if __name__ == "__main__":
    main()
