"""How a request ends or is refused, on the wire."""

from collections.abc import Sequence

from text_generation_proto import engine_pb2 as pb
from text_generation_router.engine.protocol import Ended
from text_generation_router.errors import Refusal, RefusedError
from text_generation_router.scheduling.request import EndReason
from text_generation_router.wire.version import WireError

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
