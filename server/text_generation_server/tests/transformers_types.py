"""What the installed transformers knows of model types: why the shard refuses a type, and the fields of our families.
Run as a script, writes the two lists that are read before anything is downloaded or started:

    python server/text_generation_server/tests/transformers_types.py

Imports most of transformers, which takes half a minute."""

from pathlib import Path
from typing import Any

import text_generation_common
from text_generation_common.models.families import FAMILIES
from text_generation_server.models.fallback.config import refusal

FOLDER = Path(text_generation_common.__file__).parent / "models"
REFUSED, OF_FAMILIES = FOLDER / "refused_types.txt", FOLDER / "family_fields.txt"


def refused_types() -> dict[str, str]:
    """{model type: reason}, for types whose default config is refused. A type whose config has no default is left to
    the shard."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = {}
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            values = CONFIG_MAPPING[model_type]()
            reason = refusal(values, MODEL_FOR_CAUSAL_LM_MAPPING.get(type(values), None))
        except Exception:  # each config class has checks of its own
            continue
        if reason is not None:
            found[model_type] = reason
    return found


def fields_of_families() -> dict[str, list[str]]:
    """{family: names of the fields that transformers' config class of this type has}."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return {name: _names(CONFIG_MAPPING[name]()) for name in sorted(FAMILIES)}


def _names(config: Any) -> list[str]:
    return sorted(name for name in {*config.to_dict(), *config.attribute_map} if name.isidentifier())


def refused_text() -> str:
    return "".join(f"{name}: {reason}\n" for name, reason in refused_types().items())


def fields_text() -> str:
    return "".join(f"{name}: {' '.join(names)}\n" for name, names in fields_of_families().items())


def main() -> None:
    REFUSED.write_text(refused_text())
    OF_FAMILIES.write_text(fields_text())


if __name__ == "__main__":
    main()
