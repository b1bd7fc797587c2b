"""What both sides agree on: the version of proto/engine.proto that this build speaks, the form of arrays, the error of
a peer that breaks a rule, and an engine's model and limits as the router's `Snapshot`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from text_generation_proto import engine_pb2 as pb
from text_generation_router.engine.protocol import JoiningRules, ModelInfo, Snapshot, TokenLimits

# The arrays of the wire: little-endian numbers in `bytes`.

INT32, UINT32, UINT64, FLOAT32 = (np.dtype(name) for name in ("<i4", "<u4", "<u8", "<f4"))

Array = npt.NDArray[Any]


def packed(values: Any, dtype: np.dtype[Any]) -> bytes:
    return np.asarray(values, dtype).tobytes()


def unpacked(name: str, data: bytes, dtype: np.dtype[Any], count: int | None = None) -> Array:
    """The array in `data`, without a copy. Raises WireError if it has not `count` whole numbers. `name` is for the
    error's text."""
    if len(data) % dtype.itemsize:
        raise WireError(f"`{name}` has {len(data)} bytes, not a multiple of {dtype.itemsize}")
    if count is not None and len(data) != count * dtype.itemsize:
        raise WireError(f"`{name}` has {len(data) // dtype.itemsize} numbers, and {count} are expected")
    return np.frombuffer(data, dtype)


class WireError(Exception):
    """A message breaks a rule of the protocol. Its sender is to be disconnected with this text."""


VERSION = 2
# Since this version an engine reports which requests have begun, takes suspects of one loss only, and gives running
# requests back.
WITH_BEGUN = 2


def check_version(peer: int) -> int:
    """The version that both sides speak. `peer`: the other side's newest. Raises WireError."""
    if peer < 1 or peer < VERSION - 1:
        raise WireError(
            f"the peer speaks version {peer} of engine.v1, and this build {VERSION}: upgrade the peer first"
        )
    return min(peer, VERSION)


# An engine's report of its model and limits, as the router's `Snapshot`.
def facts_of(snapshot: Snapshot) -> pb.Facts:
    model, limits, joining = snapshot.model, snapshot.limits, snapshot.joining
    return pb.Facts(
        epoch=model.epoch,
        dtype=model.dtype,
        device_type=model.device_type,
        vocab_size=model.vocab_size,
        max_positions=model.max_positions,
        eos_token_ids=model.eos_token_ids,
        kernels=model.kernels,
        world_size=model.world_size,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        max_batch_total_tokens=limits.max_batch_total_tokens,
        grammar_refusal=model.grammar_refusal,
        adapters=sorted(model.adapters),
        waiting_served_ratio=joining.waiting_served_ratio,
        max_waiting_tokens=joining.max_waiting_tokens,
        max_batch_size=joining.max_batch_size or 0,
    )


def snapshot_of(facts: pb.Facts) -> Snapshot:
    """Raises WireError if no request could ever fit."""
    if not (facts.vocab_size and facts.max_total_tokens and facts.max_batch_total_tokens):
        raise WireError("an engine tells of a model without vocabulary or token slots")
    model = ModelInfo(
        dtype=facts.dtype,
        device_type=facts.device_type,
        vocab_size=facts.vocab_size,
        max_positions=facts.max_positions,
        eos_token_ids=tuple(facts.eos_token_ids),
        kernels=facts.kernels,
        world_size=facts.world_size,
        epoch=facts.epoch,
        grammar_refusal=facts.grammar_refusal,
        adapters=frozenset(facts.adapters),
    )
    limits = TokenLimits(facts.max_input_tokens, facts.max_total_tokens, facts.max_batch_total_tokens)
    joining = JoiningRules(facts.waiting_served_ratio, facts.max_waiting_tokens, facts.max_batch_size or None)
    return Snapshot(model, limits, joining)
