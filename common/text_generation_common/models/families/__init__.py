"""The families of models that are served, a reader for each: what their config.json says. `names.py` has the names of
their tensors. `decoder.py` computes them all, and never sees a family's name.

A reader turns the fields of config.json into a `ModelConfig`. Defaults are those of transformers, which files rely on.
"""

from text_generation_common.models.families import gpt, llama
from text_generation_common.models.reading import FAMILIES

__all__ = ["FAMILIES", "gpt", "llama"]
