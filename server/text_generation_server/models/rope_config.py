"""Reads from config.json which rotary positions the model uses, in the fields of transformers 5 (rope_parameters) or of
older versions (rope_theta, rope_scaling).
"""

from collections.abc import Mapping

from text_generation_server.errors import ModelError
from text_generation_server.layers.rotary import RopeScaling
from text_generation_server.models.values import Fields, described, is_number, shown, shown_name

DEFAULT_THETA = 10000.0
MAX_THETA = 1e15
MAX_FACTOR = 1e6
MAX_POSITIONS = 2**24  # more than the longest context of any model (10 million tokens)

# The fields that each kind of scaling reads besides rope_theta. `linear` ignores its last field, which some files have.
KINDS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor", "original_max_position_embeddings"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
}
NAMES = frozenset({"rope_theta", "rope_type", "type"})
# Neutral values of fields that a kind does not read: with these values the field changes nothing.
NEUTRAL: Mapping[str, float] = {"factor": 1.0, "partial_rotary_factor": 1.0, "attention_factor": 1.0}


def read_rope(config: Fields, positions: int) -> tuple[float, RopeScaling]:
    """Returns theta and the scaling. `positions` is max_position_embeddings. ModelError names the wrong field."""
    rope = _object(config)
    theta = rope if rope.has("rope_theta") else config
    kind = rope.word("rope_type" if rope.has("rope_type") else "type", "default")
    if kind not in KINDS:
        raise ModelError(f"{rope.where}: rope type {shown(kind)} is not supported yet, only {', '.join(KINDS)}")
    _refuse_others(rope, kind, positions)
    reads = KINDS[kind]
    scaling = RopeScaling(
        kind=kind,
        factor=rope.number("factor", 1, MAX_FACTOR) if "factor" in reads else 1.0,
        original_max_positions=(
            rope.whole("original_max_position_embeddings", 1, MAX_POSITIONS) if kind == "llama3" else 0
        ),
        low_freq_factor=rope.number("low_freq_factor", 1e-6, MAX_FACTOR, 1.0) if kind == "llama3" else 1.0,
        high_freq_factor=rope.number("high_freq_factor", 1e-6, MAX_FACTOR, 4.0) if kind == "llama3" else 4.0,
    )
    if kind == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise rope.error("high_freq_factor", f"more than low_freq_factor ({scaling.low_freq_factor:g})")
    return theta.number("rope_theta", 1, MAX_THETA, DEFAULT_THETA), scaling


def _object(config: Fields) -> Fields:
    new, old = config.inner("rope_parameters"), config.inner("rope_scaling")
    if new.raw and old.raw and new.raw != old.raw:
        raise ModelError(f"{config.where}: rope_parameters and rope_scaling differ: remove one of them")
    return new if new.raw else old


def _refuse_others(rope: Fields, kind: str, positions: int) -> None:
    """Refuses a field that this kind of scaling does not read, unless its value is neutral. Raises ModelError."""
    neutral = {**NEUTRAL, "original_max_position_embeddings": positions}
    for name, value in rope.raw.items():
        if name in KINDS[kind] or name in NAMES or value is None:
            continue
        if not is_number(value) or value != neutral.get(name):
            raise ModelError(
                f"{rope.where}: {shown_name(name)} is {described(value)}, which is not supported with rope type {kind}"
            )
