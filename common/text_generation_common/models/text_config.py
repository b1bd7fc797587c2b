"""The text model inside a model of texts and images. Requests are texts, so the other parts of such a model are not
loaded."""

from collections.abc import Mapping
from typing import Any

from text_generation_common.errors import ModelError
from text_generation_common.model_types import MULTIMODAL
from text_generation_common.models.values import Fields

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
