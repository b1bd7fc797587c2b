"""Reads tensors from safetensors files. The headers have been checked before, by `WeightHeaders`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from text_generation_common.errors import WeightsError
from text_generation_common.weights.headers import WeightHeaders

if TYPE_CHECKING:
    from torch import Tensor


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

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the whole tensor, or None if there is no tensor of this name. Reads no file."""
        return self._headers.shape(name)

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
