"""Where a model's directory is, or how the hub is reached that has it; and the tensors of its safetensors files, whose
headers `WeightHeaders` has checked. Imports nothing of the hub's client, which takes a quarter of a second: a shard of
a local directory needs none of it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from text_generation_common.errors import WeightsError
from text_generation_common.model_files import is_hub_id, is_meant_as_path, local_folder
from text_generation_common.weights.headers import Stored, WeightHeaders

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LineStyle:
    """How progress is logged where there is no terminal."""

    every_s: float = 5.0
    has_fields: bool = False  # whether lines have fields with numbers, from which a launcher draws a bar


@dataclass(frozen=True, slots=True)
class HubAccess:
    override: Path | None = None  # TGI's WEIGHTS_CACHE_OVERRIDE: use this directory for any model id
    cache_dir: Path | None = None  # None: huggingface_hub's cache, which depends on HF_HOME and HUGGINGFACE_HUB_CACHE
    token: str | None = field(default=None, repr=False)  # None: huggingface_hub's token, from HF_TOKEN
    progress: LineStyle = field(default_factory=LineStyle)

    @property
    def cache(self) -> Path:
        from huggingface_hub import constants

        return (self.cache_dir or Path(constants.HF_HUB_CACHE)).expanduser()


def described(model_id: str, revision: str | None) -> str:
    return f"{model_id} (revision {revision})" if revision else model_id


def local_directory(model_id: str, access: HubAccess) -> Path | None:
    """The directory that `model_id` or the override names, or None if `model_id` is an id of the hub. WeightsError for
    other ids.
    """
    if access.override is not None:
        if (folder := local_folder(str(access.override))) is None:
            raise WeightsError(f"WEIGHTS_CACHE_OVERRIDE {access.override} is not a directory")
        return folder
    if folder := local_folder(model_id):
        return folder
    if is_meant_as_path(model_id):
        raise WeightsError(f"{model_id} is neither a directory nor a GGUF file")
    if not is_hub_id(model_id):
        raise WeightsError(f"{model_id!r} is neither a directory nor a model id like `name` or `owner/name`")
    return None


class SafetensorsFiles:
    """The tensors of a model directory. Files are opened when the first of their tensors is read.

    Names and their aliases can be read. The constructor raises WeightsError like `WeightHeaders.of`; reading raises it
    for a tensor that is missing. `bytes_read` counts the bytes of the tensors that were read.
    """

    def __init__(self, path: Path) -> None:
        self.bytes_read = 0
        self._path = path
        self._headers = WeightHeaders.of(path)
        self._handles: dict[Path, Any] = {}

    @property
    def names(self) -> list[str]:
        return self._headers.names

    def describe(self, name: str) -> Stored | None:
        """Type and shape of the whole tensor, or None if there is no tensor of this name. Reads no file."""
        return self._headers.describe(name)

    def get(self, name: str) -> "Tensor":
        """The whole tensor, on the CPU, in the file's type."""
        handle, stored_name = self._find(name)
        tensor: Tensor = handle.get_tensor(stored_name)
        self.bytes_read += tensor.nbytes
        return tensor

    def get_slice(self, name: str, dim: int, start: int, stop: int) -> "Tensor":
        """Reads `tensor[start:stop]` along `dim`, and only that part of the file. start ≤ stop ≤ the tensor's size."""
        handle, stored_name = self._find(name)
        part = handle.get_slice(stored_name)
        shape = part.get_shape()
        if not (0 <= dim < len(shape) and 0 <= start <= stop <= shape[dim]):
            raise WeightsError(f"{name} has shape {shape}: it has no slice {start}:{stop} along dimension {dim}")
        if (start, stop) == (0, shape[dim]):
            return self.get(name)
        tensor: Tensor = part[(slice(None),) * dim + (slice(start, stop),)]
        self.bytes_read += tensor.nbytes
        return tensor

    def _find(self, name: str) -> tuple[Any, str]:
        stored_name = self._headers.stored_name(name)
        file = self._headers.where.get(stored_name)
        if file is None:
            raise WeightsError(f"{self._path} has no tensor {name}: do its weights belong to its config.json?")
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                again = "delete it and download the model again"
                raise WeightsError(f"{file} is not a good safetensors file ({error}): {again}") from None
        return self._handles[file], stored_name
