"""Reads which rotary positions config.json asks for, in the fields of transformers 5 (rope_parameters) or of older
versions (rope_theta, rope_scaling, partial_rotary_factor)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from text_generation_common.errors import ModelError
from text_generation_common.models.values import Fields, described, is_number, shown, shown_name


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How a model reaches positions beyond those it was first trained for. Kinds: default, linear, dynamic, llama3,
    yarn and longrope."""

    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0  # llama3, yarn and longrope: the trained length, before it was stretched
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: waves with more rotations than this over the trained length are kept
    beta_slow: float = 1.0  # yarn: waves with fewer rotations are stretched by the whole factor
    truncate: bool = True  # yarn: these bounds are rounded to whole dimensions
    short_factors: tuple[float, ...] = ()  # longrope: one for each frequency, up to the trained length
    long_factors: tuple[float, ...] = ()  # longrope: beyond it
    attention_factor: float = 1.0  # yarn and longrope: multiplies cos and sin


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float
    scaling: RopeScaling
    base_positions: int  # max_position_embeddings: where `dynamic` scaling begins
    size: int  # how many numbers of a head are turned: the first ones
    interleaved: bool = False  # numbers 2i and 2i + 1 are a pair; otherwise i and i + size / 2


MAX_THETA = 1e15
MAX_FACTOR = 1e6
MAX_POSITIONS = 2**24  # more than the longest context of any model (10 million tokens)

NAMES = frozenset({"rope_theta", "rope_type", "type"})
# Neutral values of fields that a kind does not read: with these values the field changes nothing.
NEUTRAL: Mapping[str, float] = {"factor": 1.0, "partial_rotary_factor": 1.0, "attention_factor": 1.0}
TRAINED = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """What a family knows about its ropes, beside what config.json says."""

    partial: bool = False  # whether the family reads partial_rotary_factor
    trained_beside: bool = False  # whether original_max_position_embeddings may stand beside the rope's own fields
    interleaved: bool = False
    aliases: tuple[tuple[str, str], ...] = ()  # (name of a kind in old files, its name today)


LLAMA_ROPE = RopeFacts()


def read_rope(
    config: Fields, positions: int, head_size: int, facts: RopeFacts = LLAMA_ROPE, rope: Fields | None = None
) -> Rope:
    """`positions` is max_position_embeddings. `rope`: where the rope's own fields are, if not in one of the two usual
    places. ModelError names the wrong field."""
    if rope is None:
        rope = _object(config)
    kind = rope.word("rope_type" if rope.has("rope_type") else "type", "default")
    kind = dict(facts.aliases).get(kind, kind)
    if kind not in KINDS:
        raise ModelError(f"{rope.where}: rope type {shown(kind)} is not supported yet, only {', '.join(KINDS)}")
    read_fields, read = KINDS[kind]
    partial = frozenset({"partial_rotary_factor"} if facts.partial else ())
    _refuse_others(rope, kind, read_fields | NAMES | partial, positions)
    scaling = RopeScaling(kind)
    if kind in STRETCHED:
        trained = config if facts.trained_beside and config.has(TRAINED) else rope
        default = None if kind == "llama3" else positions
        scaling = replace(scaling, original_max_positions=trained.whole(TRAINED, 2, MAX_POSITIONS, default))
    size = _size(config, rope, head_size) if facts.partial else head_size
    config.note("rope_theta", *([TRAINED] if facts.trained_beside else []))
    theta = (rope if rope.has("rope_theta") else config).number("rope_theta", 1, MAX_THETA, 10000.0)
    return Rope(theta, read(rope, scaling, positions, size // 2), positions, size, facts.interleaved)


def _size(config: Fields, rope: Fields, head_size: int) -> int:
    config.note("partial_rotary_factor")
    where = rope if rope.has("partial_rotary_factor") else config
    size = int(head_size * where.number("partial_rotary_factor", 0, 1, 1.0))
    if size % 2 or size < 2:
        raise where.error("partial_rotary_factor", f"an even number of the {head_size} numbers of a head")
    return size


def _default(rope: Fields, scaling: RopeScaling, positions: int, pairs: int) -> RopeScaling:
    return scaling


def _by_factor(rope: Fields, scaling: RopeScaling, positions: int, pairs: int) -> RopeScaling:
    return replace(scaling, factor=rope.number("factor", 1, MAX_FACTOR))


def _llama3(rope: Fields, scaling: RopeScaling, positions: int, pairs: int) -> RopeScaling:
    low = rope.number("low_freq_factor", 1e-6, MAX_FACTOR, 1.0)
    high = rope.number("high_freq_factor", 1e-6, MAX_FACTOR, 4.0)
    if low >= high:
        raise rope.error("high_freq_factor", f"more than low_freq_factor ({low:g})")
    scaling = replace(scaling, low_freq_factor=low, high_freq_factor=high)
    return _by_factor(rope, scaling, positions, pairs)


def _yarn(rope: Fields, scaling: RopeScaling, positions: int, pairs: int) -> RopeScaling:
    factor = rope.number("factor", 1, MAX_FACTOR, max(1.0, positions / scaling.original_max_positions))
    fast, slow = rope.number("beta_fast", 1e-6, MAX_FACTOR, 32.0), rope.number("beta_slow", 1e-6, MAX_FACTOR, 1.0)
    if slow >= fast:
        raise rope.error("beta_fast", f"more than beta_slow ({slow:g})")
    mscale, of_all = (rope.number(name, 0, MAX_FACTOR, 0.0) for name in ("mscale", "mscale_all_dim"))
    attention = _magnitude(factor, mscale) / _magnitude(factor, of_all) if mscale and of_all else _magnitude(factor, 1)
    return replace(
        scaling,
        factor=factor,
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.get("truncate") is None or rope.flag("truncate"),
        attention_factor=rope.number("attention_factor", 1e-6, MAX_FACTOR, attention),
    )


def _magnitude(factor: float, weight: float) -> float:
    """By how much YaRN enlarges queries and keys, because there are more keys to tell apart."""
    return 0.1 * weight * math.log(factor) + 1.0


def _longrope(rope: Fields, scaling: RopeScaling, positions: int, pairs: int) -> RopeScaling:
    trained = scaling.original_max_positions
    stretch = rope.number("factor", 1, MAX_FACTOR, max(1.0, positions / trained))
    attention = math.sqrt(1 + math.log(stretch) / math.log(trained))
    return replace(
        scaling,
        short_factors=_factors(rope, "short_factor", pairs),
        long_factors=_factors(rope, "long_factor", pairs),
        attention_factor=rope.number("attention_factor", 1e-6, MAX_FACTOR, attention),
    )


def _factors(rope: Fields, name: str, pairs: int) -> tuple[float, ...]:
    factors = rope.get(name)
    if not (isinstance(factors, list) and len(factors) == pairs and all(is_number(f) and f > 0 for f in factors)):
        raise rope.error(name, f"a list of {pairs} numbers above 0, one for each pair of numbers that is turned")
    return tuple(map(float, factors))


# For each kind of scaling the fields that it reads beside those of every kind, and how it reads them, given
# max_position_embeddings and the number of pairs that are turned. `linear` ignores its last field: some files have it.
Reader = Callable[[Fields, RopeScaling, int, int], RopeScaling]
KINDS: Mapping[str, tuple[frozenset[str], Reader]] = {
    "default": (frozenset(), _default),
    "linear": (frozenset({"factor", TRAINED}), _by_factor),
    "dynamic": (frozenset({"factor"}), _by_factor),
    "llama3": (frozenset({"factor", TRAINED, "low_freq_factor", "high_freq_factor"}), _llama3),
    "yarn": (
        frozenset(
            {"factor", TRAINED, "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor"}
        ),
        _yarn,
    ),
    "longrope": (frozenset({"factor", TRAINED, "short_factor", "long_factor", "attention_factor"}), _longrope),
}
STRETCHED = ("llama3", "yarn", "longrope")  # kinds that need the trained length


def _object(config: Fields) -> Fields:
    new, old = config.inner("rope_parameters"), config.inner("rope_scaling")
    if new.raw and old.raw and new.raw != old.raw:
        raise ModelError(f"{config.where}: rope_parameters and rope_scaling differ: remove one of them")
    if new.raw:
        old.note(*old.raw)
    return new if new.raw else old


def _refuse_others(rope: Fields, kind: str, read: frozenset[str], positions: int) -> None:
    """ModelError for a field that this kind of scaling does not read, unless its value is neutral."""
    neutral = {**NEUTRAL, TRAINED: positions}
    for name, value in rope.raw.items():
        if name in read or value is None:
            continue
        if not is_number(value) or value != neutral.get(name):
            raise ModelError(
                f"{rope.where}: {shown_name(name)} is {described(value)}, which is not supported with rope type {kind}"
            )
    rope.note(*rope.raw)
