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
        groups = self.starts.new_ones(self.count).cumsum(0, dtype=self.starts.dtype) - 1
        places = (self.starts + groups).div(self.run, rounding_mode="trunc")
        places = places.clamp(max=len(self.numbers) - 1)  # padding may lie behind the last number
        return self.numbers.float().index_select(0, places.flatten()).view(places.shape)


@dataclass(frozen=True, slots=True, eq=False)
class RunNumbers:
    """Numbers of which each belongs to several neighbouring groups of an output: group g has numbers[g // run]."""

    numbers: "Tensor"  # [N, ⌈G / run⌉]
    count: int  # G
    run: int

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.numbers.shape[:-1], self.count

    def float(self) -> "Tensor":
        return self.numbers.float().repeat_interleave(self.run, dim=-1)[..., : self.count]


Shared = SharedNumbers | RunNumbers


@dataclass(frozen=True, slots=True, eq=False)
class CodedScales:
    """Numbers of groups that are quantized themselves: table[code] * factor + offset. If the table is None, a code is
    its own number. Factors and offsets that are None have no effect."""

    codes: "Tensor"  # [N, G]: uint8; without a table also int8
    table: "Tensor | None"  # [256]: float32
    factors: Shared | None = None
    offsets: Shared | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    def float(self) -> "Tensor":
        scales = self.codes.float() if self.table is None else self.table[self.codes.int()]
        scales = scales if self.factors is None else scales * self.factors.float()
        return scales if self.offsets is None else scales + self.offsets.float()


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """What becomes of the codes q of a group of neighbouring inputs of one output: W = scales * (q - zeros), or with
    offsets W = scales * q - offsets. No value has both."""

    size: int  # inputs of a group; the last group of an output may have fewer
    scales: "Tensor | Shared | CodedScales"  # [N, G]: float32, bfloat16, float16 or float8_e8m0fnu
    # [N, G]: int8, of Int4 and Int8. None, without offsets: the middle for Int4 and Planes, 0 for all others.
    zeros: "Tensor | None" = None
    offsets: "Tensor | Shared | CodedScales | None" = None  # [N, G]: float32, bfloat16 or float16


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
class Planes:
    """Integers of 2, 5 or 6 bits, without a sign. Integers of 5 and 6 bits lie in two tensors. The middle is 2, 16
    or 32, half of the number of integers."""

    bits: int
    # uint8. 5 and 6 bits: [N, K / 2], the lower 4 bits in the order of Int4. 2 bits: [N, K / 4], input 4i + j in bits
    # 2j and 2j + 1 of byte i.
    q: "Tensor"
    # uint8. 6 bits: [N, K / 4], the upper 2 bits in the order of q of 2 bits. 5 bits: [N, K / 8], the upper bit of
    # input 8i + j in bit j of byte i. 2 bits: None.
    high: "Tensor | None"
    groups: Groups  # without zeros


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


Codes = Int8 | Int4 | Planes | Fp8 | Table4
Weight = Dense | Codes
