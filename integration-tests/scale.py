"""Sizes of a chaos run: the long form, whose figures are published, and the short form, run for every change."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server_process import ServerProcess
from streams import Ask, asks


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


LONG = Scale(64, 32, 256, (80, 300), {1: 155, 2: 130}, 8.0, 5, {1: 20, 2: 5}, 30, 500, ())
# Fewer total tokens make warm-up shorter, which takes most of a restart; short texts do not need more tokens.
SHORT = Scale(64, 8, 64, (20, 60), {1: 3, 2: 2}, 3.0, 1, {1: 5, 2: 1}, 3, 200, ("--max-total-tokens", "512"))
