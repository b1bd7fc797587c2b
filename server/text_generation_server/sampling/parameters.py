"""How each row chooses its next token: one value per row and option, on the device."""

from dataclasses import dataclass

import torch

SMALLEST_DIVISOR = 1e-6


@dataclass(frozen=True, slots=True)
class Parameters:
    """One request's choice; the defaults are neutral. `greedy` takes the most likely token."""

    greedy: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    seed: int = 0
    watermark: bool = False
    top_n_tokens: int = 0

    @property
    def warps(self) -> bool:
        """Whether the tail of the distribution is cut, which needs a sort."""
        return self.top_k > 0 or self.top_p < 1.0 or self.typical_p < 1.0

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0


class RowParameters:
    """The same, for all rows, as tensors; what only picks a path through the sampler stays on the host."""

    def __init__(self, count: int, device: torch.device) -> None:
        def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        self.temperature = column(1.0)
        self.top_k = column(0, torch.int64)
        self.top_p = column(1.0)
        self.typical_p = column(1.0)
        self.repetition_penalty = column(1.0)
        self.frequency_penalty = column(0.0)
        self.seed = column(0, torch.int64)
        self.prompt_length = column(0, torch.int64)
        self.of_row = [Parameters()] * count

    def set(self, row: int, parameters: Parameters, prompt_length: int) -> None:
        self.of_row[row] = parameters
        # Below this the best token is certain already, and a division would end in infinities.
        self.temperature[row] = max(parameters.temperature, SMALLEST_DIVISOR)
        self.top_k[row] = parameters.top_k
        self.top_p[row] = parameters.top_p
        self.typical_p[row] = parameters.typical_p
        self.repetition_penalty[row] = max(parameters.repetition_penalty, SMALLEST_DIVISOR)
        self.frequency_penalty[row] = parameters.frequency_penalty
        # uint64 on the wire; the same 64 bits as a signed number.
        self.seed[row] = parameters.seed - (1 << 64) if parameters.seed >= 1 << 63 else parameters.seed
        self.prompt_length[row] = prompt_length
