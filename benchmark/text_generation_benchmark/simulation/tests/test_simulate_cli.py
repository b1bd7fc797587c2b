"""The command `simulate`: from its arguments to the table, the picture and the files."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from text_generation_benchmark.cli import app
from text_generation_benchmark.simulation.cost import MODELS, SimulatedModel
from text_generation_benchmark.simulation.engine import SimulatedEngine, Targets, summarize
from text_generation_benchmark.simulation.engine import simulate as run_engines
from text_generation_benchmark.simulation.report import EDGES_S, Run, bins, picture, sparkline
from text_generation_benchmark.simulation.trace import WORKLOADS, generate
from text_generation_common.flags.kinds import AdmissionMode
from text_generation_common.flags.requests import SchedulingFlags
from text_generation_router.scheduling.request import Limits

SMALL = ["simulate", "--workload", "short-chat", "--rate", "2", "--duration", "5"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_a_simulation_prints_a_table_and_writes_it_into_a_file(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("a <!-- simulation short-chat: start -->old<!-- simulation short-chat: end --> z")
    result = invoke(*SMALL, "--policy", "reserve", "--write", str(readme))
    assert result.exit_code == 0, result.output
    table = result.output.strip()
    assert table in readme.read_text() and "old" not in readme.read_text() and readme.read_text().endswith(" z")
    assert "max_new_tokens 1,024" in table and "| 2          | reserve   |" in table


def test_policies_are_compared_at_their_best_rates() -> None:
    result = invoke(*SMALL, "--rate", "3", "--policy", "reserve", "--policy", "peak")
    *_, last = result.output.strip().splitlines()
    best = max(float(line.split("|")[3]) for line in result.output.splitlines() if "| peak" in line)
    assert last.startswith("The best of these rates") and last.endswith(f"{best:.2f} with peak.")


def test_a_trace_that_was_written_gives_the_same_table(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    drawn = invoke(*SMALL, "--write-trace", str(path))
    read = invoke("simulate", "--trace", str(path))
    assert read.exit_code == 0 and read.output.startswith("mine; ")
    own_columns = slice(2, None)  # all columns but the rate
    assert drawn.output.splitlines()[-1].split("|")[own_columns] == read.output.splitlines()[-1].split("|")[own_columns]


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert invoke(*SMALL, "--rate", "3", "--png", str(tmp_path / "p.png")).exit_code == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--workload", "chess", "--rate", "1"], "there is no workload chess: choose short-chat"),
        (["--workload", "short-chat"], "--rate is missing"),
        ([], "one of --workload and --trace"),
        (["--workload", "short-chat", "--rate", "1", "--model", "h300"], "there is no model h300"),
        (["--trace", "nowhere.csv"], "No such file"),
        (["--workload", "short-chat", "--rate", "0.001", "--duration", "1"], "no request arrives"),
        (["--workload", "long-limits", "--rate", "5", "--duration", "1", "--slots", "99"], "and there are 99"),
        (["--fit", "log"], "--fit needs --slots"),
    ],
)
def test_a_load_that_cannot_be_simulated_is_one_line_on_stderr(arguments: list[str], reason: str) -> None:
    result = invoke("simulate", *arguments)
    assert result.exit_code == 1 and reason in result.stderr and result.stderr.count("\n") == 1


def test_a_model_is_fitted_to_a_log_and_simulated(tmp_path: Path) -> None:
    log, model = tmp_path / "log", tmp_path / "mine.json"
    steps = [
        {"rows": i % 7, "kv_tokens": 50 * (i % 7), "prompt_tokens": i % 2 * 30, "prompt_positions": i % 3 * 100}
        | {"gap_ns": 0, "at_ns": 10**6 * (i + i * i // 100)}
        for i in range(200)
    ]
    log.write_text("\n".join(map(json.dumps, steps)))
    fitted = invoke("simulate", "--fit", str(log), "--slots", "50000", "--write-model", str(model))
    assert fitted.exit_code == 0 and SimulatedModel.read(model).slots == 50000
    assert "mine (fitted to 179 steps" in invoke(*SMALL, "--model", str(model)).output


def test_engines_in_processes_have_the_outcomes_that_they_have_alone() -> None:
    trace, model = generate(WORKLOADS["short-chat"], 4, 5, 0), MODELS["h200-8b"]
    reserve = SchedulingFlags(admission=AdmissionMode.RESERVE)
    limits = {"a": Limits(20_000, 8, 512), "b": Limits(20_000, 8, 512, reserve)}
    together = run_engines(trace, model.cost, limits, 2, 1.0)
    for name, outcomes in together.items():
        for i, outcome in enumerate(outcomes):
            alone = SimulatedEngine(trace.dealt(i, 2), model.cost, limits[name], 1.0).run()
            assert outcome.last_s.tolist() == alone.last_s.tolist() and outcome.steps == alone.steps


def test_a_terminal_shows_memory_and_first_tokens() -> None:
    trace, model = generate(WORKLOADS["short-chat"], 4, 5, 0), MODELS["h200-8b"]
    outcome = SimulatedEngine(trace, model.cost, Limits(5000, 8, 512), 0.1).run()
    summary = summarize([outcome], 5, 0.1, 0.005, Targets(5, 1))
    text = picture([Run("peak", 4.0, summary)])
    assert "slots held over time" in text and "█" in text and "> 30" in text
    assert sum(bins(summary.first_token_s)) == len(trace) and len(bins(summary.first_token_s)) == len(EDGES_S)


def test_a_sparkline_has_the_means_of_its_parts() -> None:
    shares = generate(WORKLOADS["short-chat"], 4, 5, 0).arrival_s * 0
    assert sparkline(shares[:0], 10) == "" and sparkline(shares[:4], 2) == "  "
    assert sparkline(shares[:4] + 1, 2) == "██" and sparkline(shares[:4] + 0.5, 4) == "▄▄▄▄"
