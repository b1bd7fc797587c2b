"""Sampling parameters that a model's generation_config.json recommends, for requests that leave them out
(`--generation-config model`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from text_generation_common.errors import ModelError
from text_generation_common.model_files import ModelFileError, find_json_object
from text_generation_common.models.values import Fields
from text_generation_common.sampling import WARPERS
from text_generation_router.errors import StartError
from text_generation_router.text.validation import AskedSampling

FILE = "generation_config.json"
MAX_TOP_K = 2**31 - 1
PENALTY = "repetition_penalty"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values by the names of `Sampling`. None of them is neutral."""

    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "SamplingDefaults":
        """The values of the folder's generation_config.json, none if it is missing. StartError for a wrong value."""
        try:
            fields = Fields(find_json_object(folder / FILE) or {}, str(folder / FILE))
            found: dict[str, Any] = {
                "do_sample": fields.flag("do_sample"),
                "temperature": fields.number("temperature", 0, 100, 1),
                "top_k": fields.whole("top_k", -1, MAX_TOP_K, 0),
                "top_p": fields.number("top_p", 0, 1, 1),
                "min_p": fields.number("min_p", 0, 1, 0),
                "typical_p": fields.number("typical_p", 0, 1, 1),
                PENALTY: fields.factor(PENALTY, 1),
            }
        except (ModelFileError, ModelError) as error:
            raise StartError(str(error)) from None
        if not found["temperature"]:  # the most likely tokens
            found |= {"do_sample": False, "temperature": 1}
        neutral = {"top_k": (-1, 0), "do_sample": (False,), "min_p": (0,), PENALTY: (1,), "temperature": (1,)}
        return cls({name: value for name, value in found.items() if value not in neutral.get(name, (0, 1))})

    def filled(self, asked: AskedSampling) -> AskedSampling:
        """The parameters of a request, with these values where it leaves the field out. A request for the most likely
        tokens, and natively one that asks for no sampling where the file does not either, takes the penalty only."""
        draws = asked.asks_for_sampling or ("do_sample" not in asked.stated and bool(self.values.get("do_sample")))
        usable = (*WARPERS, "do_sample", PENALTY) if draws and not asked.greedy else (PENALTY,)
        left_out = {name: self.values[name] for name in usable if name in self.values and name not in asked.stated}
        return replace(asked, values=replace(asked.values, **left_out))
