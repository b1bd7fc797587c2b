"""What an engine sends about requests: the tokens of one step for one front, log-probabilities of prompts in pieces
that fit into messages, and how requests end or are refused. Packed by the engine, unpacked by the front.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import NamedTuple

import numpy as np

from text_generation_proto import engine_pb2 as pb
from text_generation_router.engine.protocol import Ended, Tokens, TopToken
from text_generation_router.errors import Refusal, RefusedError
from text_generation_router.scheduling.prompt_logprobs import PromptLogprobs
from text_generation_router.scheduling.request import EndReason
from text_generation_router.wire.version import FLOAT32, INT32, UINT32, UINT64, WireError, packed, unpacked

# Log-probabilities of a prompt in pieces that fit into messages.

PIECE_BYTES = 2**20


def pieces_of(index: int, known: PromptLogprobs) -> Iterator[pb.Prompt]:
    """`known`: from the prompt's second token on. A prompt of one token has no piece."""
    num_top = known.top_ids_PK.shape[1]
    rows = max(1, PIECE_BYTES // (4 + 8 * num_top))
    for start in range(0, len(known), rows):
        part = slice(start, start + rows)
        yield pb.Prompt(
            index=index,
            start=start + 1,
            logprobs=packed(known.logprobs_P[part], FLOAT32),
            num_top=num_top,
            top_ids=packed(known.top_ids_PK[part], INT32),
            top_logprobs=packed(known.top_logprobs_PK[part], FLOAT32),
        )


def logprobs_of(piece: pb.Prompt) -> PromptLogprobs:
    """Raises WireError for arrays that do not fit together."""
    logprobs_P = unpacked("logprobs", piece.logprobs, FLOAT32)
    count, num_top = len(logprobs_P), piece.num_top
    if not count:
        raise WireError("a Prompt has no log-probabilities")
    top_ids = unpacked("top_ids", piece.top_ids, INT32, count * num_top)
    top_logprobs = unpacked("top_logprobs", piece.top_logprobs, FLOAT32, count * num_top)
    shape = count, num_top
    return PromptLogprobs(
        logprobs_P.astype(np.float32, copy=False),
        top_ids.astype(np.int32, copy=False).reshape(shape),
        top_logprobs.astype(np.float32, copy=False).reshape(shape),
    )


# How a request ends or is refused, on the wire.

REASONS = {
    EndReason.LENGTH: pb.LENGTH,
    EndReason.EOS_TOKEN: pb.EOS_TOKEN,
    EndReason.COMPLETE: pb.COMPLETE,
    EndReason.STOPPED: pb.STOPPED,
    EndReason.CANCELLED: pb.CANCELLED,
    EndReason.DEADLINE: pb.DEADLINE,
    EndReason.FAILED: pb.FAILED,
    EndReason.CLOSED: pb.ENGINE_CLOSED,
    EndReason.WITHDRAWN: pb.WITHDRAWN,
}
REFUSALS = {
    Refusal.OVERLOADED: pb.OVERLOADED,
    Refusal.CLOSED: pb.CLOSED,
    Refusal.TOO_LONG: pb.TOO_LONG,
    Refusal.DRAINING: pb.DRAINING,
    Refusal.OTHER_SUSPECTS: pb.OTHER_SUSPECTS,
    Refusal.NO_ADAPTER: pb.NO_ADAPTER,
}
REASONS_READ = {wire: reason for reason, wire in REASONS.items()}
REFUSALS_READ = {wire: reason for reason, wire in REFUSALS.items()}


def ended_to_pb(index: int, ended: Ended) -> pb.Ended:
    replays = [pb.Replay(lost_s=lost_s, again_s=again_s) for lost_s, again_s in ended.replays]
    message = pb.Ended(
        index=index,
        reason=REASONS[ended.reason],
        inference_s=ended.inference_s,
        cause=ended.cause,
        queue_s=ended.queue_s,
        replays=replays,
    )
    if ended.suspicions or ended.counts:
        message.losses.suspicions, message.losses.counts = ended.suspicions, ended.counts
    return message


def ended_of(message: pb.Ended) -> Ended:
    """Raises WireError for a reason that this build does not know."""
    if message.reason not in REASONS_READ:
        raise WireError(f"a request ended for reason {message.reason}, which is unknown here")
    return Ended(
        reason=REASONS_READ[message.reason],
        inference_s=message.inference_s,
        cause=message.cause,
        queue_s=message.queue_s if message.HasField("queue_s") else None,
        replays=tuple((replay.lost_s, replay.again_s) for replay in message.replays),
        suspicions=message.losses.suspicions,
        counts=message.losses.counts,
    )


def refused_to_pb(indexes: Sequence[int], error: RefusedError) -> pb.Refused:
    return pb.Refused(indexes=indexes, reason=REFUSALS[error.reason], retry_after_s=error.retry_after_s)


def refused_of(message: pb.Refused) -> RefusedError:
    """Raises WireError for a reason that this build does not know."""
    if message.reason not in REFUSALS_READ:
        raise WireError(f"requests are refused for reason {message.reason}, which is unknown here")
    return RefusedError(REFUSALS_READ[message.reason], message.retry_after_s)


@dataclass(slots=True)
class FrontTokens:
    """Collects what one step makes for one front."""

    indexes: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[tuple[TopToken, ...]] = field(default_factory=list)
    firsts: list[pb.First] = field(default_factory=list)
    ended: list[pb.Ended] = field(default_factory=list)

    def add(self, index: int, position: int, tokens: Tokens) -> None:
        """`position`: number of the first of `tokens` among the request's output tokens."""
        ids, logprobs, tops, inference_s, known = tokens
        if (count := len(ids)) == 1:  # one by one: the lists of a single token would cost as much again
            self.indexes.append(index)
            self.positions.append(position)
            self.ids.append(ids[0])
            self.logprobs.append(logprobs[0])
            self.tops.append(tops[0] if tops else ())
        else:
            self.indexes += [index] * count
            self.positions += range(position, position + count)
            self.ids += ids
            self.logprobs += logprobs
            self.tops += tops or ((),) * count
        if known is not None:
            first = pb.First(index=index, queue_s=known.queue_s, inference_s=inference_s)
            first.cached_tokens = known.cached_tokens
            self.firsts.append(first)

    @property
    def message(self) -> pb.Tokens:
        tokens = pb.Tokens(
            indexes=packed(self.indexes, UINT64),
            positions=packed(self.positions, UINT32),
            ids=packed(self.ids, INT32),
            logprobs=packed(self.logprobs, FLOAT32),
            firsts=self.firsts,
            ended=self.ended,
        )
        if any(self.tops):
            flat = [top for tops in self.tops for top in tops]
            tokens.top_counts = packed([len(tops) for tops in self.tops], UINT32)
            tokens.top_ids = packed([token for token, _ in flat], INT32)
            tokens.top_logprobs = packed([logprob for _, logprob in flat], FLOAT32)
        return tokens


class TokenRun(NamedTuple):
    """Consecutive tokens of one request in one step. A named tuple, because it is made for each token: a frozen
    dataclass takes four times as long to make."""

    wire_index: int
    position: int  # position of the first token
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tops: tuple[tuple[TopToken, ...], ...]  # () if the message has no top tokens


def runs_of(message: pb.Tokens) -> Iterator[TokenRun]:
    """The tokens of a message by request, in its order. Raises WireError for arrays that do not fit together, before
    the first of them."""
    indexes = unpacked("indexes", message.indexes, UINT64)
    count = len(indexes)
    positions = unpacked("positions", message.positions, UINT32, count)
    ids = unpacked("ids", message.ids, INT32, count)
    logprobs = unpacked("logprobs", message.logprobs, FLOAT32, count)
    tops = list(_tops(message, count))
    return _runs(indexes.tolist(), positions.tolist(), ids.tolist(), logprobs.tolist(), tops)


def _tops(message: pb.Tokens, count: int) -> Iterable[tuple[TopToken, ...]]:
    if not (message.top_counts or message.top_ids or message.top_logprobs):
        return ()
    counts = unpacked("top_counts", message.top_counts, UINT32, count)
    most = int(counts.sum(dtype="u8"))
    ids = unpacked("top_ids", message.top_ids, INT32, most).tolist()
    logprobs = unpacked("top_logprobs", message.top_logprobs, FLOAT32, most).tolist()
    pairs = zip(ids, logprobs, strict=True)
    return [tuple(islice(pairs, number)) for number in counts.tolist()]


def _runs(
    indexes: Sequence[int],
    positions: Sequence[int],
    ids: Sequence[int],
    logprobs: Sequence[float],
    tops: Sequence[tuple[TopToken, ...]],
) -> Iterator[TokenRun]:
    start, count = 0, len(indexes)
    if len(set(indexes)) == count:  # one token of each request, as in nearly all steps
        tops_of: Iterable[tuple[tuple[TopToken, ...], ...]] = ((each,) for each in tops) if tops else repeat(())
        for index, position, token, logprob, own in zip(indexes, positions, ids, logprobs, tops_of, strict=False):
            yield TokenRun(index, position, (token,), (logprob,), own)
        return
    while start < count:
        end = start + 1
        while end < count and indexes[end] == indexes[start] and positions[end] == positions[end - 1] + 1:
            end += 1
        part = slice(start, end)
        yield TokenRun(indexes[start], positions[start], tuple(ids[part]), tuple(logprobs[part]), tuple(tops[part]))
        start = end


def check_positions(run: TokenRun, expected: int) -> TokenRun | None:
    """What of `run` is new to a front that has `expected` tokens of the request; None: nothing. Raises WireError if
    tokens are missing before it."""
    if run.position > expected:
        raise WireError(f"tokens from {run.position} on follow {expected} tokens: some are missing")
    old = expected - run.position
    if not old:
        return run
    if old >= len(run.ids):
        return None
    return TokenRun(run.wire_index, expected, run.ids[old:], run.logprobs[old:], run.tops[old:])
