"""Sizes of a chaos run: the long form, whose figures are published, and the short form, run for every change."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asks import Ask, asks
from server_process import ServerProcess
from streams import Comparison, StreamAnswer, answers_beside, compare, undisturbed


@dataclass(frozen=True, slots=True)
class Scale:
    num_streams: int  # number of streams that start together
    num_late: int  # number of streams that start later, one after the other
    new_tokens: int
    mixed_tokens: tuple[int, int]  # least and most tokens that one stream asks for, in runs with streams of all kinds
    num_kills: Mapping[int, int]  # number of kills, by number of shards
    longest_gap_s: float  # longest gap between two kills, in seconds
    num_drains: int  # number of servers whose shards are killed while they drain, for each number of shards
    exceptions: Mapping[int, int]  # number of injected exceptions, by number of shards
    write_timeout_s: int
    num_leaving: int  # number of clients that all leave at the same time
    arguments: Sequence[str]

    def asks(self) -> list[Ask]:
        return asks(self.num_streams + self.num_late, self.new_tokens)

    def server(self, num_shard: int, *more: str, environ: Mapping[str, str] | None = None) -> ServerProcess:
        always = ("--dtype", "float32", "--json-output", "--num-shard", str(num_shard))
        return ServerProcess(*always, *self.arguments, *more, environ=environ)

    def undisturbed(self, num_shard: int) -> list[StreamAnswer]:
        return undisturbed(self.server(num_shard), self.asks())

    def beside(
        self, url: str, harm: Callable[[], Any], tokens: int | None = None, early_only: bool = False
    ) -> tuple[list[StreamAnswer], Any]:
        """What `answers_beside` returns, of all streams or the early ones. `tokens`: a quarter of the early streams'
        unless given."""
        asked = self.asks()[: self.num_streams] if early_only else self.asks()
        tokens = self.num_streams * self.new_tokens // 4 if tokens is None else tokens
        return answers_beside(url, asked, self.num_streams, tokens, harm)

    def compared_beside(self, url: str, expected: Sequence[StreamAnswer], harm: Callable[[], Any]) -> Comparison:
        """All streams while `harm` is done, with those of a run without faults."""
        return compare(expected, self.beside(url, harm)[0])

    def assert_loses_connections_only(
        self, url: str, expected: Sequence[StreamAnswer], harm: Callable[[], Any]
    ) -> None:
        """Streams may be lost while `harm` is done, but not all of them; all others are as without faults."""
        answers, _ = self.beside(url, harm)
        ended = [(one, got) for one, got in zip(expected, answers, strict=True) if not got.error]
        assert ended, "the living front had no stream"
        assert compare([one for one, _ in ended], [got for _, got in ended]).failures() == []


LONG = Scale(64, 32, 256, (80, 300), {1: 155, 2: 130}, 8.0, 5, {1: 20, 2: 5}, 30, 500, ())
# A rule of FAILPOINTS. Each step takes that much longer, so that texts outlast what is done to their server, also if a
# busy machine delays the test.
SLOW_STEPS = "shard.step:delay=0.008@every 1"
# Token slots for more and longer texts than those of a run.
MANY_SLOTS = ("--max-batch-total-tokens", str(2**17))
# Fewer total tokens make warm-up shorter, which takes most of a restart; short texts do not need more tokens.
SHORT = Scale(32, 4, 64, (20, 60), {1: 3, 2: 2}, 3.0, 1, {1: 5, 2: 1}, 3, 200, ("--max-total-tokens", "512"))
