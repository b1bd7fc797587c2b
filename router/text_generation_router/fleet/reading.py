"""Converts messages of proto/engine.proto: an engine's messages to calls of the front's books, and the front's orders
to messages."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from text_generation_proto import engine_pb2 as pb
from text_generation_router.engine.protocol import Ended
from text_generation_router.fleet.books import FrontBooks
from text_generation_router.fleet.cache_news import MAX_HASHES, CacheNews
from text_generation_router.fleet.choice import EngineLoad
from text_generation_router.fleet.engines import EngineView
from text_generation_router.fleet.values import (
    Cancel,
    Credit,
    EndAt,
    EngineFacts,
    EngineFirst,
    LoadReport,
    Order,
    Withdraw,
)
from text_generation_router.scheduling.request import Share
from text_generation_router.wire.steps import TokenRun, ended_of, logprobs_of, refused_of, runs_of
from text_generation_router.wire.submits import check_ids, submit_of
from text_generation_router.wire.version import INT32, UINT64, VERSION, WireError, check_version, snapshot_of, unpacked

# Maximum number of characters of an engine's id, and of bytes of a digest.
MAX_ID_CHARS, MAX_DIGEST_BYTES = 128, 128


def hello(front_id: str) -> pb.FrontMessage:
    return pb.FrontMessage(hello=pb.Hello(version=VERSION, front_id=front_id))


def message_of(order: Order) -> pb.FrontMessage:
    match order:
        case list():
            return pb.FrontMessage(submit=submit_of(order))
        case EndAt():
            return pb.FrontMessage(end=pb.End(index=order.index, count=order.count))
        case Cancel():
            return pb.FrontMessage(cancel=pb.Cancel(index=order.index))
        case Withdraw():
            return pb.FrontMessage(withdraw=pb.Withdraw(index=order.index, even_begun=order.even_begun))
        case Credit():
            return pb.FrontMessage(credit=pb.Credit(index=order.index, tokens=order.tokens))


def facts_of_welcome(message: pb.EngineMessage) -> EngineFacts:
    """The facts in a Welcome. Raises WireError if the message is not a Welcome of a version that this build
    understands."""
    if message.WhichOneof("message") != "welcome":
        raise WireError("the engine's first message is not a Welcome")
    welcome = message.welcome
    version = check_version(welcome.version)
    if not 0 < len(welcome.engine_id) <= MAX_ID_CHARS or len(welcome.digest) > MAX_DIGEST_BYTES:
        raise WireError("an engine's id or digest has a wrong length")
    return EngineFacts(welcome.engine_id, welcome.term, welcome.digest, snapshot_of(welcome.facts), version)


def load_report_of(load: pb.Load) -> LoadReport:
    if not isfinite(load.wait_s) or load.wait_s < 0:
        raise WireError(f"an engine expects a wait of {load.wait_s} s")
    known = EngineLoad(
        running=load.running,
        waiting=load.waiting,
        waiting_tokens=load.waiting_tokens,
        computing_tokens=load.computing_tokens,
        wait_s=load.wait_s,
        is_ready=load.is_ready,
        is_draining=load.is_draining,
    )
    served = {Share(each.owner, each.tenant): each.tokens for each in load.served if isfinite(each.tokens)}
    return LoadReport(known, load.permits, served, load.newest_index if load.HasField("newest_index") else None)


def cache_news_of(cache: pb.Cache) -> CacheNews:
    added, removed = (unpacked(name, getattr(cache, name), UINT64).tolist() for name in ("added", "removed"))
    if len(added) + len(removed) > MAX_HASHES:
        raise WireError(
            f"news of a cache have {len(added) + len(removed)} hashes, and at most {MAX_HASHES} are allowed"
        )
    return CacheNews(added, removed, cache.is_snapshot)


def take(message: pb.EngineMessage, engine: EngineView, books: FrontBooks) -> None:
    """Gives a message to the books. Raises WireError if it breaks the protocol."""
    kind = message.WhichOneof("message")
    if kind not in TAKES:
        raise WireError(f"an engine sent {kind or 'an unknown message'}")
    TAKES[kind](getattr(message, kind), engine, books)


def _tokens(message: pb.Tokens, engine: EngineView, books: FrontBooks) -> None:
    check_ids("ids", unpacked("ids", message.ids, INT32), engine.facts.snapshot.model.vocab_size)
    runs = list(runs_of(message))
    firsts = {
        first.index: EngineFirst(first.queue_s, first.inference_s, first.cached_tokens) for first in message.firsts
    }
    if not message.ended:
        for run in runs:
            books.tokens(engine, run, firsts.pop(run.wire_index, None) if firsts else None, None)
        return
    ended = {each.index: ended_of(each) for each in message.ended}
    _ending_tokens(runs, firsts, ended, engine, books)


def _ending_tokens(
    runs: list[TokenRun],
    firsts: dict[int, EngineFirst],
    ended: dict[int, Ended],
    engine: EngineView,
    books: FrontBooks,
) -> None:
    """Gives the tokens of a step to the books. `ended` has the requests that end with this step."""
    last = {run.wire_index: place for place, run in enumerate(runs)}
    for place, run in enumerate(runs):
        end = ended.pop(run.wire_index, None) if place == last[run.wire_index] else None
        books.tokens(engine, run, firsts.pop(run.wire_index, None), end)
    for index, end in ended.items():
        if (first := firsts.pop(index, None)) is not None:
            books.computed(engine, index, first, end)
        else:
            books.ended(engine, index, end)


def _epoch(message: pb.Epoch, engine: EngineView, books: FrontBooks) -> None:
    snapshot = snapshot_of(message.facts) if message.is_ready else None
    books.epoch(engine, snapshot, message.aboard)


# The handlers of an engine's messages, by kind, without Welcome.
TAKES: Mapping[str, Callable[[Any, EngineView, FrontBooks], None]] = {
    "accepted": lambda message, engine, books: books.accepted(engine, message.indexes),
    "refused": lambda message, engine, books: books.refused(engine, message.indexes, refused_of(message)),
    "tokens": _tokens,
    "prompt": lambda piece, engine, books: books.prompt(engine, piece.index, piece.start, logprobs_of(piece)),
    "ended": lambda message, engine, books: books.ended(engine, message.index, ended_of(message)),
    "epoch": _epoch,
    "begun": lambda message, engine, books: books.begun(engine, message.indexes),
}
