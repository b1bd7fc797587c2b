"""The cost of a step: seconds, from what the step carries. One formula, derived from a device or fitted to a log."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step. Each field is the cost of one unit of what its name says.

    A step reads all weights once and computes its tokens at the same time, so the slower of the two counts. In a
    fitted model `weights_s` and `product_s` are 0: its cost is linear in what the step carries.
    """

    constant_s: float
    weights_s: float  # reading all weights
    product_s: float  # the matrix products of one token, of a row or of a prompt
    row_s: float  # one decoding row
    kv_token_s: float  # one token that a row attends to
    prompt_token_s: float
    prompt_position_s: float  # one position that a token of a prompt attends to

    def seconds(self, rows: int, kv_tokens: int, prompt_tokens: int = 0, prompt_positions: int = 0) -> float:
        products = self.product_s * (rows + prompt_tokens)
        return (
            self.constant_s
            + (products if products > self.weights_s else self.weights_s)
            + self.row_s * rows
            + self.kv_token_s * kv_tokens
            + self.prompt_token_s * prompt_tokens
            + self.prompt_position_s * prompt_positions
        )


def positions(start: int, end: int) -> int:
    """Positions that tokens start … end - 1 of a prompt attend to, in all: each token to itself and all before it."""
    return (end * (end + 1) - start * (start + 1)) // 2


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model on a device."""

    name: str
    cost: StepCost
    slots: int  # token slots of its KV cache
    overhead_s: float  # seconds until a first token outside the steps: HTTP, tokenizing, gRPC
    source: str  # where the numbers come from

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> "SimulatedModel":
        """ValueError unless `write` wrote the file."""
        try:
            values = json.loads(path.read_text())
            return cls(**(values | {"cost": StepCost(**values["cost"])}))
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not what --write-model writes: {error}") from None
