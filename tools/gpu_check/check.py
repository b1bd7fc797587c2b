"""Runs a plan's stages, and writes the results files after each of them.

Each stage runs in a process of its own, with a time limit: a stage that fails, hangs or breaks the GPU's context does
not affect the others.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from gpu_check.findings import FailedCase, Known
from gpu_check.plans import LIMIT_S, PLANS, Stage, rounds, time_for
from gpu_check.results import CheckReport, StageResult
from gpu_check.running import Launch, RunningStage, launcher, stop, stop_late
from text_generation_benchmark.process import exit_on_sigterm

RESULTS = Path(__file__).parents[2] / "benchmark" / "results"
MAX_BESIDE = 8  # most stages that run at the same time, if none of them measures time
POLL_S = 0.1

LaunchWith = Callable[[Known], Launch]


class Check:
    """One run of a plan. `deadline_s` is a time of time.monotonic()."""

    def __init__(self, plan: str, stages: Sequence[Stage], deadline_s: float, out: Path | None, beside: int) -> None:
        self._plan = plan
        self._stages = stages
        self._deadline_s = deadline_s
        self._out = out
        self._beside = beside
        self._done: list[StageResult] = []
        self._on_gpu = torch.cuda.is_available()
        self._device = torch.cuda.get_device_name() if self._on_gpu else "CPU"
        self._date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")

    def run(self, launch_with: LaunchWith) -> CheckReport:
        """The results files are written after each stage, and whole: a reader never finds half of one."""
        self._write()
        with tempfile.TemporaryDirectory(prefix="tgi-gpu-check-") as folder:
            for together in rounds(self._stages, self._beside):
                known = Known(self._report().figures, self._failed(), str(self._out or ""))
                for result in self._run_together(together, Path(folder), launch_with(known)):
                    self._done.append(result)
                    say(result)
                    self._write()
        return self._report()

    def _failed(self) -> tuple[FailedCase, ...]:
        return tuple(case for result in self._done for case in result.failed_cases)

    def _report(self) -> CheckReport:
        ran = {result.name for result in self._done}
        waiting = [stage.name for stage in self._stages if stage.name not in ran]
        return CheckReport(
            plan=self._plan,
            device=self._device,
            on_gpu=self._on_gpu,
            date=self._date,
            stages=tuple(self._done),
            waiting=waiting,
        )

    def _write(self) -> None:
        if self._out is not None:
            self._report().write(self._out / self.stem)

    @property
    def stem(self) -> str:
        """Name of the results files, in letters, digits, hyphens and dots."""
        return re.sub(r"[^a-z0-9.]+", "-", f"{self._device}-{self._date[:10]}-{self._plan}".lower())

    def _run_together(self, stages: Sequence[Stage], folder: Path, launch: Launch) -> Iterator[StageResult]:
        behind = self._stages[self._stages.index(stages[-1]) + 1 :]
        running: list[RunningStage] = []
        try:
            for stage in stages:
                limit_s = time_for(stage, behind, self._deadline_s - time.monotonic())
                if limit_s <= 0:
                    yield StageResult(stage.name, 0, [], "not run: the rest of the time is reserved for other stages")
                else:
                    running.append(RunningStage(stage, folder, launch, limit_s))
            while running:
                stop_late(running)
                for some in list(running):
                    if result := some.result():
                        running.remove(some)
                        yield result
                time.sleep(POLL_S)
        finally:
            stop(*(some.process for some in running))


def say(result: StageResult) -> None:
    print(f"{result.name}: {result.verdict} ({result.seconds:.0f} s)", flush=True)
    for finding in result.findings:
        if finding.failure:
            print(f"    {', '.join(finding.cells.values())}: {finding.failure}", flush=True)


def main() -> None:
    started_s = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", choices=sorted(PLANS), default="a")
    parser.add_argument("--out", type=Path, help="folder of the results files; default: $OUT, or benchmark/results")
    parser.add_argument("--only", action="append", default=[], metavar="STAGE", help="run this stage of the plan only")
    arguments = parser.parse_args()
    stages = PLANS[arguments.plan]
    unknown = set(arguments.only) - {stage.name for stage in stages}
    if unknown:
        parser.error(f"plan {arguments.plan} has no stage {', '.join(sorted(unknown))}; its stages are "
                     f"{', '.join(stage.name for stage in stages)}")  # fmt: skip
    stages = tuple(stage for stage in stages if not arguments.only or stage.name in arguments.only)
    exit_on_sigterm()
    sys.exit(0 if check(arguments.plan, stages, arguments.out, started_s + LIMIT_S) else 1)


def check(plan: str, stages: Sequence[Stage], out: Path | None, deadline_s: float) -> bool:
    """True if every stage has passed and every target of the plan is met."""
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        print("There is no GPU: this is a rehearsal, in the Triton interpreter and on the CPU. No target is measured.")
    if out is None and (given := os.environ.get("OUT")):
        out = Path(given)
    elif out is None and on_gpu:
        out = RESULTS
    run = Check(plan, stages, deadline_s, out, MAX_BESIDE if on_gpu else 1)
    report = run.run(lambda known: launcher(known, interpret=not on_gpu))
    # The summary comes once more at the end: of a long output, often the end only is kept.
    print(f"\n{report.as_markdown()}\n{report.summary()}")
    if out is not None:
        print(f"written: {out / run.stem}.json and .md")
    return report.passed


if __name__ == "__main__":
    main()
