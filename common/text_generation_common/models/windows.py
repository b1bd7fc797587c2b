"""Reads which layers of a model have a sliding window, its size, and ropes that differ between layers with and without
one."""

from collections.abc import Callable
from dataclasses import replace

from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.reading import with_rules
from text_generation_common.models.rope_config import MAX_POSITIONS, read_rope
from text_generation_common.models.values import Fields

LAYER_TYPES = ("full_attention", "sliding_attention")


def with_windows(fields: Fields, config: ModelConfig, window: int | None, slides: Callable[[int], bool]) -> ModelConfig:
    """Layers that layer_types calls sliding_attention have the window, or, where config.json has no layer_types, those
    that `slides`."""
    kinds, count = fields.get("layer_types"), config.num_layers
    if kinds is None:
        kinds = ["sliding_attention" if slides(i) else "full_attention" for i in range(count)]
    if not (isinstance(kinds, list) and len(kinds) == count and all(kind in LAYER_TYPES for kind in kinds)):
        raise fields.error("layer_types", f"a list of {count} of the words {' and '.join(LAYER_TYPES)}")
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    rules = [replace(rule, window=window) for rule, window in zip(config.rules, windows, strict=True)]
    return replace(config, rules=tuple(rules))


def with_window_pattern(fields: Fields, config: ModelConfig, pattern: int) -> ModelConfig:
    """Where config.json has no layer_types, of `pattern` layers all but the last have a window."""
    window = fields.with_defaults(sliding_window=4096).whole("sliding_window", 1, MAX_POSITIONS)
    return with_windows(fields, config, window, lambda i: (i + 1) % pattern != 0)


def with_ropes(fields: Fields, config: ModelConfig, theta_in_windows: float | None = None) -> ModelConfig:
    """Sets the ropes of all layers. rope_parameters has an object for each kind of layer; older files have one for
    layers without a window, and the others have no scaling. Where these objects have no theta, it is rope_theta, or in
    layers with a window `theta_in_windows`."""
    given = fields.inner("rope_parameters")
    if given.raw.keys() - {*LAYER_TYPES}:
        raise fields.error("rope_parameters", f"an object with the fields {' and '.join(LAYER_TYPES)} only")
    if given.raw and fields.has("rope_scaling"):
        raise fields.error("rope_scaling", "null where there are rope_parameters")
    full, sliding = (given.inner(kind) for kind in LAYER_TYPES)
    sizes = config.max_positions, config.head_size
    everywhere = read_rope(fields, *sizes, rope=full if given.raw else fields.inner("rope_scaling"))
    if theta_in_windows is not None:
        fields = fields.with_value("rope_theta", theta_in_windows)
    in_windows = read_rope(fields, *sizes, rope=sliding)
    rules = [replace(rule, rope=everywhere if rule.window is None else in_windows) for rule in config.rules]
    return replace(config, rules=tuple(rules))


def with_one_window(fields: Fields, config: ModelConfig) -> ModelConfig:
    return with_rules(config, window=read_window(fields))


def with_windows_from(fields: Fields, config: ModelConfig) -> ModelConfig:
    """The layers from max_window_layers on have a window, if use_sliding_window is true."""
    fields = fields.with_defaults(sliding_window=4096, max_window_layers=28)
    first = fields.whole("max_window_layers", 0, MAX_POSITIONS, 28)
    return with_windows(fields, config, used_window(fields), lambda i: i >= first)


def used_window(fields: Fields) -> int | None:
    """The window, if use_sliding_window is true."""
    return read_window(fields if fields.flag("use_sliding_window") else fields.without("sliding_window"))


def read_window(fields: Fields) -> int | None:
    return fields.whole("sliding_window", 1, MAX_POSITIONS) if fields.has("sliding_window") else None
