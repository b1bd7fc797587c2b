"""One JSON line for each forward step: what it carried, and what that cost. The benchmark fits a cost model to them."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from text_generation_server.batch import PromptChunk, Rows, StepBatch
from text_generation_server.errors import OptionError
from text_generation_server.results import StepOutput


@dataclass(frozen=True, slots=True)
class StepLoad:
    rows: int  # that decode
    kv_tokens: int  # which these rows attend to, their newest included
    prompt_tokens: int  # computed by chunks
    prompt_positions: int  # which these attend to: the sum over tokens of their position + 1


def measure(rows: Rows, decoding: Sequence[StepBatch], chunks: Sequence[PromptChunk]) -> StepLoad:
    """Of a step that has just been launched: it has given each of its rows a token more."""
    decoded = [rows.row(request_id) for batch in decoding for request_id in batch.request_ids]
    return StepLoad(
        len(decoded),
        int(rows.known[decoded].sum()) - len(decoded) if decoded else 0,
        sum(chunk.end - chunk.start for chunk in chunks),
        sum((chunk.end * (chunk.end + 1) - chunk.start * (chunk.start + 1)) // 2 for chunk in chunks),
    )


class StepLog:
    """Appends to a file, which is whole after every line. OptionError if it cannot be written."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("a", buffering=1)
        except OSError as error:
            raise OptionError(f"STEP_LOG {path} cannot be written: {error.strerror}") from None

    def write(self, step: int, load: StepLoad, output: StepOutput, gap_ns: int) -> None:
        """`at_ns` is a clock of this process, read when the step had been computed: the difference of two lines is all
        that a step took, its gap included."""
        line = {"step": step, **asdict(load), "forward_ns": output.forward_ns, "sampling_ns": output.sampling_ns}
        self._file.write(json.dumps(line | {"gap_ns": gap_ns, "at_ns": time.perf_counter_ns()}) + "\n")

    def close(self) -> None:
        self._file.close()
