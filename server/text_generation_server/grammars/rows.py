"""A request with a grammar, and the rows of one step that have one."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from text_generation_common.errors import LOST
from text_generation_server.device.transfers import Moment
from text_generation_server.errors import MatcherError
from text_generation_server.grammars.compiler import reason_of
from text_generation_server.kernels.interface import Masks

if TYPE_CHECKING:
    from llguidance import LLMatcher

WAIT_S = 1.0  # longest time that a step waits for grammars that are being compiled
SLICE_S = 0.05  # the part of it that passes while the process is stopped, however long
# The grammar has been compiled before: the machine is busy, or the shard has just started.
TOO_SLOW = f"its grammar was not compiled within {WAIT_S:g} s of its prompt"


class CompilePatience:
    """The time that one step waits for grammars, in slices: a process that was stopped has lost one slice."""

    def __init__(self, seconds: float) -> None:
        self._slices = max(1, round(seconds / SLICE_S))

    def result(self, started: "Future[LLMatcher]") -> "LLMatcher":
        """TimeoutError: the matcher was not ready in time."""
        while True:
            try:
                return started.result(SLICE_S if self._slices else 0.0)
            except TimeoutError:
                if not self._slices:
                    raise
                self._slices -= 1


@dataclass(slots=True, eq=False)
class ConstrainedRow:
    """A request with a grammar. Its matcher is a Future until the first mask is made."""

    request_id: int
    started: "Future[LLMatcher]"
    matcher: "LLMatcher | None" = None
    is_over: bool = False  # whether the grammar is complete, or the request has failed: later tokens mean nothing

    def await_matcher(self, patience: CompilePatience) -> None:
        """MatcherError: the grammar cannot be used, or was not ready in time."""
        if self.matcher is not None:
            return
        try:
            self.matcher = patience.result(self.started)
        except TimeoutError:
            raise MatcherError(TOO_SLOW) from None

    def take(self, token_id: int) -> bool:
        """Reads a token. Returns whether the grammar is complete with it. MatcherError: the grammar does not go on."""
        assert self.matcher is not None
        if not self.matcher.consume_token(token_id):
            raise MatcherError(f"{LOST}: {reason_of(self.matcher)}")
        return self.matcher.is_stopped()


@dataclass(slots=True, eq=False)
class StepConstraints:
    """The rows of one step that have a grammar. `failures` and `complete_ids` are whole once the step is read."""

    masks: Masks | None = None  # None: the grammars of all these rows are over, or have failed
    failures: dict[int, str] = field(default_factory=dict)  # by request id: why the request fails
    complete_ids: list[int] = field(default_factory=list)  # requests whose grammar is complete with this step's token
    is_read: bool = False
    _rows: list[tuple[int, ConstrainedRow]] = field(default_factory=list)  # with their places in the step
    _results: tuple[Tensor, Tensor, Moment] | None = None

    def note_sampled(self, ids_R: Tensor, finite_R: Tensor, done: Moment) -> None:
        """Notes the step's tokens, which are on the host when the moment `done` has come."""
        self._results = ids_R, finite_R, done

    def add(self, place: int, row: ConstrainedRow) -> None:
        self._rows.append((place, row))

    @property
    def places(self) -> list[int]:
        return [place for place, _ in self._rows]

    @property
    def rows(self) -> list[ConstrainedRow]:
        return [row for _, row in self._rows]

    def fail(self, row: ConstrainedRow, reason: str) -> None:
        row.is_over = True
        self.failures[row.request_id] = reason

    def read(self) -> None:
        """Waits for the step's tokens, and gives each matcher its own. Raises the device's error."""
        assert self._results is not None
        ids_R, finite_R, done = self._results
        self.is_read = True
        if not self._rows:
            return
        done.wait()
        ids, finite = ids_R.tolist(), finite_R.tolist()
        for place, row in self._rows:
            if row.is_over:
                continue
            if not finite[place]:
                row.is_over = True
                continue
            try:
                row.is_over = row.take(ids[place])
            except MatcherError as error:
                self.fail(row, str(error))
            else:
                if row.is_over:
                    self.complete_ids.append(row.request_id)
