"""What weights take in memory, by their form. Counted from sizes alone, before any weight is read."""

from dataclasses import dataclass

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class CodeSize:
    """Codes of some bits, and what belongs to each group of them, such as a scale and a zero point."""

    bits: int
    group_bytes: int = SCALE_BYTES
    group: int | None = None  # inputs of a group; None: all inputs of an output

    def bytes_of(self, outputs: int, inputs: int) -> int:
        groups = 1 if self.group is None else -(-inputs // self.group)
        return outputs * (-(-inputs * self.bits // 8) + groups * self.group_bytes)


INT8 = CodeSize(8)  # what --quantize int8 makes
