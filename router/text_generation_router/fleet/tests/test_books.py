"""What a front does with requests when engines connect, are lost, or break the protocol. Without connections, and with
a clock that the test sets."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from text_generation_common.tests.examples import examples
from text_generation_router.engine.protocol import Ended
from text_generation_router.engine.tests.fakes import Listener, expected_tokens
from text_generation_router.errors import Refusal, RefusedError
from text_generation_router.fleet.attempts import LATE_PER_REQUEST, MAX_LATE
from text_generation_router.fleet.books import DEADLY, HUNG, STRANDED, STRANDED_S
from text_generation_router.fleet.engines import MAX_RESUBMITS
from text_generation_router.fleet.suspects import MAX_ALONE
from text_generation_router.fleet.tests.engines import BookedEngine, Front, joined, load_report
from text_generation_router.fleet.values import Credit, EngineFirst, EngineLoss, Withdraw
from text_generation_router.scheduling.prompt_logprobs import PromptLogprobs
from text_generation_router.scheduling.request import EndReason, GenerationRequest, Share
from text_generation_router.wire.steps import TokenRun
from text_generation_router.wire.version import WireError

FIRST = EngineFirst(0.5, 0.25, 3)


class BooksMachine(RuleBasedStateMachine):
    """Two engines of one build that come and go, drain and repeat tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.front = Front()
        self.engines: dict[int, BookedEngine] = {}
        self.asked: list[tuple[Listener, list[int], int]] = []

    @rule(ids=st.lists(st.integers(1, 9), min_size=1, max_size=4), count=st.integers(1, 6), copies=st.integers(1, 3))
    def ask(self, ids: list[int], count: int, copies: int) -> None:
        self.asked += [(listener, ids, count) for listener in self.front.ask(ids, count, copies, credits=3)]

    @rule(number=st.integers(0, 1))
    def join(self, number: int) -> None:
        if number not in self.engines:
            self.engines[number] = self.front.join(number)

    @rule(number=st.integers(0, 1), loss=st.sampled_from(EngineLoss))
    def lose(self, number: int, loss: EngineLoss) -> None:
        if self.engines.pop(number, None) is not None:
            self.front.books.lost(number, loss)

    @rule(number=st.integers(0, 1), again=st.integers(0, 3))
    def work(self, number: int, again: int) -> None:
        if (engine := self.engines.get(number)) is not None:
            engine.obey()
            engine.step(again)

    @rule(number=st.integers(0, 1), is_ready=st.booleans(), is_draining=st.booleans())
    def report(self, number: int, is_ready: bool, is_draining: bool) -> None:
        if number in self.engines:
            self.front.books.reported(number, load_report(is_ready, is_draining))

    @rule(pick=st.integers(0, 20), tokens=st.integers(1, 4))
    def credit(self, pick: int, tokens: int) -> None:
        if self.asked:
            self.front.books.credit(self.asked[pick % len(self.asked)][0].index, tokens)

    @precondition(lambda self: self.asked)
    @rule(pick=st.integers(0, 20), is_stop=st.booleans())
    def finish(self, pick: int, is_stop: bool) -> None:
        listener, _, _ = self.asked[pick % len(self.asked)]
        was = listener.end
        if is_stop:
            self.front.books.end(listener.index, len(listener.ids))
        else:
            self.front.books.cancel(listener.index)
        assert listener.end is not None and (was is None or listener.end is was)

    @invariant()
    def every_text_is_right(self) -> None:
        for listener, ids, count in self.asked:
            expected = expected_tokens(ids, count)
            assert listener.ids == expected[: len(listener.ids)]
            if listener.end is not None and listener.end.reason is EndReason.LENGTH:
                assert listener.ids == expected

    def teardown(self) -> None:
        """With engines that work, every request ends."""
        for number in list(self.engines):
            self.lose(number, EngineLoss.OUTSIDE)
        self.front.now += 1000
        engine = self.front.join(7)
        for _ in range(40):
            engine.obey()
            engine.step()
            self.front.books.reported(7, load_report())
            for listener, _, _ in self.asked:
                self.front.books.credit(listener.index, 3)
        assert all(listener.end is not None for listener, _, _ in self.asked)
        assert sorted(self.front.over) == sorted(listener.index for listener, _, _ in self.asked)
        assert not self.front.books._open and not self.front.books._waiting
        assert not len(engine.view.attempts) and not self.front.fleet.suspects._groups


BooksMachine.TestCase.settings = examples(60, stateful_step_count=30)
TestBooksMachine = BooksMachine.TestCase


def test_a_text_goes_on_elsewhere_with_its_tokens_seed_age_and_credits() -> None:
    front, engine = joined()
    [listener] = front.ask([5, 6], 6, credits=10)
    engine.obey().step()
    engine.step()
    front.now += 7
    front.books.lost(0, EngineLoss.DIED)
    assert front.counts.resumes == 1 and listener.end is None
    other = front.join(1).obey()
    [[again]] = other.submits
    expected = expected_tokens([5, 6], 6)
    assert again.past.output_ids == tuple(expected[:2]) and again.past.age_s == 7 and again.past.has_run
    assert again.credits == 8
    for _ in range(4):
        other.step()
    assert listener.ids == expected and listener.end is not None and listener.end.reason is EndReason.LENGTH


def test_credits_below_zero_are_paid_before_the_next_engine_gets_any() -> None:
    front, engine = joined()
    [listener] = front.ask([5], 9, credits=4)
    engine.obey()
    front.books.tokens(engine.view, TokenRun(1, 0, tuple(expected_tokens([5], 6)), (-1.0,) * 6, ()), FIRST, None)
    other = front.move(EngineLoss.OUTSIDE)
    assert other.submits[0][0].credits == 0
    front.books.credit(listener.index, 1)
    assert not other.view.attempts.orders
    front.books.credit(listener.index, 4)
    assert other.view.attempts.orders == [Credit(1, 3)]


def test_no_time_is_before_the_arrival_whatever_an_engine_tells() -> None:
    front, engine = joined()
    [listener] = front.ask([5], 9)
    engine.obey()
    front.books.tokens(engine.view, run(1, 0), EngineFirst(0.0, 1e9, 0), None)
    first = listener.given[0]
    assert first.first is not None and first.first.queue_s == first.inference_s == 0


def test_times_of_a_moved_request_are_those_of_its_front() -> None:
    front, engine = joined()
    [listener] = front.ask([5], 3)
    engine.obey()
    front.now += 2
    engine.step()  # the first step began 0.25 s ago
    front.now += 1
    front.books.lost(0, EngineLoss.DIED)
    front.now += 5
    other = front.join(1).obey()
    front.now += 1
    other.step()
    front.now += 1
    other.step()
    first, second, third = listener.given
    assert first.first is not None and first.first.queue_s == 1.75 and first.inference_s == 0.25
    assert second.first is None and (second.inference_s, third.inference_s) == (7.25, 8.25)
    end = listener.end
    assert end is not None and (end.inference_s, end.queue_s) == (8.25, 1.75)
    assert end.replays == ((1.25, 7.0),)


def test_an_engines_own_replays_are_told_by_the_fronts_clock() -> None:
    front, engine = joined()
    [listener] = front.ask([5], 3)
    engine.obey()
    front.now += 1
    engine.step()
    front.now += 4
    other = front.move(EngineLoss.OUTSIDE)
    front.now += 1
    other.step()  # began 4.75 s after the request's first step, which was 0.25 s before the first token
    front.now += 9
    [index] = other.rows
    front.books.ended(other.view, index, Ended(EndReason.FAILED, 9.0, "boom", 0.5, ((2.0, 3.0),), 1, 2))
    end = listener.end
    assert end is not None and end.replays == ((4.25, 5.0), (7.0, 8.0)) and end.cause == "boom"
    assert (end.suspicions, end.counts) == (1, 2)


@pytest.mark.parametrize("reason", [Refusal.OVERLOADED, Refusal.TOO_LONG])
def test_a_refusal_is_the_answer_to_all_sequences_and_no_sink_is_called(reason: Refusal) -> None:
    front, engine = joined()
    engine.refuses = RefusedError(reason, 9)
    listeners = front.ask([5], 3, copies=3)
    engine.obey()
    assert front.answers[1] is engine.refuses and all(listener.end is None for listener in listeners)
    assert not front.books._open and sorted(front.over) == [1, 2, 3]


@pytest.mark.parametrize("reason", [Refusal.CLOSED, Refusal.DRAINING])
def test_a_request_goes_elsewhere_from_an_engine_that_ends(reason: Refusal) -> None:
    front, engine = joined()
    engine.refuses = RefusedError(reason)
    [listener] = front.ask([5], 1)
    engine.obey()
    assert not front.answers and listener.end is None
    other = front.join(1).obey()
    other.step()
    assert front.answers == {1: None} and listener.ids == expected_tokens([5], 1)


def test_a_resumed_request_waits_for_an_engine_that_has_room() -> None:
    front, engine = joined()
    [listener] = front.ask([5], 3)
    engine.obey()
    front.books.lost(0, EngineLoss.OUTSIDE)
    other = front.join(1)
    other.refuses = RefusedError(Refusal.OVERLOADED)
    for _ in range(3):
        other.obey()
    assert len(other.submits) == 1 and listener.end is None
    other.refuses = None
    front.books.reported(1, load_report())
    for _ in range(3):
        other.obey().step()
    assert listener.ids == expected_tokens([5], 3)


def test_a_resumed_request_that_no_longer_fits_fails_by_name() -> None:
    front, engine = joined()
    [listener] = front.ask([5], 3)
    engine.obey()
    front.books.lost(0, EngineLoss.OUTSIDE)
    other = front.join(1)
    other.refuses = RefusedError(Refusal.TOO_LONG)
    other.obey()
    assert listener.end is not None and "too long" in listener.end.cause


def test_a_request_that_ends_before_its_answer_is_answered_once() -> None:
    front, engine = joined()
    [listener] = front.ask([5], 3)
    front.books.cancel(listener.index, EndReason.DEADLINE)
    assert front.answers == {1: None} and listener.end is not None and listener.end.reason is EndReason.DEADLINE
    engine.obey()
    assert front.answers == {1: None} and front.counts.late == 1


def test_copies_of_a_prompt_stay_on_one_engine_after_a_loss() -> None:
    front, engine = joined()
    front.ask([5], 5, copies=3)
    engine.obey().step()
    front.books.cancel(2)
    front.books.lost(0, EngineLoss.DIED)
    others = [front.join(1), front.join(2)]
    for other in others:
        other.obey()
    assert sorted(len(submit) for other in others for submit in other.submits) == [2]


def test_queued_requests_leave_an_engine_that_drains_together_and_at_once() -> None:
    front, engine = joined()
    [running] = front.ask([5], 9)
    engine.obey().step()
    queued = front.ask([6], 2, copies=2)
    engine.obey()
    other = front.join(1)
    front.books.reported(1, load_report(wait_s=5.0))
    front.books.reported(0, load_report(is_draining=True))
    assert engine.view.attempts.orders == [Withdraw(2), Withdraw(3)], "a running one would wait elsewhere"
    engine.obey()
    other.obey()
    assert [len(submit) for submit in other.submits] == [2] and not other.submits[0][0].past.has_run
    other.step()
    other.step()
    assert all(listener.ids == expected_tokens([6], 2) for listener in queued) and running.end is None
    assert front.counts.moves == 2


def test_running_requests_leave_an_engine_that_drains_a_few_at_a_time() -> None:
    front, engine = joined()
    listeners = [front.ask([5, number], 9)[0] for number in range(20)]
    engine.obey().step()
    other = front.join(1)
    front.books.reported(0, load_report(is_draining=True))
    for left in (12, 4, 0):
        assert all(order.even_begun for order in engine.view.attempts.orders if isinstance(order, Withdraw))
        engine.obey()
        front.books.reported(0, load_report(is_draining=True))
        assert not engine.view.attempts.orders, "the other engine has not answered"
        other.obey()
        front.books.reported(0, load_report(is_draining=True))
        assert len(engine.rows) == left
    for _ in range(9):
        other.step()
    assert [each.ids for each in listeners] == [expected_tokens([5, number], 9) for number in range(20)]
    assert front.counts.moves == 20


def test_running_requests_stay_on_a_draining_engine_while_others_have_much_to_do() -> None:
    front = Front()
    engine, _ = front.join(0), front.join(1)
    front.books.reported(1, load_report(tokens=5000))
    front.ask([5], 9)
    engine.obey().step()
    front.books.reported(0, load_report(is_draining=True))
    assert not engine.view.attempts.orders
    front.books.reported(1, load_report())
    assert engine.view.attempts.orders == [Withdraw(1, even_begun=True)]


def test_nothing_leaves_a_draining_engine_while_there_is_no_other() -> None:
    front, engine = joined()
    front.ask([6], 2)
    engine.obey()
    front.books.reported(0, load_report(is_draining=True))
    assert not engine.view.attempts.orders
    front.ask([7], 2)
    assert not engine.view.attempts.orders, "a new request waits for another engine"


def test_requests_of_another_build_are_not_resumed_but_new_ones_are_taken() -> None:
    front = Front()
    engine = front.join(0, b"a")
    [listener] = front.ask([5], 6)
    engine.obey().step()
    front.books.lost(0, EngineLoss.DIED)
    other = front.join(1, b"b")
    [new] = front.ask([6], 1)
    other.obey().step()
    assert new.ids == expected_tokens([6], 1) and listener.end is None
    front.books.give_up_stranded()
    front.now += STRANDED_S
    front.books.give_up_stranded()
    assert listener.end is not None and listener.end.cause == STRANDED


def test_few_resubmits_are_unanswered_at_a_time_and_the_oldest_go_first() -> None:
    front, engine = joined()
    listeners = []
    for _ in range(MAX_RESUBMITS + 9):
        listeners += front.ask([5], 1)
        front.now += 1
    engine.obey()
    front.books.lost(0, EngineLoss.OUTSIDE)
    other = front.join(1)
    assert len(other.view.attempts.orders) == MAX_RESUBMITS
    while other.view.attempts.orders:
        other.obey().step()
    assert all(listener.end is not None for listener in listeners)
    ages = [submit[0].past.age_s for submit in other.submits]
    assert ages == [float(age) for age in range(len(listeners), 0, -1)]


@pytest.mark.parametrize("begins", [True, False])
def test_a_request_that_kills_every_engine_fails_by_name_and_the_others_end_well(begins: bool) -> None:
    """Whether or not the engine could report that the request had begun."""
    front = Front()
    poison, *others = [front.ask([number], 2)[0] for number in range(1, 9)]
    deaths = 0
    while poison.end is None:
        assert deaths < 6
        engine = front.join()
        for _ in range(30):
            engine.obey()
            if any(row.submitted.request.input_ids == (1,) for row in engine.rows.values()):
                deaths += 1
                if begins:
                    engine.begin()
                front.books.lost(0, EngineLoss.DIED)
                break
            engine.step()
        else:
            front.books.lost(0, EngineLoss.OUTSIDE)
    engine = front.join()
    for _ in range(9):
        engine.obey().step()
    assert poison.end.cause == DEADLY
    assert [other.ids for other in others] == [expected_tokens([number], 2) for number in range(2, 9)]


def test_a_request_goes_to_the_engine_with_the_least_to_do_by_its_word_and_by_what_was_sent() -> None:
    front = Front()
    engines = [front.join(0), front.join(1), front.join(2)]
    for number, tokens in enumerate((90_000, 0, 4_000)):
        front.books.reported(number, load_report(tokens=tokens))
    for _ in range(5):
        front.ask([5] * 300, 9)
    assert [len(engine.view.attempts.orders) for engine in engines] == [0, 4, 1]


def test_a_queued_request_moves_once_where_it_begins_much_sooner() -> None:
    front = Front()
    first = front.join(0)
    [running], [queued] = front.ask([5], 9), front.ask([6], 9)
    first.obey()
    first.step(only=1)
    second = front.join(1)
    for number, wait_s in ((0, 60.0), (1, 0.0)):
        front.books.reported(number, load_report(wait_s=wait_s, tokens=round(wait_s)))
    front.fleet.balance(front.now)
    assert first.view.attempts.orders == [Withdraw(2)]
    first.obey()
    second.obey()
    assert [each.request.input_ids for [each] in second.submits] == [(6,)]
    front.books.reported(0, load_report())
    front.books.reported(1, load_report(wait_s=60.0, tokens=60))
    front.fleet.balance(front.now)
    assert not second.view.attempts.orders and not first.view.attempts.orders
    assert running.end is None and queued.end is None


def test_a_token_clears_a_suspect() -> None:
    front, engine = joined()
    front.ask([5], 9)
    engine.obey()
    engine.begin()
    front.books.lost(0, EngineLoss.DIED)
    assert 1 in front.fleet.suspects
    other = front.join(0).obey()
    other.step()
    assert 1 not in front.fleet.suspects


def test_a_request_goes_to_an_engine_with_shards_or_else_waits_at_one_that_expects_some() -> None:
    front = Front()
    engines = [front.join(0), front.join(1)]
    for ready in (1, 0):
        front.books.reported(1 - ready, load_report(is_ready=False))
        front.books.reported(ready, load_report())
        front.ask([5], 9)
        assert [len(engine.view.attempts.take_orders()) for engine in engines] == [1 - ready, ready]
    front.books.reported(0, load_report(is_ready=False))
    front.ask([5], 9)
    assert sum(len(engine.view.attempts.orders) for engine in engines) == 1


def test_streams_of_an_engine_without_shards_go_on_elsewhere_and_those_without_a_token_there_stay() -> None:
    front = Front()
    engine = front.join(0)
    [stream], [new] = front.ask([5], 9), front.ask([6], 9)
    engine.obey()
    engine.step(only=1)
    engine.begin()
    front.books.epoch(engine.view, None, [1, 2])
    front.books.reported(0, load_report(is_ready=False))
    assert not engine.view.attempts.orders  # no other engine is there
    other = front.join(1)
    engine.obey()
    other.obey().step()
    assert [sequence.request.input_ids for submit in other.submits for sequence in submit] == [(5,)]
    assert len(stream.ids) == 2 and not new.ids and stream.end is None and new.end is None


def test_service_of_other_engines_goes_with_a_request() -> None:
    front = Front()
    front.join(0)
    other = front.join(1)
    served = {Share(): 250.0}
    front.books.reported(0, replace(load_report(is_draining=True), served=served))
    front.ask([5], 1)
    other.obey()
    assert other.submits[0][0].past.served_elsewhere == 250.0


def test_a_request_that_wants_no_token_gets_one_answer() -> None:
    front, engine = joined()
    [listener] = front.ask([5, 6, 7], 0)
    engine.obey()
    front.books.computed(engine.view, 1, FIRST, Ended(EndReason.LENGTH))
    [given] = listener.given
    assert given.ids == () and given.first is not None and given.first.cached_tokens == 3
    assert listener.end is not None and listener.end.reason is EndReason.LENGTH


def test_log_probabilities_of_a_prompt_come_in_pieces_and_once() -> None:
    front, engine = joined()
    [listener] = front.ask([5, 6, 7, 8], 2, prompt_logprobs=1)
    engine.obey()
    front.books.prompt(engine.view, 1, 1, piece(2))
    other = front.move(EngineLoss.OUTSIDE)
    front.books.prompt(other.view, 1, 1, piece(1))
    front.books.prompt(other.view, 1, 2, piece(2))
    other.step()
    known = listener.given[0].first
    assert known is not None and known.prompt_logprobs is not None and len(known.prompt_logprobs) == 3
    front.books.lost(1, EngineLoss.OUTSIDE)
    third = front.join(2).obey()
    assert third.submits[0][0].request.prompt_logprobs is None
    third.step()
    assert listener.ids == expected_tokens([5, 6, 7, 8], 2)


def piece(count: int) -> PromptLogprobs:
    return PromptLogprobs(np.zeros(count, np.float32), np.zeros((count, 1), np.int32), np.zeros((count, 1), np.float32))


def run(index: int, position: int, count: int = 1) -> TokenRun:
    return TokenRun(index, position, (11,) * count, (-1.0,) * count, ())


def ended(reason: EndReason) -> Ended:
    return Ended(reason, 1.0)


LIES: dict[str, Callable[[BookedEngine], None]] = {
    "a gap": lambda lying: lying.books.tokens(lying.view, run(1, 3), None, None),
    "a gap at first": lambda lying: lying.books.tokens(lying.view, run(2, 1), FIRST, None),
    "no first step": lambda lying: lying.books.tokens(lying.view, run(2, 0), None, None),
    "an index that was not submitted": lambda lying: lying.books.tokens(lying.view, run(5, 0), FIRST, None),
    "index 0": lambda lying: lying.books.ended(lying.view, 0, ended(EndReason.FAILED)),
    "more tokens than wanted": lambda lying: lying.books.tokens(lying.view, run(1, 1, 6), None, None),
    "an early end by length": lambda lying: lying.books.tokens(lying.view, run(1, 1), None, ended(EndReason.LENGTH)),
    "an end without its token": lambda lying: lying.books.ended(lying.view, 1, ended(EndReason.EOS_TOKEN)),
    "an end that is the front's": lambda lying: lying.books.ended(lying.view, 1, ended(EndReason.STOPPED)),
    "an answer without a token": lambda lying: lying.books.computed(lying.view, 1, FIRST, ended(EndReason.LENGTH)),
    "tokens before the answer": lambda lying: lying.books.tokens(lying.view, run(3, 0), FIRST, None),
    "an answer to nothing": lambda lying: lying.books.accepted(lying.view, [1]),
    "an answer to a part": lambda lying: lying.books.accepted(lying.view, [3]),
    "a refusal of what is accepted": lambda lying: lying.books.refused(
        lying.view, [1], RefusedError(Refusal.OVERLOADED)
    ),
    "log-probabilities unasked": lambda lying: lying.books.prompt(lying.view, 2, 1, piece(1)),
    "endless time": lambda lying: lying.books.tokens(lying.view, run(2, 0), EngineFirst(0, float("nan"), 0), None),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_lie_ends_the_connection_and_costs_no_token(lie: Callable[[BookedEngine], None]) -> None:
    front, engine = joined()
    [begun], [queued] = front.ask([5, 5], 6), front.ask([6, 6], 6)
    engine.obey()
    engine.step(only=1)
    waiting = front.ask([7, 7], 6, copies=2)
    engine.view.attempts.take_orders()
    before = len(begun.ids)
    with pytest.raises(WireError):
        lie(engine)
    lied = begun.ids[before:]
    front.books.lost(0, EngineLoss.OUTSIDE)
    other = front.join(1)
    for _ in range(9):
        other.obey().step()
    for listener, prompt in ((queued, [6, 6]), *((each, [7, 7]) for each in waiting)):
        assert listener.ids == expected_tokens(prompt, 6)
    made = [*expected_tokens([5, 5], 1), *lied]
    assert begun.ids == made + expected_tokens([5, 5, *made], 6 - len(made))


def test_a_flood_of_messages_about_ended_requests_ends_the_connection() -> None:
    front, engine = joined()
    [listener] = front.ask([5], 9)
    engine.obey()
    front.books.cancel(listener.index)
    with pytest.raises(WireError):
        for _ in range(MAX_LATE + 3 * LATE_PER_REQUEST):
            front.books.tokens(engine.view, run(1, 0), None, None)


@pytest.mark.parametrize("kind", ["begun", "epoch"])
def test_a_flood_of_messages_that_change_nothing_ends_the_connection(kind: str) -> None:
    front, engine = joined()
    front.ask([5], 9)
    engine.obey()
    with pytest.raises(WireError):
        for _ in range(MAX_LATE + 3 * LATE_PER_REQUEST):
            if kind == "begun":
                front.books.begun(engine.view, [1])
            else:
                front.books.epoch(engine.view, None, [])


def test_a_suspect_that_is_refused_for_others_waits_for_the_next_load() -> None:
    front, engine = joined()
    [listener] = front.ask([5], 2)
    engine.obey()
    engine.begin()
    front.books.lost(0, EngineLoss.DIED)
    other = front.join(0)
    other.refuses = RefusedError(Refusal.OTHER_SUSPECTS)
    other.obey()
    other.obey()
    assert len(other.submits) == 1 and other.submits[0][0].group
    other.refuses = None
    front.books.reported(0, load_report())
    other.obey().step()
    other.step()
    assert listener.ids == expected_tokens([5], 2)


def test_an_engine_that_refuses_other_requests_as_suspects_is_cut_off() -> None:
    front, engine = joined()
    front.ask([5], 2)
    engine.refuses = RefusedError(Refusal.OTHER_SUSPECTS)
    with pytest.raises(WireError):
        engine.obey()


def test_a_submit_for_which_engines_cut_the_front_off_fails_in_the_end() -> None:
    front = Front()
    [bad], [good] = front.ask([1], 2), front.ask([2], 2)
    cuts = 0
    for _ in range(20):
        engine = front.join(0)
        orders = engine.view.attempts.orders
        if any(isinstance(order, list) and order[0].request.input_ids == (1,) for order in orders):
            cuts += 1
            front.books.lost(0, EngineLoss.CUT_OFF)
            continue
        for _ in range(3):
            engine.obey()
            engine.step()
        front.books.lost(0, EngineLoss.OUTSIDE)
    assert bad.end is not None and bad.end.cause == DEADLY and cuts <= 6
    assert good.ids == expected_tokens([2], 2)


def test_many_tokens_beyond_the_credits_end_the_connection() -> None:
    front, engine = joined()
    front.ask([5], 9000, credits=4)
    engine.obey()
    front.books.tokens(engine.view, run(1, 0, 400), FIRST, None)
    with pytest.raises(WireError):
        front.books.tokens(engine.view, run(1, 400, 400), None, None)


def test_a_sink_that_raises_fails_alone() -> None:
    class Raising(Listener):
        def take(self, *given: object) -> None:
            raise ValueError

    front, engine = joined()
    raising = Raising()
    front.books.submit_all([GenerationRequest((5,), 2)], [raising], 9, lambda refused: None)
    [other] = front.ask([6], 2)
    engine.obey().step()
    engine.step()
    assert raising.end is not None and raising.end.cause == "Server error: ValueError"
    assert other.ids == expected_tokens([6], 2)


def test_a_request_that_hangs_every_engine_is_ended_by_name_and_streams_beside_it_go_on() -> None:
    front = Front()
    engines = [front.join(number) for number in range(3)]
    [stream], [bad] = front.ask([1], 90), front.ask([2], 3)
    silences = 0
    while bad.end is None:
        silences += 1
        for engine in engines:
            engine.obey()
        [victim] = [engine for engine in engines if engine.view.attempts.requests and _has(engine, bad)]
        victim.begin()
        for index, row in list(victim.rows.items()):
            if row.submitted.request.input_ids == (1,):
                victim.step(only=index)
        front.books.lost(victim.number, EngineLoss.SILENT)
        engines[victim.number] = front.join(victim.number)
    assert bad.end is not None and bad.end.cause == HUNG and silences == 2 + 1 + MAX_ALONE
    for _ in range(100):
        for engine in engines:
            engine.obey()
            engine.step()
    assert stream.ids == expected_tokens([1], 90)


def _has(engine: BookedEngine, asked: Listener) -> bool:
    return any(request.index == asked.index for request in engine.view.attempts.requests)


def test_an_only_engine_that_a_request_hangs_again_and_again_is_noticed_by_its_next_lives() -> None:
    front = Front()
    [bad] = front.ask([2], 3)
    lives = 0
    while bad.end is None:
        engine = front.join()
        if bad.end is None:
            lives += 1
            engine.obey()
            engine.begin()
            front.books.lost(0, EngineLoss.OUTSIDE)
    assert bad.end.cause == HUNG and lives == 2 + 1 + MAX_ALONE
