"""The tensors of one layer, as they are read from the files, after their types and shapes were checked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, float8_e4m3fn, uint8

from text_generation_common.errors import WeightsError

NAN_IN_F8 = 0x7F  # beside the sign


def broken(layer: str, why: str) -> WeightsError:
    return WeightsError(f"the quantized weights of {layer} are broken: {why}; download the model again")


@dataclass(frozen=True, slots=True)
class Layer:
    """Reads a tensor when it is asked for, by the first ending of its part (`layout.StoredPart`)."""

    name: str
    shape: tuple[int, ...]  # the weight's: [N, K], or [E, N, K] for experts
    names: Mapping[str, str]  # {first ending: the tensor's name}
    get: Callable[[str], Tensor] = field(repr=False)

    @property
    def outputs(self) -> int:
        return self.shape[-2]

    @property
    def inputs(self) -> int:
        return self.shape[-1]

    def __getitem__(self, ending: str) -> Tensor:
        return self.get(self.names[ending])

    def find(self, ending: str) -> Tensor | None:
        return self[ending] if ending in self.names else None

    def finite(self, ending: str) -> Tensor:
        """A tensor of scales. WeightsError if a number is NaN or infinite."""
        tensor = self[ending]
        if not _is_finite(tensor):
            raise broken(self.name, f"{self.names[ending]} has numbers that are not finite")
        return tensor


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype == float8_e4m3fn:  # has no infinity, and is slow to convert
        return bool((tensor.view(uint8) & NAN_IN_F8).amax() != NAN_IN_F8)
    if tensor.numel() == 0:
        return True
    # The ends are NaN if a number is, and torch finds them in a twentieth of the time that asking each number takes.
    return all(end.isfinite() for end in tensor.float().aminmax())
