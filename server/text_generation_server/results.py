"""What comes out of a step, and how to wait for it: the device may still be computing what has been launched."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from text_generation_server.transfers import HostMoment, Moment

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One token for each of `request_ids`; times in nanoseconds, the device's own on a GPU. Ranks other than 0 name no
    requests."""

    batch_id: int
    batch_request_ids: list[int]
    request_ids: list[int]
    token_ids: Tensor  # int32, on the host, like the others
    logprobs: Tensor  # float32
    top_counts: list[int]
    top_ids: Tensor
    top_logprobs: Tensor
    not_finite_ids: list[int]  # those of request_ids whose logits had a NaN or an infinity: their tokens mean nothing
    forward_ns: int
    sampling_ns: int


class Pending(Generic[T]):
    """A result that is complete when a moment has come, which `read` waits for."""

    def __init__(self, moment: Moment, read: Callable[[], T]) -> None:
        self._moment = moment
        self._read = read

    def is_complete(self) -> bool:
        """Raises what the device's work raised."""
        return self._moment.has_come()

    def block(self) -> None:
        """Until it is complete. May be called from any thread; raises what the device's work raised."""
        self._moment.wait()

    def wait(self) -> T:
        """Raises what the device's work raised, in the runner's terms."""
        return self._read()

    def then(self, convert: Callable[[T], U]) -> "Pending[U]":
        return Pending(self._moment, lambda: convert(self._read()))


def completed(result: T) -> Pending[T]:
    return Pending(HostMoment(), lambda: result)
