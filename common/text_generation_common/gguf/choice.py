"""Which of the GGUF files of a folder is its model."""

from collections.abc import Iterable
from pathlib import Path

from text_generation_common.file_names import ADAPTER_CONFIG, has_weights
from text_generation_common.gguf.container import PART

SUFFIX = ".gguf"
# Words in the names of other files: projections of images, and statistics for the choice of types.
NO_MODELS = ("mmproj", "imatrix")


def models_among(names: Iterable[str]) -> list[str]:
    """The names of models: of parts the first."""
    found = []
    for name in sorted(names):
        part = PART.fullmatch(name)
        if name.endswith(SUFFIX) and not any(word in name.lower() for word in NO_MODELS):
            found += [] if part is not None and int(part[2]) != 1 else [name]
    return found


def model_in(folder: Path) -> Path:
    """The folder's only GGUF file, or the folder itself if it has other weights, is an adapter, or has several such
    files."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        return folder
    models = models_among(names)
    if len(models) != 1 or has_weights(names) or ADAPTER_CONFIG in names:
        return folder
    return folder / models[0]
