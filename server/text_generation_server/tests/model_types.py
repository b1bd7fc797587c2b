"""What the server does with a model type: its own decoder computes it, transformers does, or it is refused."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fallback_checkpoints import MODELS

from text_generation_common.errors import ModelError
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.config import MULTIMODAL
from text_generation_common.models.families import FAMILIES
from text_generation_server.models import read_any_config

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

Raw = Mapping[str, Any]
NATIVE, FALLBACK, REFUSED = "native", "fallback", "refused"
OWN_CODE = {"auto_map": {"AutoConfig": "configuration.Config"}}
# The models that text-generation-inference 3.3 lists (huggingface.co/docs/text-generation-inference/supported_models),
# and what decides here in the config.json of the files that its list links to.
TGI: Mapping[str, Raw] = TABLES["tgi"]
# Forms in which models of served types are refused.
FORMS: Mapping[str, Raw] = {
    "code of its own (`auto_map`), of a type that transformers does not have": {"model_type": "chatglm", **OWN_CODE},
    "experts in fp8": {
        "model_type": "deepseek_v3",
        "n_routed_experts": 256,
        "quantization_config": {"quant_method": "fp8"},
    },
    "weights quantized by AQLM": {"model_type": "bloom", "quantization_config": {"quant_method": "aqlm"}},
    "a classifier": {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
}
# transformers has no layer with a convolution in the default of these types, and every file has some.
CONVOLUTIONS: Raw = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}


@dataclass(frozen=True, slots=True)
class Standing:
    kind: str  # NATIVE, FALLBACK or REFUSED
    reason: str = ""  # the line that a user sees, without the folder's name


def standing(raw: Raw, beside: Mapping[str, Raw] | None = None) -> Standing:
    """What the server does with a model whose config.json has these fields. `beside`: other files of its folder."""
    if raw["model_type"] in FAMILIES and len(raw) == 1:
        return Standing(NATIVE)  # a family's fields, sizes above all, have no defaults
    with TemporaryDirectory() as folder:
        for name, content in {"config.json": raw, **(beside or {})}.items():
            (Path(folder) / name).write_text(json.dumps(content))
        try:
            config = read_any_config(Path(folder))
        except ModelError as refusal:
            return Standing(REFUSED, _shortened(str(refusal).replace(f"{folder}/", "")))
    return Standing(NATIVE if isinstance(config, ModelConfig) else FALLBACK)


@cache
def published() -> tuple[Raw, ...]:
    """Models with a config.json that a public repository has, with the outcome that is expected."""
    lines = Path(__file__).with_name("published_configs.jsonl").read_text().splitlines()
    return tuple(map(json.loads, lines))


def _shortened(line: str) -> str:
    return line.partition(", only: ")[0]  # followed by the names of all families


def further_native() -> list[str]:
    """Families, and models with a text model of a family inside, that are not on the list TGI."""
    return sorted((FAMILIES.keys() | MULTIMODAL.keys()) - _served_of_tgi())


def further_compared() -> list[str]:
    """Types that transformers computes and that tests compare, and that are not on the list TGI."""
    return sorted(MODELS.keys() - FAMILIES.keys() - _served_of_tgi())


def others() -> dict[str, Standing]:
    """All other types of which transformers has a causal language model. Imports most of transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = {*FAMILIES, *MULTIMODAL, *MODELS, *(raw["model_type"] for raw in TGI.values())}
    found = {}
    for model_type in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - named):
        found[model_type] = standing({"model_type": model_type} | (CONVOLUTIONS if "lfm2" in model_type else {}))
    return found


@cache
def _served_of_tgi() -> frozenset[str]:
    return frozenset(raw["model_type"] for raw in TGI.values() if standing(raw).kind != REFUSED)
