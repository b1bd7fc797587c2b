"""The result of a step, and how to wait for it: the device may still be computing a step that has been launched."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from text_generation_server.device.transfers import HostMoment, Moment

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
