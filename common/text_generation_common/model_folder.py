"""Finds the folder of the demo model."""

from importlib.util import find_spec
from pathlib import Path

from text_generation_common.errors import ArgumentValidation


def demo_directory() -> Path:
    """The demo model's folder, found without importing the package that contains it, which would load torch."""
    spec = find_spec("text_generation_server")
    if spec is None or not spec.submodule_search_locations:
        raise ArgumentValidation("the demo model is not installed: pass --model-id")
    return Path(spec.submodule_search_locations[0]) / "demo_model"
