"""The types of tensors in GGUF files, and their sizes."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type whose rows are blocks of `block` numbers with `bytes` bytes each."""

    name: str
    block: int
    bytes: int
    kept: int = 0  # bytes of a block in memory, if others than in files

    def row_bytes(self, numbers: int) -> int:
        return numbers // self.block * self.bytes

    def kept_bytes(self, numbers: int) -> int:
        """Bytes of a row in memory, as common `quantized/tensors/blocks.py` keeps it."""
        return numbers // self.block * (self.kept or self.bytes)


# By the number in files. Types of plain numbers have blocks of one.
TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84, 100),
    11: TensorType("Q3_K", 256, 110, 146),
    12: TensorType("Q4_K", 256, 144, 148),
    13: TensorType("Q5_K", 256, 176, 180),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136, 138),
    30: TensorType("BF16", 1, 2),
    39: TensorType("MXFP4", 32, 17),
}
# Types that are named in messages only.
REFUSED: Mapping[int, str] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
    41: "Q1_0",
}  # fmt: skip
BY_NAME: Mapping[str, TensorType] = {type.name: type for type in TYPES.values()}
# Types whose tensors are numbers, as in safetensors, and not codes.
DENSE: frozenset[str] = frozenset({"F32", "F16", "BF16"})
