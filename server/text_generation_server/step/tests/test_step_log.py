"""The log of steps records the numbers of rows and tokens of each step."""

import json
from pathlib import Path

import pytest
import torch

from text_generation_common.sampling import Sampling
from text_generation_server.errors import OptionError
from text_generation_server.step.results import StepLoad, StepLog, StepOutput, measure
from text_generation_server.step.rows import PromptChunk, Rows, StepBatch

CPU = torch.device("cpu")


def rows_with(**lengths: int) -> Rows:
    """Rows with the given lengths, in tokens, after the measured step. The last character of a name is the request's
    id."""
    rows = Rows(4, 64, CPU)
    for name, length in lengths.items():
        ids = torch.arange(length, dtype=torch.int32)
        rows.join(PromptChunk(int(name[-1]), 0, length, True, ids, ids, length, Sampling()))
    return rows


def test_rows_see_all_their_tokens_and_a_prompt_token_itself_and_those_before_it() -> None:
    rows = rows_with(r1=5 + 1, r2=9 + 1, r3=20)
    load = measure(rows, [StepBatch(1, [1, 2])], [PromptChunk(3, 4, 7, False)])
    assert load == StepLoad(rows=2, kv_tokens=5 + 9, prompt_tokens=3, prompt_positions=5 + 6 + 7)
    assert measure(rows, [], [PromptChunk(3, 0, 1, False)]) == StepLoad(0, 0, 1, 1)


def test_a_line_for_each_step_is_appended_and_can_be_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    path.write_text("before\n")
    none = torch.empty(0)
    output = StepOutput(1, [], [], none, none, [], none, none, {}, forward_ns=70, sampling_ns=5)
    log = StepLog(path)
    for step in (3, 4):
        log.write(step, StepLoad(2, 14, 0, 0), output, gap_ns=6)
    log.close()
    before, first, second = path.read_text().splitlines()
    assert before == "before" and json.loads(first)["at_ns"] <= json.loads(second)["at_ns"]
    line = json.loads(second)
    line.pop("at_ns")
    assert line == {
        "step": 4, "rows": 2, "kv_tokens": 14, "prompt_tokens": 0, "prompt_positions": 0, "forward_ns": 70,
        "sampling_ns": 5, "gap_ns": 6,
    }  # fmt: skip


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"STEP_LOG .*/nowhere/steps cannot be written"):
        StepLog(tmp_path / "nowhere" / "steps")
