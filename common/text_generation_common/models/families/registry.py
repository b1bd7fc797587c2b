"""The readers of all families, by the model_type of config.json."""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.values import Fields

P = ParamSpec("P")
Reader = Callable[Concatenate[Fields, P], ModelConfig]
FAMILIES: dict[str, Callable[[Fields], ModelConfig]] = {}


def family(model_type: str, **defaults: Any) -> Callable[[Reader[P]], Reader[P]]:
    """Enters a family's reader. `defaults`: the values that transformers has for fields that a file leaves out."""

    def enter(read: Reader[P]) -> Reader[P]:
        def reader(fields: Fields, /, *args: P.args, **kwargs: P.kwargs) -> ModelConfig:
            return read(fields.with_defaults(**defaults), *args, **kwargs)

        FAMILIES[model_type] = reader
        return reader

    return enter
