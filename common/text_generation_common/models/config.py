"""Reads config.json and generation_config.json of a model of one of our families, without torch or transformers."""

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from text_generation_common.errors import ModelError, WeightsError
from text_generation_common.model_files import ModelFileError, find_json_object, read_json_object
from text_generation_common.models.architecture import AttentionRule, ModelConfig
from text_generation_common.models.families import FAMILIES
from text_generation_common.models.fields import unknown_fields
from text_generation_common.models.gguf_names import in_gguf
from text_generation_common.models.reading import token_ids
from text_generation_common.models.rope_config import MAX_FACTOR, MAX_POSITIONS, Rope, RopeScaling
from text_generation_common.models.values import Fields, shown
from text_generation_common.quantized import served

# Models of texts and images whose text model is served: requests are texts, so the other parts are not loaded. By the
# model_type of config.json, that of text_config where it does not say its own. These models compute a text
# without images as their text model alone would.
MULTIMODAL: Mapping[str, str] = {
    "aya_vision": "cohere2",
    "gemma3": "gemma3_text",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
}


# Fields that may stand beside text_config, and say something about the text model.
SHARED = ("compression_config", "dtype", "eos_token_id", "quantization_config", "torch_dtype")
# Sizes that transformers leaves out of text_config where they are its defaults.
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
DEFAULT_SIZES: Mapping[str, tuple[int, ...]] = {
    "gemma3_text": (2304, 9216, 8, 26, 262208),
    "llama": (4096, 11008, 32, 32, 32000),
    "mistral": (4096, 14336, 32, 32, 32000),
    "qwen2": (4096, 22016, 32, 32, 151936),
}


def text_fields(fields: Fields) -> Fields:
    """The fields of a text model: text_config, if config.json is that of a model of texts and images."""
    model_type = fields.raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in MULTIMODAL:
        return fields
    inner = fields.inner("text_config")
    if not inner.raw and any(fields.has(name) for name in SIZES[:-1]):  # vocab_size may stand beside a text_config
        raise ModelError(
            f"{fields.where} has no field text_config, and the text model's sizes stand in its place: the file is in"
            f" the form of the model's authors, which is not supported: choose a {model_type} that transformers reads"
        )
    shared: dict[str, Any] = {name: fields.raw[name] for name in SHARED if fields.has(name)}
    if fields.flag("tie_word_embeddings"):
        shared["tie_word_embeddings"] = True
    text = Fields({**inner.raw, **shared}, inner.where).with_defaults(model_type=MULTIMODAL[model_type])
    sizes = DEFAULT_SIZES.get(str(text.raw["model_type"]), ())
    return text.with_defaults(**dict(zip(SIZES, sizes, strict=False)))


# Ends of the names of models that give scores, spans or vectors for a text, not its next token.
OTHER_TASKS = (
    "ForMaskedLM", "ForMultipleChoice", "ForNextSentencePrediction", "ForPreTraining", "ForQuestionAnswering",
    "ForRewardModel", "ForRewardModeling", "ForSequenceClassification", "ForTextEncoding", "ForTokenClassification",
    "RewardModel",
)  # fmt: skip


def read_config(path: Path, rope_scaling: str | None = None, rope_factor: float | None = None) -> ModelConfig:
    """Reads the config of a model directory, of one of our families. The launcher's flags `rope_scaling` and
    `rope_factor` override the file. Raises ModelError, whose text of one line names the field that is missing, wrong or
    not supported.
    """
    fields, generation = config_fields(path)
    fields = text_fields(fields)
    model_type = fields.word("model_type")
    if model_type not in FAMILIES:
        raise unknown_type(fields)
    if reason := served.refusal(path, fields.raw):
        raise ModelError(reason)
    fields.note(*served.FIELDS)  # read by `quantized_layers.py`
    config = FAMILIES[model_type](fields)
    ids = {*config.eos_token_ids, *token_ids(generation, "eos_token_id")}
    unknown = unknown_fields(fields, model_type, config)
    config = replace(config, eos_token_ids=tuple(sorted(ids)), unknown_fields=unknown)
    return in_gguf(path, _stretched(config, rope_scaling, rope_factor))


def config_fields(path: Path) -> tuple[Fields, Fields]:
    """The contents of config.json and of generation_config.json, which may be missing. ModelError for a model of
    another task."""
    file, generation_file = path / "config.json", path / "generation_config.json"
    try:
        raw, raw_generation = read_json_object(file), find_json_object(generation_file) or {}
    except (ModelFileError, WeightsError) as error:
        raise ModelError(str(error)) from None
    fields = Fields(raw, str(file))
    _refuse_other_tasks(fields)
    return fields, Fields(raw_generation, str(generation_file))


def _refuse_other_tasks(fields: Fields) -> None:
    """ModelError if the model was made for another task than generating text. Its type alone does not say."""
    named = fields.raw.get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    if names and all(name.endswith(OTHER_TASKS) for name in names):
        raise ModelError(
            f"{fields.where}: architectures is {shown(names[0])}, a model for another task than generating text: choose"
            " a causal language model"
        )


def unknown_type(fields: Fields) -> ModelError:
    """The error for a model of a type that is not served, with the types that are."""
    model_type = fields.word("model_type")
    served = sorted({*FAMILIES, *MULTIMODAL})
    near = get_close_matches(model_type.lower().replace("-", "_"), served, n=1)
    meant = f"did you mean {near[0]}? Choose" if near else "choose"
    return ModelError(
        f"{fields.where}: model type {shown(model_type)} is not supported: {meant} a model of one of these types:"
        f" {', '.join(served)}"
    )


def _stretched(config: ModelConfig, flag_kind: str | None, flag_factor: float | None) -> ModelConfig:
    """The config with the rope scaling of the flags or the file, and the longest sequence that it allows. Until then
    `max_positions` is max_position_embeddings."""
    scaling: RopeScaling | None = None
    if flag_kind or flag_factor is not None:
        factor = 1.0 if flag_factor is None else flag_factor
        if not 1 <= factor <= MAX_FACTOR:
            raise ModelError(f"--rope-factor {factor:g} is not supported: it must be from 1 to {MAX_FACTOR:g}")
        scaling = RopeScaling(flag_kind or "linear", factor)
        if not config.ropes:
            raise ModelError(f"--rope-scaling and --rope-factor have no effect on a {config.model_type}: remove them")
        if len(config.ropes) > 1:
            raise ModelError(
                f"--rope-scaling and --rope-factor are not supported for a {config.model_type}, whose layers have"
                " different ropes: remove them"
            )
    rules = tuple(_with_scaling(rule, scaling) for rule in config.rules)
    config = replace(config, rules=rules)
    longest = max([config.max_positions, *(_longest(rope, flagged=scaling is not None) for rope in config.ropes)])
    if longest > MAX_POSITIONS:
        raise ModelError(f"rope scaling makes sequences of {longest} tokens: the most is {MAX_POSITIONS}")
    return replace(config, max_positions=longest)


def _with_scaling(rule: AttentionRule, scaling: RopeScaling | None) -> AttentionRule:
    if scaling is None or rule.rope is None:
        return rule
    return replace(rule, rope=replace(rule.rope, scaling=scaling))


def _longest(rope: Rope, flagged: bool) -> int:
    """The longest sequence that this scaling allows, or 0 where max_position_embeddings says it."""
    if rope.scaling.kind == "yarn":
        return round(rope.scaling.original_max_positions * rope.scaling.factor)
    if rope.scaling.kind == "dynamic" or flagged:
        return round(rope.base_positions * rope.scaling.factor)
    return 0
