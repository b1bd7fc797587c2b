"""The forms in which a weight W is kept. Every format of files is converted to one of these when it is loaded, so that
kernels know these forms only.

Legend: N outputs, K inputs, G groups of inputs. All tensors of two dimensions are [N, numbers of an output]; those of
several experts' weights have a further dimension in front.

Scales and offsets keep the type of the files. They are converted to float32, which is exact, before they are used. W is
what the formulas give in float32, with one rounding after each operation, in the order that is written.

Scales that a file has once for several outputs, or as codes, stay so. `float` makes float32 [N, G] of scales in every
form, for a kernel that has no product for the form.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """W itself."""

    values: "Tensor"  # [N, K]: float32, bfloat16 or float16


@dataclass(frozen=True, slots=True, eq=False)
class SharedNumbers:
    """Numbers of groups, each of which belongs to several groups or outputs. Group g of output n has
    numbers[(starts[n] + g) // run]."""

    numbers: "Tensor"  # [any number]
    starts: "Tensor"  # [N, 1]: int32
    count: int  # G
    run: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.starts.shape[:-1], self.count

    def float(self) -> "Tensor":
        places = (self.starts + self.starts.new_ones(self.count).cumsum(0) - 1) // self.run
        return self.numbers.float()[places.clamp(max=len(self.numbers) - 1)]  # padding may lie behind the last number


@dataclass(frozen=True, slots=True, eq=False)
class CodedScales:
    """Scales that are quantized themselves: table[code] * factor + offset. Factors and offsets that are None have no
    effect."""

    codes: "Tensor"  # [N, G]: uint8
    table: "Tensor"  # [256]: float32
    factors: SharedNumbers | None = None
    offsets: SharedNumbers | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    def float(self) -> "Tensor":
        scales = self.table[self.codes.int()]
        scales = scales if self.factors is None else scales * self.factors.float()
        return scales if self.offsets is None else scales + self.offsets.float()


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """What becomes of the codes q of a group of neighbouring inputs of one output: W = scales * (q - zeros), or with
    offsets W = scales * q - offsets. No value has both."""

    size: int  # inputs of a group; the last group of an output may have fewer
    # [N, G]: float32, bfloat16, float16 or float8_e8m0fnu. Int4 and Int8 have tensors.
    scales: "Tensor | SharedNumbers | CodedScales"
    zeros: "Tensor | None" = None  # [N, G]: int8. None, without offsets: 8 for Int4, 0 for all others
    offsets: "Tensor | None" = None  # [N, G]: float32, bfloat16 or float16


@dataclass(frozen=True, slots=True, eq=False)
class Int8:
    """Integers of 8 bits. Where a format has unsigned ones, q and zeros are smaller than these by 128."""

    q: "Tensor"  # [N, K]: int8
    groups: Groups
    order: "Tensor | None" = None  # as in Int4


@dataclass(frozen=True, slots=True, eq=False)
class Int4:
    """Integers 0 … 15. Where a format has -8 … 7, q is larger than these by 8, which is the zero point then."""

    q: "Tensor"  # [N, K / 2]: uint8. Input 2i is in the lower half of byte i, and input 2i + 1 in the upper half
    groups: Groups
    # [K]: int32: the layer's input that column k of W multiplies, where inputs of a group are not neighbours in the
    # files. None: input k.
    order: "Tensor | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class Fp8:
    """Numbers of 8 bits."""

    q: "Tensor"  # [N, K]: float8_e4m3fn
    groups: Groups  # without zeros and offsets


@dataclass(frozen=True, slots=True, eq=False)
class Table4:
    """Numbers of a table of 16, such as nf4, MXFP4 and IQ4_NL: W = scales * table[q]."""

    q: "Tensor"  # [N, K / 2]: uint8, in the order of Int4
    groups: Groups  # without zeros and offsets
    table: "Tensor"  # [16]: float32


Codes = Int8 | Int4 | Fp8 | Table4
Weight = Dense | Codes
