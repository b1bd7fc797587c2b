"""Products by weights of 4 and 8 bits, whose codes are unpacked within the kernel:

    y[m, n] = factor * Σ_g (scale[n, g] Σ_k x[m, k] code[n, k] - shift[n, g] Σ_k x[m, k]) + bias[n]      k in group g

Activations keep their type. Inputs are split over programs, so that a narrow layer keeps the whole device busy. A
second kernel adds the splits' sums, which are float32, in their order. Where a layer is split depends on its shape
alone, and all rows are computed alike: a row's result does not depend on other rows.

From WIDE_ROWS rows on, W is made in x's type in each step and cuBLAS multiplies, because a product of many rows takes
longer than reading its weights. So it is for all numbers of rows in float32, for which the kernel would need more
registers than there are.
"""

from collections.abc import Callable
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from text_generation_common.quantized.tensors.matrix import in_bytes, order_of, zero_of
from text_generation_common.quantized.tensors.splits import size_of
from text_generation_common.quantized.values import Codes, Fp8, Int4, Int8, Planes, Table4
from text_generation_server.kernels.products import TorchLinear
from text_generation_server.kernels.triton.tiles import INTERPRETED, unpack
from text_generation_server.kernels.triton.tuning import gpu_of

WIDE_ROWS = 128
TILE_M, TILE_N, TILE_K = 16, 64, 128  # rows, outputs and inputs of a program at a time; a tl.dot has 16 rows at least
MIN_K = 64  # sums of groups of a multiple of this many inputs are scaled; of other groups, each weight
WARPS = 4
STAGES = {1: 3, 2: 4}  # by the number of codes in a byte: other numbers make more registers spill
PROGRAMS = 1024  # number of programs that a large GPU runs at a time
MIN_STEPS = 4  # minimum number of times that a program takes inputs, if a layer is split
COLUMNS = 256  # outputs of a program that adds splits
FIRST_WITH_FP8 = 89  # compute capability 8.9

# Four bytes become the codes of their lower and of their upper halves, less 8. A code is put into the last bits of a
# number whose last bit counts 1 (128 in bfloat16, 1024 in float16); then this number and 8 are subtracted.
UNPACK_HALVES = """
{{
    .reg .b32 low, high, one, bias;
    and.b32 low, $4, 0x0F0F0F0F;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0F0F0F0F;
    mov.b32 one, {one};
    mov.b32 bias, {bias};
    prmt.b32 $0, low, {number}, 0x4140;
    prmt.b32 $1, low, {number}, 0x4342;
    prmt.b32 $2, high, {number}, 0x4140;
    prmt.b32 $3, high, {number}, 0x4342;
    fma.rn.{kind} $0, $0, one, bias;
    fma.rn.{kind} $1, $1, one, bias;
    fma.rn.{kind} $2, $2, one, bias;
    fma.rn.{kind} $3, $3, one, bias;
}}
"""
IN_BFLOAT16 = UNPACK_HALVES.format(kind="bf16x2", number="0x43434343", one="0x3F803F80", bias="0xC308C308")
IN_FLOAT16 = UNPACK_HALVES.format(kind="f16x2", number="0x64646464", one="0x3C003C00", bias="0xE408E408")
UNPACK_BFLOAT16, UNPACK_FLOAT16 = tl.constexpr(IN_BFLOAT16), tl.constexpr(IN_FLOAT16)


class UnpackingLinear:
    """`Kernels.linear` for weights in codes, of which `can_multiply` must be true."""

    def __init__(
        self,
        weight: Codes,
        bias: Tensor | None,
        *,
        gated: bool,
        y_type: torch.dtype,
        factor: float,
        silu_mul: Callable[[Tensor], Tensor],
    ) -> None:
        weight = in_bytes(weight) if isinstance(weight, Planes) else weight
        self._outputs, inputs = size_of(weight)
        self._columns = self._outputs // 2 if gated else self._outputs
        self._bias, self._y_type, self._factor, self._gated = bias, y_type, factor, gated
        self._codes = arguments_of(weight)
        self._order = order_of(weight)
        self._wide = TorchLinear(WideCodes(self._codes, self._order), bias, y_type, factor, silu_mul if gated else None)
        steps = triton.cdiv(inputs, self._codes["K"])
        splits = max(1, min(steps // MIN_STEPS, PROGRAMS // triton.cdiv(self._outputs, TILE_N)))
        self._steps = triton.cdiv(steps, splits)
        self._splits = triton.cdiv(steps, self._steps)

    def __call__(self, x: Tensor, out: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        if rows >= WIDE_ROWS or x.dtype == torch.float32:
            return self._wide(x, out, addend)
        parts = torch.empty((self._splits, rows, self._outputs), dtype=torch.float32, device=x.device)
        _multiply_codes[(triton.cdiv(rows, TILE_M), triton.cdiv(self._outputs, TILE_N), self._splits)](
            x.contiguous(), self._order, parts=parts, rows=rows, STEPS=self._steps, M=TILE_M, N=TILE_N,
            num_warps=WARPS, num_stages=STAGES[self._codes["CODES"]], **self._codes,
        )  # fmt: skip
        y = torch.empty((rows, self._columns), dtype=self._y_type, device=x.device) if out is None else out
        assert y.stride(1) == 1 and (addend is None or addend.stride(1) == 1)
        _add_splits[(rows, triton.cdiv(self._columns, COLUMNS))](
            parts, self._bias, addend, out=y, rows=rows, addend_stride=0 if addend is None else addend.stride(0),
            stride=y.stride(0), factor=self._factor, SPLITS=self._splits, OUTPUTS=self._outputs, GATED=self._gated,
            COLUMNS=COLUMNS,
        )  # fmt: skip
        return y


class WideCodes:
    """x Wᵀ + b, for which W is made in x's type."""

    def __init__(self, codes: dict[str, Any], order: Tensor | None) -> None:
        self._codes, self._order = codes, order

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        outputs, inputs = self._codes["OUTPUTS"], self._codes["INPUTS"]
        w = torch.empty((outputs, inputs), dtype=x.dtype, device=x.device)
        # Without fusion, each operation of W's formula is rounded by itself, as it is defined.
        _widen_codes[(triton.cdiv(outputs, TILE_N), triton.cdiv(inputs, self._codes["K"]))](
            out=w, N=TILE_N, num_warps=WARPS, enable_fp_fusion=False, **self._codes
        )
        return F.linear(x if self._order is None else x.index_select(1, self._order), w, bias)


def can_multiply(weight: Codes) -> bool:
    """Whether the two codes of a byte are always in one group."""
    return isinstance(weight, Int8 | Fp8 | Planes) or weight.groups.scales.shape[1] == 1 or weight.groups.size % 2 == 0


def arguments_of(weight: Codes) -> dict[str, Any]:
    """What the kernels are given of a weight. Groups have a size of which K is a part, or which is a part of K: others
    are cut into pieces with the same scale."""
    groups, (outputs, inputs), q = weight.groups, size_of(weight), weight.q
    if isinstance(weight, Fp8) and 0 < gpu_of(q.device).capability < FIRST_WITH_FP8:
        q = q.view(torch.uint8)
    if groups.scales.shape[1] == 1:
        size, k = triton.cdiv(inputs, TILE_K) * TILE_K, TILE_K
    elif groups.size % MIN_K == 0:
        size, k = groups.size, gcd(groups.size, TILE_K)
    else:
        size, k = gcd(groups.size, TILE_K), TILE_K
    count = triton.cdiv(inputs, size)

    def of_pieces(numbers: Tensor) -> Tensor:
        if count > numbers.shape[1]:
            numbers = numbers.repeat_interleave(groups.size // size, dim=1)[:, :count]
        return numbers.contiguous()

    scales = groups.scales
    if not isinstance(scales, Tensor) or scales.dtype == torch.float8_e8m0fnu:
        scales = scales.float()
    shifts = groups.zeros if groups.offsets is None else groups.offsets
    return {
        "q": q.contiguous(),
        "scales": of_pieces(scales),
        "shifts": None if shifts is None else of_pieces(shifts if isinstance(shifts, Tensor) else shifts.float()),
        "table": weight.table if isinstance(weight, Table4) else None,
        "OUTPUTS": outputs, "INPUTS": inputs, "SIZE": size, "K": k,
        "CODES": 2 if isinstance(weight, Int4 | Table4) else 1,
        "MIDDLE": zero_of(weight),
        "HAS_OFFSETS": groups.offsets is not None,
    }  # fmt: skip


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["x"])
def _multiply_codes(
    x, order, q, scales, shifts, table, parts, rows,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SIZE: tl.constexpr, CODES: tl.constexpr, MIDDLE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, STEPS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A program: the sums of M rows and N outputs over one split of the inputs."""
    T: tl.constexpr = x.dtype.element_ty
    GROUPS: tl.constexpr = (INPUTS + SIZE - 1) // SIZE
    m = tl.program_id(0) * M + tl.arange(0, M)
    n = tl.program_id(1) * N + tl.arange(0, N)
    split = tl.program_id(2)
    # Rows and outputs behind the last are read as the last, and not stored.
    x_M = x + tl.minimum(m, rows - 1).to(tl.int64) * INPUTS
    at_N = tl.minimum(n, OUTPUTS - 1).to(tl.int64)
    ones_BN = tl.full([K // CODES, N], 1.0, T)
    sum_MN = tl.zeros([M, N], tl.float32)
    for start in range(split * STEPS * K, tl.minimum((split + 1) * STEPS * K, INPUTS), K):
        first_MB, second_MB = _load_inputs(x_M, order, start, INPUTS, CODES, K=K)
        first_BN, second_BN = _load_codes(q, table, at_N, start, INPUTS, CODES=CODES, K=K, T=T)
        if SIZE % K == 0:
            group_N = at_N * GROUPS + start // SIZE
            scale_N = tl.load(scales + group_N).to(tl.float32)
            sum_MN += scale_N[None, :] * _dots(first_MB, second_MB, first_BN.to(T), second_BN.to(T), CODES)
            if shifts is not None:
                shift_N = tl.load(shifts + group_N).to(tl.float32)
                shift_N = shift_N - scale_N * MIDDLE if HAS_OFFSETS else scale_N * (shift_N - MIDDLE)
                sum_MN -= shift_N[None, :] * _dots(first_MB, second_MB, ones_BN, ones_BN, CODES)
        else:
            first_BN, second_BN = _scaled(
                first_BN, second_BN, scales, shifts, at_N, start=start, SIZE=SIZE, GROUPS=GROUPS, CODES=CODES,
                MIDDLE=MIDDLE, HAS_OFFSETS=HAS_OFFSETS, K=K,
            )  # fmt: skip
            sum_MN += _dots(first_MB, second_MB, first_BN.to(T), second_BN.to(T), CODES)
    place_M = (split * rows + m).to(tl.int64) * OUTPUTS
    tl.store(parts + place_M[:, None] + n[None, :], sum_MN, mask=(m < rows)[:, None] & (n < OUTPUTS)[None, :])


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["addend", "out"])
def _add_splits(
    parts, bias, addend, out, rows, addend_stride, stride, factor,
    SPLITS: tl.constexpr, OUTPUTS: tl.constexpr, GATED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program: COLUMNS results of a row."""
    WIDTH: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    y = _total(parts, bias, addend, row, rows, n=n, end=WIDTH, addend_stride=addend_stride, factor=factor,
               SPLITS=SPLITS, OUTPUTS=OUTPUTS)  # fmt: skip
    if GATED:
        up = _total(parts, bias, addend, row, rows, n=WIDTH + n, end=OUTPUTS, addend_stride=addend_stride,
                    factor=factor, SPLITS=SPLITS, OUTPUTS=OUTPUTS)  # fmt: skip
        y = y / (1.0 + tl.exp(-y)) * up
    tl.store(out + row * stride + n, y.to(out.dtype.element_ty), mask=n < WIDTH)


@triton.jit
def _total(
    parts, bias, addend, row, rows, n, end, addend_stride, factor, SPLITS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([n.shape[0]], tl.float32)
    for split in range(SPLITS):
        total += tl.load(parts + (split * rows + row) * OUTPUTS + n, mask=n < end, other=0.0)
    total *= factor
    if addend is not None:
        total += tl.load(addend + row * addend_stride + n, mask=n < end, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + n, mask=n < end, other=0.0).to(tl.float32)
    return total


@triton.jit
def _widen_codes(
    q, scales, shifts, table, out,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SIZE: tl.constexpr, CODES: tl.constexpr, MIDDLE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A program: K weights of N outputs."""
    T: tl.constexpr = out.dtype.element_ty
    GROUPS: tl.constexpr = (INPUTS + SIZE - 1) // SIZE
    n = tl.program_id(0) * N + tl.arange(0, N)
    start = tl.program_id(1) * K
    at_N = tl.minimum(n, OUTPUTS - 1).to(tl.int64)
    first_BN, second_BN = _load_codes(q, table, at_N, start, INPUTS, CODES=CODES, K=K, T=T)
    first_BN, second_BN = _scaled(
        first_BN, second_BN, scales, shifts, at_N, start=start, SIZE=SIZE, GROUPS=GROUPS, CODES=CODES, MIDDLE=MIDDLE,
        HAS_OFFSETS=HAS_OFFSETS, K=K,
    )  # fmt: skip
    k_B = start + CODES * tl.arange(0, K // CODES)
    place_BN = out + at_N[None, :] * INPUTS + k_B[:, None]
    mask_BN = (k_B < INPUTS)[:, None] & (n < OUTPUTS)[None, :]
    tl.store(place_BN, first_BN.to(T), mask=mask_BN)
    if CODES == 2:
        tl.store(place_BN + 1, second_BN.to(T), mask=mask_BN)


@triton.jit
def _load_inputs(x_M, order, start, INPUTS: tl.constexpr, CODES: tl.constexpr, K: tl.constexpr):
    """The inputs of M rows that the first codes of some bytes multiply, and those of the second codes."""
    k_B = start + CODES * tl.arange(0, K // CODES)
    inside_B = (k_B < INPUTS) | (INPUTS % K == 0)
    first_B = k_B
    second_B = k_B + CODES - 1
    if order is not None:
        first_B = tl.load(order + first_B, mask=inside_B, other=0)
        second_B = tl.load(order + second_B, mask=inside_B, other=0)
    first_MB = tl.load(x_M[:, None] + first_B[None, :], mask=inside_B[None, :], other=0.0)
    return first_MB, tl.load(x_M[:, None] + second_B[None, :], mask=inside_B[None, :], other=0.0)


@triton.jit
def _load_codes(
    q, table, at_N, start, INPUTS: tl.constexpr, CODES: tl.constexpr, K: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """The first and the second codes of some bytes of N outputs, or the table's numbers that they stand for. A byte of
    one code gives it twice. 4-bit integers are less 8."""
    byte_B = start // CODES + tl.arange(0, K // CODES)
    inside_BN = ((byte_B * CODES < INPUTS) | (INPUTS % K == 0))[:, None]
    q_BN = tl.load(q + at_N[None, :] * (INPUTS // CODES) + byte_B[:, None], mask=inside_BN, other=0.0)
    if table is not None:
        return tl.load(table + (q_BN & 15)), tl.load(table + (q_BN >> 4))
    elif CODES == 1:
        code_BN = unpack_bytes(q_BN) if q.dtype.element_ty == tl.uint8 else unpack(q_BN)
        return code_BN, code_BN
    elif INTERPRETED:
        return (q_BN & 15).to(tl.int8) - 8, (q_BN >> 4).to(tl.int8) - 8
    elif tl.bfloat16 == T:
        return tl.inline_asm_elementwise(
            UNPACK_BFLOAT16, "=r,=r,=r,=r,r", [q_BN], dtype=(tl.bfloat16, tl.bfloat16), is_pure=False, pack=4
        )
    else:
        return tl.inline_asm_elementwise(
            UNPACK_FLOAT16, "=r,=r,=r,=r,r", [q_BN], dtype=(tl.float16, tl.float16), is_pure=False, pack=4
        )


@triton.jit
def unpack_bytes(x):
    """The float8_e4m3fn numbers of bytes, for GPUs that have no such type: as float16's bits they are 2^-8 times as
    large."""
    bits = (x & 128).to(tl.int16) << 8 | (x & 127).to(tl.int16) << 7
    return tl.where((x & 127) == 127, float("nan"), bits.to(tl.float16, bitcast=True) * 256.0)


@triton.jit
def _scaled(
    first_BN, second_BN, scales, shifts, at_N, start, SIZE: tl.constexpr, GROUPS: tl.constexpr, CODES: tl.constexpr,
    MIDDLE: tl.constexpr, HAS_OFFSETS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """W in float32, of codes."""
    first_BN = first_BN.to(tl.float32)
    second_BN = second_BN.to(tl.float32)
    scale_BN = _of_groups(scales, at_N, start, SIZE, GROUPS, CODES=CODES, K=K)
    if shifts is None:
        return scale_BN * first_BN, scale_BN * second_BN
    else:
        shift_BN = _of_groups(shifts, at_N, start, SIZE, GROUPS, CODES=CODES, K=K)
        if HAS_OFFSETS:
            return scale_BN * (first_BN + MIDDLE) - shift_BN, scale_BN * (second_BN + MIDDLE) - shift_BN
        else:
            return scale_BN * (first_BN + MIDDLE - shift_BN), scale_BN * (second_BN + MIDDLE - shift_BN)


@triton.jit
def _of_groups(
    numbers, at_N, start, SIZE: tl.constexpr, GROUPS: tl.constexpr, CODES: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """The numbers of groups, in float32, for K inputs of N outputs: one for each byte."""
    N: tl.constexpr = at_N.shape[0]
    COUNT: tl.constexpr = K // SIZE if SIZE < K else 1
    g = start // SIZE + tl.arange(0, COUNT)
    number_NG = tl.load(numbers + at_N[:, None] * GROUPS + g[None, :], mask=(g < GROUPS)[None, :], other=0.0)
    spread = tl.broadcast_to(number_NG.to(tl.float32)[:, :, None], [N, COUNT, K // CODES // COUNT])
    return tl.trans(tl.reshape(spread, [N, K // CODES]))


@triton.jit
def _dots(first_MB, second_MB, first_BN, second_BN, CODES: tl.constexpr):
    sum_MN = tl.dot(first_MB, first_BN)
    if CODES == 2:
        sum_MN = tl.dot(second_MB, second_BN, sum_MN)
    return sum_MN
