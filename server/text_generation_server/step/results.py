"""The result of a step, and how to wait for it: the device may still be computing a step that has been launched. A log
may get one JSON line for each forward step, its load and its times, to which the benchmark fits a cost model.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, TypeVar

from torch import Tensor

from text_generation_server.device.transfers import HostMoment, Moment
from text_generation_server.errors import OptionError
from text_generation_server.step.rows import PromptChunk, Rows, StepBatch

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """Log-probabilities of tokens of prompts: `counts[i]` of request `request_ids[i]`, each with `top_counts[i]` most
    likely tokens. The tensors are on the host, and have the values of all requests one after the other."""

    request_ids: tuple[int, ...]
    counts: tuple[int, ...]
    top_counts: tuple[int, ...]
    logprobs: Tensor  # float32
    top_ids: Tensor  # int32
    top_logprobs: Tensor


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One token for each of `request_ids`, which are empty on ranks other than 0. Times are in nanoseconds; on a GPU
    the device measures them."""

    batch_id: int
    batch_request_ids: list[int]
    request_ids: list[int]
    token_ids: Tensor  # int32; on the host, like the other tensors
    logprobs: Tensor  # float32
    top_counts: list[int]
    top_ids: Tensor
    top_logprobs: Tensor
    failures: dict[int, str]  # requests that failed alone, and why: their tokens are invalid
    forward_ns: int
    sampling_ns: int
    prompts: PromptOutput | None = None  # None: no chunk of the step has given log-probabilities
    complete_ids: Sequence[int] = ()  # requests whose grammar is complete with this token
    is_finite: bool = True  # whether all logits were finite


class Pending(Generic[T]):
    """A result that is complete when the device has passed a moment. Then `read` returns the result."""

    def __init__(self, moment: Moment, read: Callable[[], T]) -> None:
        self._moment = moment
        self._read = read

    def is_complete(self) -> bool:
        """Whether the device is done. Raises the device's error if its work failed."""
        return self._moment.has_come()

    def block(self) -> None:
        """Waits until the result is complete. May be called from any thread. Raises the device's error."""
        self._moment.wait()

    def wait(self) -> T:
        """Returns the result when it is complete. Raises the device's error as one of the runner's errors."""
        return self._read()

    def then(self, convert: Callable[[T], U]) -> "Pending[U]":
        return Pending(self._moment, lambda: convert(self._read()))


def completed(result: T) -> Pending[T]:
    return Pending(HostMoment(), lambda: result)


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
