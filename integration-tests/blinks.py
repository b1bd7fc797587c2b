"""How long streams pause when a shard or an engine is killed, and what kills cost all streams together: `make blinks`.

One server for each model and number of shards. Keys and values outlive SIGKILL and are computed again after SIGSEGV, so
all is done with either signal, under 64 mixed streams: times without kills and with kills 5 to 25 s apart in turns,
bursts of three kills within a second, and kills every 2 s. Engines, which have a server with a front, are killed in
turns only. A lost stream or another outcome is a failure; a missed target is only printed."""

import argparse
import asyncio
import random
import signal
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import mean, median

from asks import SHARED_WORDS, WORDS, Ask, mixed_asks
from calls import metric, tokenizer
from killer import ENGINE, MAX_IN_A_ROW, SHARD, Kill
from outcome import Report, innermost, on_this_machine, table
from outside import ARGUMENTS, IN_FLIGHT_S, KillerProcess, waits
from scale import LONG, MANY_SLOTS
from server_process import ServerProcess
from streams import StreamAnswer, StreamClients, all_answers, ask_again, differences, undisturbed_answers
from victim import percentile

from text_generation_benchmark.checkpoint import write_checkpoint
from text_generation_benchmark.shapes import SHAPES

# How shards end, by what becomes of keys and values; and how engines end, whose shards tell the next one.
WAYS = {SHARD: {"KV kept": signal.SIGKILL, "KV recomputed": signal.SIGSEGV}, ENGINE: {"engine killed": signal.SIGKILL}}
KEPT, RECOMPUTED = WAYS[SHARD]
LEAST_S, LONGEST_S = 5.0, 25.0  # from one kill to the next
FAST_S, BURST_S = 2.0, 1.0
TURN_MINUTES = 2.0  # with kills; half of it without
WARM_TOKENS = 20  # for each stream before the first turn, so that not all streams are equally long
GO_ON_LIMIT_S = 900.0
# Prompts of which the speed of prefill is measured, about as long as streams are at a kill.
PREFILL_PROMPTS, PREFILL_WORDS = 16, 150
MANY = 10**6  # kills, of which a number of seconds allows fewer


@dataclass(frozen=True, slots=True)
class Segment:
    """A time without kills, or one with kills until all streams have gone on. `tokens`: what all clients received."""

    seconds: float
    tokens: int
    kills: Sequence[Kill] = ()

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value and its target, which is the least value if `is_least`, and else the most."""

    value: float | None
    limit: float | None = None
    is_least: bool = False

    @property
    def is_missed(self) -> bool:
        if self.value is None or self.limit is None:
            return False
        return self.value < self.limit if self.is_least else self.value > self.limit

    def __str__(self) -> str:
        if self.value is None:
            return "–"
        limit = "" if self.limit is None else f" ({'≥' if self.is_least else '≤'} {self.limit:.2f})"
        return f"{self.value:.2f}{limit}{', missed' * self.is_missed}"


@dataclass(frozen=True, slots=True)
class Texts:
    """What is asked, its outcomes without kills, and the sizes of the prompts in tokens. `shared`: how many of these
    tokens are a prefix that several prompts share."""

    asked: Sequence[Ask]
    expected: Sequence[StreamAnswer]
    sizes: Sequence[int]
    shared: Mapping[int, int]

    def few(self, most: float) -> "Texts":
        """Native requests whose prompts and texts have `most` tokens together; at least one."""
        places: list[int] = []
        left = most
        for place, ask in enumerate(self.asked):
            tokens = self.sizes[place] + (2 * ask.new_tokens if ask.path == "/generate_stream" else most)
            if tokens <= left or not places:
                places.append(place)
                left -= tokens
        expected = [replace(self.expected[place], ask=i) for i, place in enumerate(places)]
        return Texts([self.asked[place] for place in places], expected, [self.sizes[place] for place in places], {})


def texts_of(url: str) -> Texts:
    """Asks a server for the texts of a run."""
    asked = mixed_asks(LONG.num_streams, LONG.mixed_tokens)
    prompts = [ask.body.get("inputs") or " ".join(part["content"] for part in ask.body["messages"]) for ask in asked]
    shared = {
        place: num_tokens(" ".join(prompts[place].split()[:SHARED_WORDS]))
        for place, ask in enumerate(asked)
        if ask.kind == "shared prefix"
    }
    return Texts(asked, undisturbed_answers(url, asked), [num_tokens(prompt) for prompt in prompts], shared)


def num_tokens(text: str) -> int:
    return len(tokenizer().encode(text).ids)


def prefill_rate(url: str) -> float:
    """Tokens a second, of prompts that the server has not seen and that are sent at once."""
    rng = random.Random(3)
    prompts = [" ".join(rng.choice(WORDS) for _ in range(PREFILL_WORDS)) for _ in range(PREFILL_PROMPTS)]
    parameters = {"max_new_tokens": 1, "details": True}
    started_s = time.monotonic()
    answers = all_answers(
        url, [Ask("prefill", "/generate_stream", {"inputs": prompt, "parameters": parameters}) for prompt in prompts]
    )
    seconds = time.monotonic() - started_s
    if broken := [answer.error for answer in answers if answer.error]:
        raise RuntimeError(f"a prompt was not computed: {broken[0]}")
    return sum(map(num_tokens, prompts)) / seconds


@dataclass(slots=True)
class Crowd:
    """Streams that follow each other while shards are killed, and what came of them."""

    server: ServerProcess
    num_shard: int
    signal: signal.Signals
    texts: Texts
    rng: random.Random
    victim: str = SHARD
    answers: list[StreamAnswer] = field(default_factory=list)  # outcomes are kept of best_of only
    lost: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    clients: StreamClients = field(init=False)

    def __post_init__(self) -> None:
        self.clients = StreamClients(self.texts.asked, len(self.texts.asked))

    def run(self, *works: Callable[["Crowd"], Awaitable[None]]) -> "Crowd":
        """Does the works one after the other while streams run, then asks again for the texts of best_of."""

        async def run() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.clients.again_and_again(self.server.url))
                await self.clients.wait_for_tokens(WARM_TOKENS * len(self.texts.asked))
                for work in works:
                    await work(self)
                self.clients.finish()

        asyncio.run(run())
        self._look()
        self.different += ask_again(self.server.url, self.texts.asked, self.answers)
        return self

    async def peace(self, seconds: float) -> Segment:
        """The second half of a time without kills: in the first one, prompts that kills have removed from the prefix
        cache are computed once more."""

        async def work() -> list[Kill]:
            return await asyncio.sleep(seconds / 2, [])

        await work()
        return await self._segment(work)

    async def kills(self, seconds: float = 0.0, **options: float) -> Segment:
        """Kills shards with these flags of killer.py: a number of them, or as many as come in `seconds`."""
        end_s, limit = time.monotonic() + seconds, {"kills": MANY, "seconds": seconds} if seconds else {}
        options |= {"shards": self.num_shard, "signal": int(self.signal), "seed": self.rng.randrange(2**31)}
        killer = KillerProcess(self.server, victim=self.victim, **options, **limit)

        async def work() -> list[Kill]:
            found = await killer.kills()
            await asyncio.sleep(end_s - time.monotonic())
            if found:
                await self.clients.wait_until_all_go_on(found[-1].at_s + IN_FLIGHT_S, GO_ON_LIMIT_S)
            return found

        return await self._segment(work)

    async def _segment(self, work: Callable[[], Awaitable[list[Kill]]]) -> Segment:
        self._look()
        started_s, tokens = time.monotonic(), self.clients.num_tokens
        kills = await work()
        segment = Segment(time.monotonic() - started_s, self.clients.num_tokens - tokens, kills)
        print(f"  {segment.seconds:.1f} s, {len(kills)} kills, {segment.rate:.0f} tokens/s", flush=True)
        self.segments.append(segment)
        return segment

    def _look(self) -> None:
        """Compares the answers that have come, and forgets their texts, which would fill the memory."""
        came = [*self.clients.answers]
        self.clients.answers.clear()  # the list itself, to which running clients append
        asked = self.texts.asked
        lost, different = differences(asked, self.texts.expected, came)
        self.lost += [f"{asked[each.ask].kind}: {each.error}" for each in lost]
        self.different += different
        self.answers += [each if asked[each.ask].kind == "best_of" else replace(each, outcome=()) for each in came]

    def failures(self) -> list[str]:
        found = [f"{len(self.lost)} streams lost: {self.lost[0]}"] if self.lost else []
        found += [f"{len(self.different)} outcomes differ: {self.different[0]}"] if self.different else []
        kills = [kill for segment in self.segments for kill in segment.kills]
        too_many = [kill for kill in kills if kill.in_a_row >= MAX_IN_A_ROW]
        return found + ([f"more kills in a row than are promised to be harmless: {too_many}"] if too_many else [])

    def arrivals(self, are_grammars: bool) -> list[Sequence[float]]:
        """When the events came, of each stream whose client reads quickly, with a grammar or without."""
        asked = self.texts.asked
        quick = [each for each in self.answers if each.arrivals_s and not asked[each.ask].is_slow]
        return [each.arrivals_s for each in quick if (asked[each.ask].kind == "grammar") == are_grammars]

    def aboard(self, kills: Sequence[Kill]) -> float:
        """Tokens aboard at a kill, the median."""
        return median(tokens_aboard(kill.at_s, self.answers, self.texts) for kill in kills) if kills else 0.0


def tokens_aboard(at_s: float, answers: Sequence[StreamAnswer], texts: Texts) -> int:
    """Tokens of the prompts that clients had sent, and of what they had received, of all requests under way. A shared
    prefix counts once."""
    running = [each for each in answers if each.started_s < at_s < each.ended_s]
    own = [texts.sizes[each.ask] - texts.shared.get(each.ask, 0) for each in running]
    received = [bisect_left(each.arrivals_s, at_s) for each in running]
    return sum(own) + sum(received) + max((texts.shared.get(each.ask, 0) for each in running), default=0)


def gaps(kill_s: float, streams: Sequence[Sequence[float]]) -> Iterator[float]:
    """The longest time between two events that the kill lies in, or the time in which answers of before were still on
    their way; of each stream that had events before and after. `streams`: the arrival times of each stream's events."""
    for stream in streams:
        after = bisect_right(stream, kill_s)
        if 0 < after < len(stream):
            last = bisect_right(stream, kill_s + IN_FLIGHT_S, after, len(stream) - 1)
            yield max(stream[place] - stream[place - 1] for place in range(after, last + 1))


def goodput(turns: Sequence[Segment]) -> float:
    """Speed with kills ÷ mean speed of the times before and after; of several turns the median. `turns`: without kills,
    with kills, without kills, …"""
    threes = zip(turns[:-1:2], turns[1::2], turns[2::2], strict=True)
    return median(killed.rate / mean((before.rate, after.rate)) for before, killed, after in threes)


def spread(values: Sequence[float], *limits: float | None) -> tuple[Figure, Figure]:
    """The median and the 99th percentile with their targets."""
    if not values:
        return Figure(None), Figure(None)
    return Figure(median(values), limits[0]), Figure(percentile(values, 0.99), limits[1])


@dataclass(slots=True)
class Blinks:
    """All that is measured with one signal; of engines, what is measured in turns."""

    way: str
    rate: float  # tokens of prompts a second
    turns: Crowd
    recomputed: float  # tokens that the server computed again in the turns
    bursts: Crowd | None = None
    fast: Crowd | None = None

    def failures(self) -> list[str]:
        crowds = {"5 to 25 s apart": self.turns, "three kills": self.bursts, "every 2 s": self.fast}
        return [
            f"{self.way}, {name}: {failure}" for name, crowd in crowds.items() if crowd for failure in crowd.failures()
        ]

    def rows(self) -> dict[str, object]:
        """The cells of this way by the names of the rows."""
        kills = [kill for segment in self.turns.segments for kill in segment.kills]
        aboard = self.turns.aboard(kills)
        plain, grammars = (
            [gap for kill in kills for gap in gaps(kill.at_s, streams)]
            for streams in (self.turns.arrivals(False), self.turns.arrivals(True))
        )
        median_s, p99_s = spread(plain, 0.5 if self.way == KEPT else None, self._limit_s(aboard))
        grammar_s, grammar_p99_s = spread(grammars, None, None)
        interval_s = sum(segment.seconds for segment in self.turns.segments[1::2]) / max(1, len(kills))
        least = max(0.0, 0.95 * (1 - (median_s.value or 0.0) / interval_s))
        found: dict[str, object] = {
            "longest gap of a stream per kill, s, median": median_s,
            "99th percentile": p99_s,
            "of streams with grammars, median": grammar_s,
            "of streams with grammars, 99th percentile": grammar_p99_s,
            "goodput ÷ undisturbed": Figure(goodput(self.turns.segments), least, is_least=True),
            **self._burst_rows(aboard),
            "kills 5 to 25 s apart, mean interval in s": f"{len(kills)}, {interval_s:.1f}",
            "tokens aboard at a kill, median": f"{aboard:.0f}",
            "tokens computed again per kill": f"{self.recomputed / max(1, len(kills)):.0f}",
            "prefill, tokens/s": f"{self.rate:.0f}",
            "undisturbed, tokens/s of 64 streams": f"{median(each.rate for each in self.turns.segments[::2]):.0f}",
            "streams, lost, different": _counts(*filter(None, (self.turns, self.bursts))),
        }
        if (fast := self.fast) is not None:
            found["every 2 s: kills, streams at a time"] = f"{len(fast.segments[0].kills)}, {len(fast.texts.asked)}"
            found["every 2 s: streams, lost, different"] = _counts(fast)
        return found

    def _limit_s(self, aboard: float) -> float:
        """The target of the longest gaps' 99th percentile."""
        if self.turns.victim == ENGINE:
            return 1.0 + self.turns.num_shard
        return 1.5 if self.way == KEPT else 0.8 + 1.3 * aboard / self.rate

    def _burst_rows(self, aboard: float) -> dict[str, object]:
        if self.bursts is None:
            return {}
        found = self.burst_times(self.bursts)
        worst = Figure(max(found, default=None), 2.5 if self.way == KEPT else 2.5 + aboard / self.rate)
        return {
            "three kills within 1 s: s until all streams go on, median": Figure(median(found) if found else None),
            "worst": worst,
            "bursts within 1 s, of all": f"{len(found)} of {len(self.bursts.segments)}",
        }

    def burst_times(self, bursts: Crowd) -> list[float]:
        """Seconds from the first of three kills until each stream has received a token after them."""
        streams = [*bursts.arrivals(False), *bursts.arrivals(True)]
        groups = [[kill.at_s for kill in segment.kills] for segment in bursts.segments]
        quick = [group for group in groups if len(group) == 3 and group[-1] - group[0] <= BURST_S]
        return [max(found) for group in quick if (found := [*waits(group, streams)])]


def _counts(*crowds: Crowd) -> str:
    lost, different = sum(len(crowd.lost) for crowd in crowds), sum(len(crowd.different) for crowd in crowds)
    return f"{sum(len(crowd.answers) for crowd in crowds)}, {lost}, {different}"


@dataclass(frozen=True, slots=True)
class Plan:
    """How long one way takes, but for the ends of streams and the recomputing after bursts."""

    minutes: float  # with kills 5 to 25 s apart

    @property
    def num_turns(self) -> int:
        return max(1, round(self.minutes / TURN_MINUTES))

    @property
    def turn_s(self) -> float:
        return 60 * self.minutes / self.num_turns

    @property
    def num_bursts(self) -> int:
        return max(2, round(self.minutes / 2))

    @property
    def fast_s(self) -> float:
        return 12 * self.minutes

    def seconds(self, victim: str) -> float:
        turns_s = self.turn_s * (1.5 * self.num_turns + 0.5)
        return turns_s + 8 * self.num_bursts + self.fast_s if victim == SHARD else turns_s

    async def take_turns(self, crowd: Crowd) -> None:
        await crowd.peace(self.turn_s / 2)
        for _ in range(self.num_turns):
            await crowd.kills(self.turn_s, size=1, least=LEAST_S, longest=LONGEST_S)
            await crowd.peace(self.turn_s / 2)

    async def make_bursts(self, crowd: Crowd) -> None:
        for _ in range(self.num_bursts):
            await crowd.kills(kills=3, size=3, least=1.0, longest=4.0, within=0.35)

    async def kill_fast(self, crowd: Crowd) -> None:
        await crowd.kills(self.fast_s, size=1, least=FAST_S, longest=FAST_S)


def measure(server: ServerProcess, num_shard: int, victim: str, plan: Plan, seed: int) -> Iterator[Blinks]:
    texts, rate, rng = texts_of(server.url), prefill_rate(server.url), random.Random(seed)

    def crowd(number: signal.Signals, fewer: bool = False) -> Crowd:
        # What is asked for in kills every 2 s is computed again within 1 s.
        return Crowd(server, num_shard, number, texts.few(rate) if fewer else texts, rng, victim)

    for way, number in WAYS[victim].items():
        print(f"{way}: about {plan.seconds(victim) / 60:.0f} minutes", flush=True)
        before = metric(server.url, "tgi_recomputed_tokens")
        turns = crowd(number).run(plan.take_turns)
        found = Blinks(way, rate, turns, metric(server.url, "tgi_recomputed_tokens") - before)
        if victim == SHARD:
            found.bursts = crowd(number).run(plan.make_bursts)
            found.fast = crowd(number, fewer=way == RECOMPUTED).run(plan.kill_fast)
        yield found
    if errors := metric(server.url, "tgi_books_errors"):
        raise RuntimeError(f"token slots or rows did not add up {errors:.0f} times")


def as_markdown(name: str, found: Sequence[Blinks], how: str) -> str:
    """A table with a column for each way, below a line that tells how it was measured."""
    cells = [blinks.rows() for blinks in found]
    rows = [[row, *(each[row] for each in cells)] for row in cells[0]]
    return on_this_machine(table("|".join([name, *(blinks.way for blinks in found)]), rows), model=how)


def missed(found: Sequence[Blinks]) -> list[str]:
    return [
        f"{blinks.way}: {row}: {figure}"
        for blinks in found
        for row, figure in blinks.rows().items()
        if isinstance(figure, Figure) and figure.is_missed
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of kills 5 to 25 s apart, with each signal")
    parser.add_argument("--models", nargs="+", default=["demo", "m100"], choices=["demo", *SHAPES])
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2], choices=[1, 2])
    parser.add_argument("--victims", nargs="+", default=[*WAYS], choices=[*WAYS])
    parser.add_argument("--seed", type=int, default=1, help="which shards are killed, and when")
    parser.add_argument("--write", type=Path, help="a Markdown file whose marked tables are replaced")
    asked = parser.parse_args()
    plan, report = Plan(asked.minutes), Report(asked.write)
    servers = [*product(asked.models, asked.shards, asked.victims)]
    minutes = sum(len(WAYS[victim]) * plan.seconds(victim) for _, _, victim in servers) / 60
    print(f"{len(servers)} servers, {minutes:.0f} minutes at least", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for model, num_shard, victim in servers:
            flags = [*ARGUMENTS, *MANY_SLOTS, *(("--api-workers", "1") if victim == ENGINE else ())]
            if model in SHAPES:
                if not Path(folder, model).exists():
                    write_checkpoint(Path(folder, model), SHAPES[model])
                flags += ["--model-id", str(Path(folder, model))]
            name, started_s = f"{model}, {num_shard} shard{'s' * (num_shard > 1)}", time.monotonic()
            name += ", engines" * (victim == ENGINE)
            print(name, flush=True)
            try:
                with LONG.server(num_shard, *flags) as server:
                    found = [*measure(server, num_shard, victim, plan, asked.seed)]
            except Exception as error:
                report.fail(f"{name}: {innermost(error)!r}")
                continue
            failures = [f"{name}, {failure}" for blinks in found for failure in blinks.failures()]
            how = f"Seed {asked.seed}, {asked.minutes:g} minutes with kills 5 to 25 s apart"
            report.take(f"blinks of {name}", as_markdown(name, found, how), failures)
            for text in missed(found):
                print(f"missed: {name}, {text}")
            print(f"{name}: {(time.monotonic() - started_s) / 60:.1f} minutes", flush=True)
    return report.status


if __name__ == "__main__":
    raise SystemExit(main())
