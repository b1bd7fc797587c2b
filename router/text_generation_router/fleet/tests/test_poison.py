"""Bad requests that end every engine that computes them, with several fronts and engines, whatever else happens."""

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from text_generation_common.tests.examples import examples
from text_generation_router.engine.tests.fakes import Listener, expected_tokens
from text_generation_router.engine_service.sinks import Trial
from text_generation_router.errors import Refusal, RefusedError
from text_generation_router.fleet.books import DEADLY, HUNG
from text_generation_router.fleet.suspects import MAX_ALONE
from text_generation_router.fleet.tests.engines import BookedEngine, Front, Row, load_report
from text_generation_router.fleet.values import EngineLoss
from text_generation_router.scheduling.blame import MAX_SUSPICIONS
from text_generation_router.scheduling.request import EndReason
from text_generation_router.wire.submits import Submitted

NUM_FRONTS, NUM_ENGINES = 2, 3
# Prompts of bad requests begin with one of these tokens. A request with the first or second token ends its engine after
# the engine has reported that the request has begun; with the third token, before this report; with the fourth, when
# the engine accepts the request; with the fifth, before the report, in every other run of an engine's process. A
# request with the last token hangs its engine.
BAD = (201, 202, 203, 204, 205, 206)
TOLD, (BEFORE_BEGUN, AT_SUBMIT, NOT_ALWAYS, HANGS) = BAD[:2], BAD[2:]
# Maximum number of silences of engines that still run. Six in a row without a token would end a good request.
MAX_SILENCES = 4


class KilledAtSubmit(Exception):
    """Raised where an engine would die because it accepts a bad request."""


class SharedEngine:
    """One engine with a stream of each front. It obeys the rules of suspects as an engine does."""

    def __init__(self, number: int, fronts: list[Front], crossed: Counter[int]) -> None:
        """`crossed`: for each front, the number of deaths that its suspects met while an engine had suspects that are
        tried alone of more than one front."""
        self.number = number
        self.fronts = fronts
        self.crossed = crossed
        self.lives = 0
        self.killers: set[int] | None = None  # the bad tokens that ended the engine; None: it runs
        self.start()

    def start(self) -> None:
        self.lives += 1
        self.killers = None
        self.trial = Trial()
        self.streams: dict[int, Stream] = {}
        for place in range(len(self.fronts)):
            self.connect(place)

    def connect(self, place: int) -> None:
        if place not in self.streams:
            joined = self.fronts[place].join(self.number, life=f"{self.number}/{self.lives}")
            self.streams[place] = Stream(joined.number, joined.view, joined.books, trial=self.trial)

    def disconnect(self, place: int, loss: EngineLoss) -> None:
        if (stream := self.streams.pop(place, None)) is not None:
            for row in stream.rows.values():
                stream.leave_trial(row)
            self.fronts[place].books.lost(self.number, loss)

    def die(self, killers: set[int], loss: EngineLoss = EngineLoss.DIED) -> None:
        self.killers = killers
        alone = [place for place, stream in self.streams.items() if stream.tries_one_alone]
        self.crossed.update(alone if len(alone) > 1 else [])
        for place in list(self.streams):
            self.disconnect(place, loss)

    def work(self, max_new: int) -> set[int]:
        """Decides a step, and computes it. Returns the bad tokens that end the engine instead."""
        try:
            for stream in self.streams.values():
                stream.obey()
        except KilledAtSubmit:
            self.die({AT_SUBMIT})
            return {AT_SUBMIT}
        rows = [(stream, index, row) for stream in self.streams.values() for index, row in stream.rows.items()]
        alone = [each for each in rows if each[2].submitted.past.suspicions == MAX_SUSPICIONS and not each[2].has_begun]
        new = [each for each in rows if not each[2].has_begun][:max_new]
        step = alone[:1] or [each for each in rows if each[2].has_begun] + new
        for stream, index, row in step:
            token = row.submitted.request.input_ids[0]
            is_told = token != BEFORE_BEGUN and (token != NOT_ALWAYS or self.lives % 2)
            if is_told and not row.has_begun:
                stream.books.begun(stream.view, [index])
        if killers := {row.submitted.request.input_ids[0] for _, _, row in step}.intersection(BAD):
            if killers == {HANGS}:
                others = [engine for engine in self.fronts[0].fleet.engines if engine != self.number]
                self.die(killers, EngineLoss.SILENT if others else EngineLoss.OUTSIDE)
            else:
                self.die(killers)
            return killers
        for stream, index, row in step:
            if stream.rows.get(index) is row:
                stream.leave_trial(row)
                stream.step(only=index)
        return set()


class Stream(BookedEngine):
    """One front's Work stream to a SharedEngine."""

    def __init__(self, *of_engine: object, trial: Trial) -> None:
        super().__init__(*of_engine)  # type: ignore[arg-type]
        self.trial = trial

    @property
    def tries_one_alone(self) -> bool:
        """Whether the front has given the engine a suspect to be tried alone, although the engine may refuse it."""
        trials = [self.books._fleet.suspects.trial(group.number) for group in self.view.attempts.groups]
        return any(trial is not None and trial.is_alone for trial in trials)

    def _take(self, sequences: list[Submitted]) -> None:
        group = sequences[0].group
        self.refuses = None if self.trial.takes(group) else RefusedError(Refusal.OTHER_SUSPECTS)
        if self.refuses is None and sequences[0].request.input_ids[0] == AT_SUBMIT:
            raise KilledAtSubmit
        if group and self.refuses is None:
            self.trial.enter(group, len(sequences))
        super()._take(sequences)

    def leave_trial(self, row: Row) -> None:
        if row.submitted.group and not row.has_begun:
            self.trial.leave()


class PoisonMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fronts = [Front(f"front {place}") for place in range(NUM_FRONTS)]
        self.crossed = Counter[int]()
        self.engines = [SharedEngine(number, self.fronts, self.crossed) for number in range(NUM_ENGINES)]
        self.asked: list[tuple[int, Listener, list[int], int]] = []
        self.bad: list[Listener] = []
        self.deaths = Counter[int]()
        self.silences = 0
        self.asked_bad: list[int] = []

    def up(self) -> list[SharedEngine]:
        return [engine for engine in self.engines if engine.killers is None]

    @rule(place=st.integers(0, NUM_FRONTS - 1), ids=st.lists(st.integers(1, 9), min_size=1, max_size=3))
    def ask(self, place: int, ids: list[int]) -> None:
        self.asked += [(place, listener, ids, 3) for listener in self.fronts[place].ask(ids, 3)]

    @rule(place=st.integers(0, NUM_FRONTS - 1), token=st.sampled_from(BAD))
    def ask_bad(self, place: int, token: int) -> None:
        """Asks for a bad request. At most two are open at a time: two of TOLD, or one of any other kind."""
        if not self.asked_bad or (token not in self.asked_bad and {token, *self.asked_bad} == set(TOLD)):
            self.asked_bad.append(token)
            self.bad += self.fronts[place].ask([token], 3)

    @rule(number=st.integers(0, NUM_ENGINES - 1), max_new=st.integers(0, 4))
    def work(self, number: int, max_new: int) -> None:
        if self.engines[number].killers is None:
            self.deaths.update(self.engines[number].work(max_new))

    @rule(number=st.integers(0, NUM_ENGINES - 1))
    def come_back(self, number: int) -> None:
        if self.engines[number].killers is not None:
            self.engines[number].start()

    @rule(
        number=st.integers(0, NUM_ENGINES - 1), place=st.integers(0, NUM_FRONTS - 1), loss=st.sampled_from(EngineLoss)
    )
    def break_link(self, number: int, place: int, loss: EngineLoss) -> None:
        """The front loses its connection; whatever the front takes for the cause, the engine still runs."""
        self.silences += loss is EngineLoss.SILENT
        if self.silences > MAX_SILENCES:
            return
        self.engines[number].disconnect(place, loss)

    @rule(number=st.integers(0, NUM_ENGINES - 1), place=st.integers(0, NUM_FRONTS - 1))
    def mend_link(self, number: int, place: int) -> None:
        if self.engines[number].killers is None:
            self.engines[number].connect(place)

    @rule()
    def report(self) -> None:
        for engine in self.up():
            for place in engine.streams:
                self.fronts[place].books.reported(engine.number, load_report())

    @invariant()
    def a_bad_request_has_one_engine_down_at_a_time(self) -> None:
        for token in BAD:
            # A silence usually has another cause than a request, so the first silence makes no suspect.
            most = 2 if token == HANGS else 1
            assert sum(token in (engine.killers or ()) for engine in self.engines) <= most
            # The first loss that a suspect meets before its own first step does not count: another request is the
            # likelier cause.
            assert self.deaths[token] <= 3 + MAX_ALONE + (token == NOT_ALWAYS)

    @invariant()
    def texts_are_right_and_no_good_request_fails(self) -> None:
        """A good request may fail only if each time that it was tried alone a suspect of another front was on its way
        to the same engine, which hardly ever happens three times in a row."""
        for place, listener, ids, count in self.asked:
            assert listener.ids == expected_tokens(ids, count)[: len(listener.ids)]
            has_failed = listener.end is not None and listener.end.reason is not EndReason.LENGTH
            assert not has_failed or self.crossed[place] >= MAX_ALONE
        assert all(bad.end is None or bad.end.cause in (DEADLY, HUNG) for bad in self.bad)

    def teardown(self) -> None:
        for turn in range(400):
            for engine in self.engines:
                if engine.killers is not None:
                    engine.start()
                for place in range(NUM_FRONTS):
                    engine.connect(place)
                self.work(engine.number, 4)
                self.a_bad_request_has_one_engine_down_at_a_time()
            self.report()
            if turn > 3 and all(listener.end for listener in (*self.bad, *(each[1] for each in self.asked))):
                break
        self.texts_are_right_and_no_good_request_fails()
        for _, listener, ids, count in self.asked:
            assert listener.end.reason is EndReason.FAILED or listener.ids == expected_tokens(ids, count)
        assert all(bad.end is not None and not bad.ids for bad in self.bad)
        assert all(not front.fleet.suspects._groups and not front.books._waiting for front in self.fronts)


PoisonMachine.TestCase.settings = examples(60, stateful_step_count=40)
TestPoisonMachine = PoisonMachine.TestCase
