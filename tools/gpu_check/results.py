"""Writes the results files: all findings, and which targets are met. JSON for programs, Markdown for readers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gpu_check.findings import FailedCase, Finding
from text_generation_benchmark.output import table


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    figure: str  # name of the figure that the target limits
    limit: float
    at_least: bool = True

    def verdict(self, figures: Mapping[str, float], on_gpu: bool) -> str:
        if not on_gpu:
            return "not run: no GPU"
        value = figures.get(self.figure)
        if value is None:
            return "not run: the stage that measures it did not get that far"
        met = value >= self.limit if self.at_least else value <= self.limit
        return f"{'met' if met else 'not met'}: {value:.1%}"

    @property
    def wanted(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:.0%}"


TARGETS = (
    Target("decode of one stream, bfloat16, of the memory's ceiling", "decode at 1", 0.80),
    Target("decode of 64 streams at 1,000 tokens, weights and KV, of the memory's ceiling", "decode at 64", 0.70),
    Target("prefill of 4,096 tokens, of the matrix ceiling", "prefill", 0.55),
    Target("outside the GPU, of a decode step's wall time at 64 streams", "outside at 64", 0.03, at_least=False),
)


TARGET_STAGE = "server"  # the stages whose names begin like this measure the targets


@dataclass(frozen=True, slots=True)
class StageResult:
    name: str
    seconds: float
    findings: Sequence[Finding]
    failure: str = ""  # how the stage failed; empty if it ran to the end
    log: str = ""  # the end of the stage's log; empty if it passed
    failed_cases: Sequence[FailedCase] = field(default_factory=tuple)

    @property
    def verdict(self) -> str:
        failed = sum(bool(finding.failure) for finding in self.findings)
        if self.failure:
            return f"failed: {self.failure}"
        if not self.findings:
            return "failed: it found nothing"
        return f"failed: {failed} of {len(self.findings)}" if failed else "passed"

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"


@dataclass(frozen=True, slots=True)
class CheckReport:
    plan: str
    device: str
    on_gpu: bool
    date: str
    stages: Sequence[StageResult]
    waiting: Sequence[str]  # names of stages that have not run yet

    @property
    def figures(self) -> dict[str, float]:
        return {
            name: value
            for stage in self.stages
            for finding in stage.findings
            for name, value in finding.figures.items()
        }

    @property
    def measures_targets(self) -> bool:
        return any(name.startswith(TARGET_STAGE) for name in (*(stage.name for stage in self.stages), *self.waiting))

    @property
    def passed(self) -> bool:
        """Whether every stage has passed and every target that this plan measures is met. A rehearsal measures none."""
        met = all(said.startswith("met") for _, said in self.verdicts()) or not self.on_gpu
        return met and not self.waiting and all(stage.passed for stage in self.stages)

    def verdicts(self) -> list[tuple[Target, str]]:
        if not self.measures_targets:
            return []
        return [(target, target.verdict(self.figures, self.on_gpu)) for target in TARGETS]

    def write(self, stem: Path) -> None:
        """Writes the results to <stem>.json and <stem>.md. Each is replaced as a whole: there is never half a file."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        for suffix, text in ((".json", self.as_json()), (".md", self.as_markdown())):
            half = stem.with_name(f".half{suffix}")
            half.write_text(text)
            half.replace(stem.with_name(stem.name + suffix))

    def as_json(self) -> str:
        targets = [
            {**asdict(target), "value": self.figures.get(target.figure), "verdict": verdict}
            for target, verdict in self.verdicts()
        ]
        stages = [{**asdict(stage), "verdict": stage.verdict} for stage in self.stages]
        content = {
            "plan": self.plan, "device": self.device, "on_gpu": self.on_gpu, "date": self.date, "targets": targets,
            "figures": self.figures, "stages": stages, "not_run": list(self.waiting),
        }  # fmt: skip
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    def as_markdown(self) -> str:
        parts = [self.summary()]
        for title, findings in self._tables().items():
            parts += [f"## {title}", _findings_table(findings)]
        for stage in self.stages:
            parts += [f"## Log of {stage.name}", f"````text\n{stage.log}\n````"] if stage.log else []
        return "\n\n".join(parts) + "\n"

    def summary(self) -> str:
        """The targets and the stages, without what the stages found."""
        parts = [f"# GPU check {self.plan} on {self.device}, {self.date}"]
        if not self.on_gpu:
            parts.append("A rehearsal without a GPU: it shows that the check runs, and says nothing about speed.")
        if verdicts := self.verdicts():
            parts.append(table(("target", "wanted", "verdict"), [(t.name, t.wanted, said) for t, said in verdicts]))
        lines = [(stage.name, stage.verdict, f"{stage.seconds:.0f}") for stage in self.stages]
        lines += [(name, "not run yet", "") for name in self.waiting]
        parts.append(table(("stage", "verdict", "s"), lines))
        return "\n\n".join(parts)

    def _tables(self) -> dict[str, list[Finding]]:
        tables: dict[str, list[Finding]] = {}
        for stage in self.stages:
            for finding in stage.findings:
                tables.setdefault(finding.table, []).append(finding)
        return tables


def _findings_table(findings: Sequence[Finding]) -> str:
    head = list(dict.fromkeys(column for finding in findings for column in finding.cells))
    lines = [[finding.cells.get(column, "") for column in head] for finding in findings]
    if any(finding.failure for finding in findings):
        head.append("failure")
        lines = [[*line, finding.failure] for line, finding in zip(lines, findings, strict=True)]
    return table(head, lines)
