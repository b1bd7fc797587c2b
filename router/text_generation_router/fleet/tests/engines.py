"""Engines for tests of the front's books: they obey orders, and make the tokens of `expected_tokens`."""

from dataclasses import dataclass, field

from text_generation_router.engine.protocol import Ended, JoiningRules, ModelInfo, Snapshot, TokenLimits
from text_generation_router.engine.tests.fakes import Listener, next_token
from text_generation_router.errors import RefusedError
from text_generation_router.fleet.attempts import Attempts
from text_generation_router.fleet.books import FrontBooks
from text_generation_router.fleet.choice import EngineLoad
from text_generation_router.fleet.engines import EngineView, Fleet
from text_generation_router.fleet.placement import LeastLoad
from text_generation_router.fleet.values import (
    Cancel,
    Credit,
    EndAt,
    EngineFacts,
    EngineFirst,
    EngineLoss,
    LoadReport,
    RemoteCounts,
)
from text_generation_router.scheduling.request import EndReason, GenerationRequest
from text_generation_router.wire.steps import TokenRun
from text_generation_router.wire.submits import Submitted
from text_generation_router.wire.version import VERSION

MODEL = ModelInfo("torch.float32", "cpu", 256, 512, (255,), "reference", 1, 1)
SNAPSHOT = Snapshot(MODEL, TokenLimits(400, 500, 500), JoiningRules(0.3, 20, None))
MANY = 10**9


@dataclass(eq=False)
class Row:
    """A request as an engine has it."""

    submitted: Submitted
    output_ids: list[int]
    credits: int
    has_begun: bool = False

    @property
    def history(self) -> list[int]:
        return [*self.submitted.request.input_ids, *self.output_ids]


@dataclass(eq=False)
class BookedEngine:
    number: int
    view: EngineView
    books: FrontBooks
    refuses: RefusedError | None = None
    rows: dict[int, Row] = field(default_factory=dict)
    submits: list[list[Submitted]] = field(default_factory=list)

    def obey(self) -> "BookedEngine":
        """Does what the front has asked for. Returns this engine."""
        for order in self.view.attempts.take_orders():
            if isinstance(order, list):
                self._take(order)
            elif order.index not in self.rows:
                pass  # the request has ended before this order
            elif isinstance(order, Credit):
                self.rows[order.index].credits += order.tokens
            elif isinstance(order, EndAt | Cancel):
                del self.rows[order.index]
                reason = EndReason.STOPPED if isinstance(order, EndAt) else EndReason.CANCELLED
                self.books.ended(self.view, order.index, Ended(reason))
            elif order.even_begun or not self.rows[order.index].has_begun:
                del self.rows[order.index]
                self.books.ended(self.view, order.index, Ended(EndReason.WITHDRAWN))
        return self

    def _take(self, sequences: list[Submitted]) -> None:
        indexes = [sequence.index for sequence in sequences]
        self.submits.append(sequences)
        if self.refuses is not None:
            self.books.refused(self.view, indexes, self.refuses)
            return
        for each in sequences:
            assert each.credits is not None
            self.rows[each.index] = Row(each, list(each.past.output_ids), each.credits)
        self.books.accepted(self.view, indexes)

    def begin(self) -> None:
        """Pretends that the first step of each request that has not begun is decided."""
        for index, row in list(self.rows.items()):
            if not row.has_begun:
                self.books.begun(self.view, [index])

    def step(self, again: int = 0, only: int | None = None) -> None:
        """Makes one token for each request that has credits, or for the request `only`. `again`: number of older tokens
        that are sent again."""
        for index, row in list(self.rows.items()):
            if index not in self.rows or row.credits <= 0 or only not in (None, index):
                continue
            first = None if row.has_begun else EngineFirst(0.5, 0.25, 0)
            if not row.has_begun:
                self.books.begun(self.view, [index])
            row.has_begun = True
            row.output_ids.append(next_token(row.history))
            row.credits -= 1
            count = min(again + 1, len(row.output_ids))
            position = len(row.output_ids) - count
            ids = tuple(row.output_ids[position:])
            run = TokenRun(index, position, ids, (-1.0,) * count, ())
            ended = None
            if len(row.output_ids) == row.submitted.request.max_new_tokens:
                ended = Ended(EndReason.LENGTH, 1.0)
                del self.rows[index]
            self.books.tokens(self.view, run, first, ended)


class Front:
    """The books of one front, with a clock that stands still until it is set."""

    def __init__(self, name: str = "front", resumes_across_builds: bool = False) -> None:
        self.now = 100.0
        self.counts = RemoteCounts()
        self.fleet = Fleet(LeastLoad(), resumes_across_builds, name)
        self.over: list[int] = []
        self.books = FrontBooks(self.fleet, lambda: self.now, self.counts, self.over.append)
        self.answers: dict[int, RefusedError | None] = {}
        self.lives = 0

    def join(self, number: int = 0, digest: bytes = b"a", life: str = "", version: int = VERSION) -> BookedEngine:
        self.lives += 1
        facts = EngineFacts(life or f"life {self.lives}", self.lives, digest, SNAPSHOT, version)
        view = EngineView(facts, load_report(), Attempts(number, self.counts, lambda: None))
        self.books.joined(number, view)
        return BookedEngine(number, view, self.books)

    def move(self, loss: EngineLoss) -> BookedEngine:
        """Engine 0 is lost, and engine 1 joins, which takes what waits."""
        self.books.lost(0, loss)
        return self.join(1).obey()

    def ask(
        self, ids: list[int], count: int, copies: int = 1, credits: int = MANY, **options: object
    ) -> list[Listener]:
        listeners = [Listener() for _ in range(copies)]
        requests = [GenerationRequest(tuple(ids), count, **options) for _ in listeners]  # type: ignore[arg-type]

        def on_answer(refused: RefusedError | None) -> None:
            assert first not in self.answers, "one answer for each submission"
            self.answers[first] = refused

        first = self.books._next
        indexes = self.books.submit_all(requests, listeners, credits, on_answer)
        for listener, index in zip(listeners, indexes, strict=True):
            listener.index = index
        return listeners


def joined() -> tuple[Front, BookedEngine]:
    front = Front()
    return front, front.join()


def load_report(is_ready: bool = True, is_draining: bool = False, wait_s: float = 0.0, tokens: int = 0) -> LoadReport:
    return LoadReport(EngineLoad(waiting_tokens=tokens, wait_s=wait_s, is_ready=is_ready, is_draining=is_draining), 8)
