"""Logs one JSON line for each forward step: its load and its times. The benchmark fits a cost model to these lines."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from text_generation_server.errors import OptionError
from text_generation_server.step.results import StepOutput
from text_generation_server.step.rows import PromptChunk, Rows, StepBatch


@dataclass(frozen=True, slots=True)
class StepLoad:
    rows: int  # number of rows that decode
    kv_tokens: int  # number of tokens that the rows attend to, their newest tokens included
    prompt_tokens: int  # number of tokens computed by chunks
    prompt_positions: int  # sum of (position + 1) over the tokens of chunks: the number of tokens that they attend to


def measure(rows: Rows, decoding: Sequence[StepBatch], chunks: Sequence[PromptChunk]) -> StepLoad:
    """The load of a step that has just been launched, and has therefore added one token to each of its rows."""
    decoded = [rows.row(request_id) for batch in decoding for request_id in batch.request_ids]
    return StepLoad(
        len(decoded),
        int(rows.known[decoded].sum()) - len(decoded) if decoded else 0,
        sum(chunk.end - chunk.start for chunk in chunks),
        sum((chunk.end * (chunk.end + 1) - chunk.start * (chunk.start + 1)) // 2 for chunk in chunks),
    )


class StepLog:
    """Appends lines to a file, each at once and whole. OptionError if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("a", buffering=1)
        except OSError as error:
            raise OptionError(f"STEP_LOG {path} cannot be written: {error.strerror}") from None

    def write(self, step: int, load: StepLoad, output: StepOutput, gap_ns: int) -> None:
        """Appends a line. Its `at_ns` is the clock when the step had been computed. The difference between two lines is
        the whole time of the later step, the gap before it included.
        """
        line = {"step": step, **asdict(load), "forward_ns": output.forward_ns, "sampling_ns": output.sampling_ns}
        self._file.write(json.dumps(line | {"gap_ns": gap_ns, "at_ns": time.perf_counter_ns()}) + "\n")

    def close(self) -> None:
        self._file.close()
