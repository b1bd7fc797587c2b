"""Sampling parameters that a model's generation_config.json recommends, for requests that leave them out
(`--generation-config model`)."""

from pathlib import Path
from typing import Any

from text_generation_common.errors import ModelError
from text_generation_common.model_files import ModelFileError, find_json_object
from text_generation_common.models.values import Fields
from text_generation_router.errors import StartError

FILE = "generation_config.json"
MAX_TOP_K = 2**31 - 1


def read_defaults(folder: Path) -> dict[str, Any]:
    """The values of the folder's generation_config.json by the names of `Sampling`, none if it is missing. None of them
    is neutral. StartError for a wrong value."""
    try:
        fields = Fields(find_json_object(folder / FILE) or {}, str(folder / FILE))
        found: dict[str, Any] = {
            "do_sample": fields.flag("do_sample"),
            "temperature": fields.number("temperature", 0, 100, 1),
            "top_k": fields.whole("top_k", -1, MAX_TOP_K, 0),
            "top_p": fields.number("top_p", 0, 1, 1),
            "min_p": fields.number("min_p", 0, 1, 0),
            "typical_p": fields.number("typical_p", 1e-6, 1, 1),
            "repetition_penalty": fields.factor("repetition_penalty", 1),
        }
    except (ModelFileError, ModelError) as error:
        raise StartError(str(error)) from None
    if not found["temperature"]:  # the most likely tokens
        found |= {"do_sample": False, "temperature": 1}
    neutral = {"top_k": (-1, 0), "do_sample": (False,), "min_p": (0,)}
    return {name: value for name, value in found.items() if value not in neutral.get(name, (1,))}
