"""How positions turn queries and keys, as config.json says it. The server's `layers/rotary.py` computes the angles."""

from dataclasses import dataclass


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
