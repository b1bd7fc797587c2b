"""What adapter_config.json says: the rank and the scale of each module. Any field that asks for other mathematics, or
for other tensors, is refused by its name.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from text_generation_common.adapters.content import CONFIG
from text_generation_common.adapters.patterns import NamePatternError, NamePatterns
from text_generation_common.errors import ModelError
from text_generation_common.flags.model import MAX_RANK
from text_generation_common.model_files import ModelFileError, json_object, read_model_file

V = TypeVar("V", int, float)
FILE = CONFIG
MAX_PATTERNS = 4096
MAX_CONFIG_BYTES = 2**20
# Fields that change nothing: the tensors say it, or training alone reads them.
_IGNORED = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "fan_in_fan_out",
        "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
        "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules",
        "velora_config",
    }
)  # fmt: skip
_READ = frozenset(
    {
        "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
        "init_lora_weights", "bias", "lora_bias", "target_parameters",
    }
)  # fmt: skip
# Values that ask for nothing.
_NEUTRAL: tuple[object, ...] = (None, False, "", [], {}, "none")
# Ways to begin the training that leave the base as it is. After all others, the base is another one.
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal", "mica", "lora_ga")
# Biases of the base that were trained, too: which ones, the tensors say.
_BIASES = (None, "none", "all", "lora_only")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    file: Path
    rank: int
    alpha: float
    is_rank_stabilized: bool
    has_biases: bool  # whether each pair of matrices has a bias
    ranks: NamePatterns[int]
    alphas: NamePatterns[float]
    base: str = ""  # the model that it was trained for, as its author called it; "": it is not said
    parameters: tuple[str, ...] = ()  # ends of the names of parameters that have matrices, such as those of all experts

    def targets(self, parameter: str) -> bool:
        return f".{parameter}".endswith(tuple(f".{end}" for end in self.parameters))

    def rank_of(self, module: str) -> int:
        return self._of("rank_pattern", self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of both matrices is multiplied by."""
        rank, alpha = self.rank_of(module), self._of("alpha_pattern", self.alphas, module, self.alpha)
        return alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank

    def _of(self, field: str, patterns: NamePatterns[V], module: str, otherwise: V) -> V:
        try:
            return patterns.of(module, otherwise)
        except NamePatternError as error:
            raise ModelError(f"{self.file}: `{field}`: {error}") from None


def read_config(folder: Path, max_rank: int = MAX_RANK) -> AdapterConfig:
    """ModelError for an adapter that is not plain LoRA, or has a larger rank."""
    file = folder / FILE
    try:
        return config_of(file, read_model_file(file), max_rank)
    except ModelFileError as error:
        raise ModelError(str(error)) from None


def config_of(file: Path, content: bytes, max_rank: int) -> AdapterConfig:
    """The same for the content of the file."""
    raw = _raw(file, content)
    if raw.get("peft_type") != "LORA":
        raise _refused(file, "peft_type", raw.get("peft_type"), "only LORA is served")
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        raise _refused(file, "task_type", raw["task_type"], "only CAUSAL_LM is served")
    begun = raw.get("init_lora_weights", True)
    if begun not in _PLAIN_BEGINNINGS:
        raise _refused(file, "init_lora_weights", begun, "the adapter belongs to a base whose weights were changed too")
    if raw.get("bias") not in _BIASES:
        raise _refused(file, "bias", raw["bias"], "it must be none, all or lora_only")
    for name in ("use_rslora", "lora_bias"):
        if raw.get(name) not in (None, False, True):
            raise _refused(file, name, raw[name], "it must be true or false")
    for name, value in raw.items():
        if name not in _IGNORED | _READ and value not in _NEUTRAL:
            raise _refused(file, name, value, "it is not supported")
    return AdapterConfig(
        file=file,
        rank=_rank(file, "r", raw.get("r", 8), max_rank),
        alpha=_number(file, "lora_alpha", raw.get("lora_alpha", 8)),
        is_rank_stabilized=raw.get("use_rslora") is True,
        has_biases=raw.get("lora_bias") is True,
        ranks=_patterns(file, raw, "rank_pattern", lambda value: _rank(file, "rank_pattern", value, max_rank)),
        alphas=_patterns(file, raw, "alpha_pattern", lambda value: _number(file, "alpha_pattern", value)),
        base=base if isinstance(base := raw.get("base_model_name_or_path"), str) else "",
        parameters=_names(file, raw, "target_parameters"),
    )


def _raw(file: Path, content: bytes) -> dict[str, Any]:
    if len(content) > MAX_CONFIG_BYTES:
        raise ModelError(f"{file} has {len(content)} bytes, and at most {MAX_CONFIG_BYTES} are read")
    try:
        return json_object(file, content)
    except ModelFileError as error:
        raise ModelError(str(error)) from None


def _patterns(file: Path, raw: Mapping[str, Any], field: str, read: Callable[[object], V]) -> NamePatterns[V]:
    given = raw.get(field) or {}
    if not isinstance(given, dict) or len(given) > MAX_PATTERNS:
        raise _refused(file, field, given, f"it must be an object of at most {MAX_PATTERNS} patterns")
    values = {text: read(value) for text, value in given.items()}
    try:
        return NamePatterns(values.items())
    except NamePatternError as error:
        raise _refused(file, field, given, str(error)) from None


def _names(file: Path, raw: Mapping[str, Any], field: str) -> tuple[str, ...]:
    given = raw.get(field) or []
    if not isinstance(given, list) or len(given) > MAX_PATTERNS or not all(isinstance(name, str) for name in given):
        raise _refused(file, field, given, f"it must be a list of at most {MAX_PATTERNS} names")
    return tuple(given)


def _rank(file: Path, field: str, value: object, max_rank: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _refused(file, field, value, "a rank is a whole number from 1 on")
    if value > max_rank:
        raise _refused(file, field, value, f"a rank of at most {max_rank} is served: see --max-lora-rank")
    return value


def _number(file: Path, field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= abs(value) < 1e6:
        raise _refused(file, field, value, "it must be a number below 1e6")
    return float(value)


def _refused(file: Path, field: str, value: object, why: str) -> ModelError:
    return ModelError(f"{file}: `{field}` is {ascii(value)[:80]}, and {why}")
