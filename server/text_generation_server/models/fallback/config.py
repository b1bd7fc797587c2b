"""What the shard needs to know of a model before transformers loads it, and which models are refused."""

import importlib.util
from dataclasses import dataclass
from typing import Any

from text_generation_common.errors import ModelError
from text_generation_common.flags.kinds import Dtype
from text_generation_common.models.config import text_fields
from text_generation_common.models.reading import (
    MAX_LAYERS,
    MAX_VOCABULARY,
    stored_dtype,
    token_ids,
)
from text_generation_common.models.rope_config import MAX_POSITIONS
from text_generation_common.models.served import (
    LAYER_KINDS,
    STATELESS_IF_ATTENTION,
    code_of_repository,
    needs_transformers,
)
from text_generation_common.models.values import Fields, is_whole, shown
from text_generation_common.quantized import served

# Kinds of rope whose angles depend on the longest text of a step: a request would change the others beside it.
BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class FallbackConfig:
    model_type: str
    vocab_size: int
    num_layers: int
    max_positions: int  # tokens of the longest sequence
    dtype: Dtype
    eos_token_ids: tuple[int, ...]
    model_class: Any  # transformers' class of the model
    values: Any  # transformers' own config
    is_within: bool = False  # whether it is the text model inside a model of texts and images
    option: str = ""  # the field of config.json that the server's own decoder lacks, of a type that it knows


def read_fallback_config(whole: Fields, generation: Fields) -> FallbackConfig | None:
    """The config of a model that transformers computes, from the contents of config.json and generation_config.json.
    None if transformers does not know the model's type. ModelError if the model cannot be served, or if transformers is
    not installed."""
    fields = text_fields(whole)
    model_type = fields.word("model_type")
    if importlib.util.find_spec("transformers") is None:
        raise needs_transformers(fields)
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        if fields.has("auto_map"):
            raise code_of_repository(fields)
        return None
    try:
        # transformers gets the tensors that have numbers, and must quantize nothing.
        raw = {name: value for name, value in fields.raw.items() if name not in served.FIELDS}
        values = CONFIG_MAPPING[model_type].from_dict(_with_infinities(raw))
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(values), None)
        unfit = refusal(values, model_class)
    except Exception as error:  # each config class has checks of its own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{fields.where}: transformers cannot read it: {reason}") from None
    if unfit is not None:
        raise ModelError(f"{fields.where}: model type {shown(model_type)} is not supported: {unfit}")
    own = Fields({"eos_token_id": getattr(values, "eos_token_id", None)}, fields.where)
    ids = {*token_ids(own, "eos_token_id"), *token_ids(generation, "eos_token_id")}
    return FallbackConfig(
        model_type=model_type,
        vocab_size=_size(fields, values, "vocab_size", MAX_VOCABULARY),
        num_layers=_size(fields, values, "num_hidden_layers", MAX_LAYERS),
        max_positions=_size(fields, values, "max_position_embeddings", MAX_POSITIONS),
        dtype=stored_dtype(fields),
        eos_token_ids=tuple(sorted(ids)),
        model_class=model_class,
        values=values,
        is_within=fields is not whole,
    )


def _with_infinities(value: Any) -> Any:
    """The content of a JSON file in which transformers has written Infinity and NaN as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_with_infinities(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {name: _with_infinities(item) for name, item in value.items()}


def check_ropes(config: FallbackConfig, max_total_tokens: int) -> None:
    """ModelError if a text of this length would change the angles of other texts."""
    parameters = getattr(config.values, "rope_parameters", None) or {}
    ropes = [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]
    for rope in ropes:
        limit = rope.get("original_max_position_embeddings") or config.max_positions
        if rope.get("rope_type") in BY_LENGTH and max_total_tokens > limit:
            raise ModelError(
                f"rope type {rope['rope_type']} of this {config.model_type} is not supported for texts longer than"
                f" {limit} tokens: choose --max-total-tokens {limit} or less"
            )


def refusal(values: Any, model_class: Any) -> str | None:
    """Why the model cannot be served, or None."""
    kinds = set(getattr(values, "layer_types", None) or []) - LAYER_KINDS
    has_states = getattr(model_class, "_is_stateful", False)
    reasons = {
        "transformers has no causal language model of this type": model_class is None or values.is_encoder_decoder,
        "it is more than a text model": values.get_text_config() is not values,
        "its layers keep a state for each text": has_states
        and (bool(kinds) or values.model_type not in STATELESS_IF_ATTENTION),
        f"its layers are of the kind {', '.join(sorted(map(str, kinds)))}": bool(kinds),
        "transformers does not declare that its attention can be replaced": not getattr(
            model_class, "_supports_attention_backend", False
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _size(fields: Fields, values: Any, name: str, most: int) -> int:
    size = getattr(values, name, None)
    if not is_whole(size, 1, most):
        raise ModelError(f"{fields.where}: {name} is {shown(str(size))}, and must be a whole number from 1 to {most}")
    return int(size)  # type: ignore[arg-type]
