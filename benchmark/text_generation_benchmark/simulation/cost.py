"""What a step costs: seconds from what it carries. One formula, derived from a device or fitted to a log."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, each number for one of what its name says.

    Products read all weights once and compute each token, both at the same time: the slower of the two counts. Where
    `weights_s` and `product_s` are 0, as in a fitted model, the step is linear in what it carries.
    """

    constant_s: float
    weights_s: float  # to read them
    product_s: float  # of a token, be it a row's or a prompt's
    row_s: float  # that decodes
    kv_token_s: float  # that a row attends to
    prompt_token_s: float
    prompt_position_s: float  # that a prompt's token attends to

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
    """What the tokens start … end - 1 of a prompt attend to: each itself and those before it."""
    return (end * (end + 1) - start * (start + 1)) // 2


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model on a device."""

    name: str
    cost: StepCost
    slots: int  # of its KV cache
    overhead_s: float  # of a first token, outside the steps: HTTP, tokenizing, gRPC
    source: str  # where the numbers come from

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> "SimulatedModel":
        """ValueError if it is no such file."""
        try:
            values = json.loads(path.read_text())
            return cls(**(values | {"cost": StepCost(**values["cost"])}))
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not what --write-model writes: {error}") from None
