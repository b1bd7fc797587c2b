"""One table of tests for all backends, compared with a plain computation in float64. Where there is a GPU, the table
has more types, and the shapes of large models.

All memory that does not belong to a row contains NaN, so that reading it by mistake is noticed: unused slots, the extra
slot, padding and its queries (in 8 bits, their scales). The table leads to such a slot wherever a row has no token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise, product
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor
from weight_forms import FORMS, random_weight

from text_generation_common.cpu_features import NEEDS
from text_generation_common.models.architecture import Activation, ClampedGate
from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_common.quantized.tensors.splits import on_tensors
from text_generation_common.quantized.values import Dense
from text_generation_server.kernels import reference
from text_generation_server.kernels.cpu import CpuKernels, backend
from text_generation_server.kernels.interface import (
    AdaptedPairs,
    AdapterMatrices,
    AttentionOptions,
    ExpertCodes,
    ExpertWeights,
    HeadNorms,
    Kernels,
    KvLayer,
    Routes,
    Segments,
)

if TYPE_CHECKING:
    from .conftest import Subject

GPU = torch.cuda.is_available()
NAN = float("nan")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
HEAD = 16
KV_HEADS = 2
INT8, FP8 = torch.int8, torch.float8_e4m3fn
GROUPS = [1, 3, 4, 7, 8]
# Backends and types in which a row must get the same bits whatever other rows are computed with it.
EXACT = [("reference", torch.float32), ("triton", torch.float32), ("triton", torch.float16)]
EXACT += [(f"cpu_{target}", torch.float32) for target in NEEDS]
EXACT += [(f"cpu_{target}", torch.bfloat16) for target in ("avx512", "avx2", "portable")]
EXACT += [("triton", torch.bfloat16)] * GPU
SMALL_NUMBERS = [("reference", torch.bfloat16), ("triton", torch.float16)]
SMALL_NUMBERS += [("triton", torch.bfloat16)] * GPU
SMALL_NUMBERS += [(f"cpu_{target}", torch.bfloat16) for target in NEEDS]
# Lengths just below and above every backend's tile sizes (32 or 64 keys) and split size (256 keys).
EDGES = [1, 2, 31, 32, 33, 63, 64, 65, 128, 255, 256, 257, 513]
FEW_LENGTHS = [70, 1, 257]
Run = tuple[int, int, int]  # row, first position, position after the last
# (start, end): decode rows, then chunks with and without a cached prefix.
RUNS = [(0, 1), (63, 64), (64, 65), (256, 257), (0, 2), (0, 64), (0, 65), (1, 3), (31, 34), (63, 66), (100, 199)]
FEW_RUNS = [(69, 70), (0, 35), (60, 66)]


@dataclass(frozen=True)
class Heads:
    """Shape of attention: query heads for each key head, numbers of a head, key heads, type of the cache (None: that of
    the queries). Large shapes are computed by GPUs only: others would take minutes."""

    group: int
    size: int = HEAD
    kv_heads: int = KV_HEADS
    cache: torch.dtype | None = None
    large: bool = False

    def __str__(self) -> str:
        cache = "" if self.cache is None else f"-{str(self.cache)[6:]}"
        return f"group{self.group}" + (f"-size{self.size}-{self.kv_heads}heads{cache}" if self.large else "")

    def check(self, subject: Subject) -> None:
        """Skips the test if the shape is not for this backend."""
        if self.large and subject.backend != "triton":
            pytest.skip("the shape of a large model: computed on GPUs only")


LARGE_HEADS = [Heads(group, size, 8, large=True) for size, group in
               ((128, 4), (128, 1), (128, 8), (64, 4), (64, 7), (80, 8), (80, 1), (256, 2))]  # fmt: skip
LARGE_HEADS += [Heads(group, size, 8, cache, True)
                for (size, group), cache in product(((128, 4), (64, 7), (80, 1)), (INT8, FP8))]  # fmt: skip
LARGE_HEADS += [Heads(8, 128, 1, large=True)]  # one rank of eight
LARGE_HEADS *= GPU
# Around the edges of tiles and splits, and one length that needs more than the largest number of splits.
LARGE_LENGTHS = [1, 2, 63, 64, 65, 128, 255, 256, 257, 1000, 4097, 8500]
LARGE_RUNS = [(0, 1), (63, 64), (8191, 8192), (0, 2), (0, 65), (1, 3), (63, 320), (0, 1000), (3584, 4097)]
# Triton's interpreter computes with numpy, which would warn of numbers that these tests make on purpose: e^200, which
# is infinite, and the NaN in slots that must not be read.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|All-NaN slice) encountered:RuntimeWarning")


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Compares with the tolerance of `dtype`, the type of the arithmetic."""
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double().cpu(), expected.double(), atol=tolerance, rtol=tolerance)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Pool:
    """Rows of the given lengths in scattered slots; all other memory contains NaN."""

    def __init__(
        self,
        subject: Subject,
        lengths: list[int],
        size: int = HEAD,
        cache: torch.dtype | None = None,
        contiguous: bool = False,
        kv_heads: int = KV_HEADS,
        options: AttentionOptions | None = None,
    ) -> None:
        check_cache(subject, cache)
        torch.manual_seed(len(lengths))
        self.kv_heads = kv_heads
        self.options = replace(options or AttentionOptions(1.0), scale=size**-0.5)
        self.lengths = int32(*lengths)
        self.device = subject.device
        slots = sum(lengths) + 50
        # Slot 0 belongs to no row, so that a masked load that reads it by mistake is noticed.
        order = torch.arange(1, slots) if contiguous else torch.randperm(slots - 1) + 1
        self.table = torch.full((len(lengths) + 1, max(lengths) + 7), int(order[-1]), dtype=torch.int32)
        self.table[-1, 0] = slots  # the row of padding: one token, in the extra slot
        used = torch.zeros(slots + 1, dtype=torch.bool)
        for row, length in enumerate(lengths):
            mine, order = order[:length], order[length:]
            self.table[row, :length] = mine
            used[mine] = True
        heads, scales = random_states((slots + 1, 2 * kv_heads, size), cache or subject.dtype)
        if scales is None:
            heads[~used] = NAN
            self.states = heads.double()
        else:
            scales[~used] = NAN
            self.states = heads.double() * scales.double().unsqueeze(2)
        self.states = self.states.to(self.device)
        self.kv = KvLayer(heads.to(self.device), None if scales is None else scales.to(self.device))

    def attend(self, row: int, q_HD: Tensor, position: int) -> Tensor:
        """Attention of one query, by a plain computation. On the host."""
        options, seen = self.options, torch.arange(self.options.first_seen(position), position + 1)
        states = self.states[self.table[row, seen].to(self.device)]
        group = q_HD.shape[0] // self.kv_heads
        keys = states[:, : self.kv_heads].repeat_interleave(group, dim=1)
        values = states[:, self.kv_heads :].repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,lhd->hl", q_HD.double(), keys) * options.scale
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        if options.slopes_H is not None:
            scores += torch.outer(options.slopes_H.double(), (seen - position).double().to(self.device))
        if options.sinks_H is not None:
            scores = torch.cat([scores, options.sinks_H.double().unsqueeze(1)], dim=1)
            values = torch.cat([values, torch.zeros_like(values[:1])])
        return torch.einsum("hl,lhd->hd", scores.softmax(dim=1), values).cpu()

    def forget(self, row: int, end: int) -> None:
        """Puts NaN into the slots of a row's positions before `end`."""
        numbers = self.kv.heads if self.kv.scales is None else self.kv.scales
        numbers[self.table[row, :end].to(self.device)] = NAN

    def decode(self, subject: Subject, q_THD: Tensor, rows: list[int]) -> Tensor:
        """Attention of a decode step. A row number past the last row is padding."""
        return self.step(subject, q_THD, rows, [])

    def prefill(self, subject: Subject, q_THD: Tensor, runs: list[Run]) -> Tensor:
        return self.step(subject, q_THD, [], runs)

    def step(self, subject: Subject, q_THD: Tensor, rows: list[int], runs: list[Run], recorded: bool = False) -> Tensor:
        """Attention of decode rows, then of runs. A recorded step has as many rows as tokens, and empty runs."""
        no_rows = len(q_THD) - len(rows) if recorded else 0
        no_runs = [(len(self.lengths), 0, 0)] * 3 if recorded else []
        lengths = torch.cat([torch.cat([self.lengths, int32(1)])[rows], int32(*[0] * no_rows)])
        rows_R = int32(*rows, *[len(self.lengths)] * no_rows)
        segments = None
        if runs:
            numbers, starts, _ = (int32(*column) for column in zip(*runs, *no_runs, strict=True))
            offsets = int32(len(rows), *(end - start for _, start, end in runs + no_runs)).cumsum(0, dtype=torch.int32)
            tokens = len(q_THD) if recorded else sum(end - start for _, start, end in runs)
            segments = Segments(*(t.to(self.device) for t in (numbers, starts, offsets)), tokens)
        arguments = (t.to(self.device) for t in (self.table, rows_R, lengths))
        return subject.kernels.attend(q_THD, self.kv, *arguments, segments, self.options)


def check_cache(subject: Subject, cache: torch.dtype | None) -> None:
    if cache == FP8 and subject.device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs a GPU of compute capability 8.9")


def random_states(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    if dtype == INT8:
        return torch.randint(-127, 128, shape, dtype=INT8), torch.rand(shape[:2]) / 50
    if dtype == FP8:
        return (torch.randn(shape) * 100).to(FP8), torch.rand(shape[:2]) / 50
    return torch.randn(shape).to(dtype), None


def queries(subject: Subject, tokens: int, group: int, size: int = HEAD, kv_heads: int = KV_HEADS) -> Tensor:
    return torch.randn(tokens, kv_heads * group, size).to(subject.dtype).to(subject.device)


def pool_of(subject: Subject, heads: Heads, lengths: list[int]) -> Pool:
    return Pool(subject, lengths, heads.size, heads.cache, heads.group == 4 and not heads.large, heads.kv_heads)


def queries_of(subject: Subject, heads: Heads, tokens: int) -> Tensor:
    return queries(subject, tokens, heads.group, heads.size, heads.kv_heads)


def said(value: object) -> str:
    return f"{len(value)}rows" if isinstance(value, list) else str(value)


@pytest.mark.parametrize(
    ("heads", "lengths"),
    [
        (Heads(3), EDGES),
        *((Heads(group), FEW_LENGTHS) for group in GROUPS),
        *((heads, LARGE_LENGTHS) for heads in LARGE_HEADS),
    ],
    ids=said,
)
def test_decode_attends_to_its_own_row_and_to_nothing_else(subject: Subject, heads: Heads, lengths: list[int]) -> None:
    heads.check(subject)
    pool = pool_of(subject, heads, lengths)
    rows = list(range(len(lengths)))[::-1]
    q = queries_of(subject, heads, len(rows))
    out = pool.decode(subject, q, rows)
    for i, row in enumerate(rows):
        close(out[i], pool.attend(row, q[i], lengths[row] - 1), subject.dtype)


@pytest.mark.parametrize(
    ("heads", "spans"),
    [
        (Heads(3), RUNS),
        *((Heads(group), FEW_RUNS) for group in GROUPS),
        *((heads, LARGE_RUNS) for heads in LARGE_HEADS),
    ],
    ids=said,
)
def test_prefill_is_causal_over_prefix_and_chunk_whatever_else_is_in_the_step(
    subject: Subject, heads: Heads, spans: list[tuple[int, int]]
) -> None:
    heads.check(subject)
    pool = pool_of(subject, heads, [end for _, end in spans])
    runs = [(row, start, end) for row, (start, end) in enumerate(spans)]
    tokens = sum(end - start for start, end in spans)
    q = queries_of(subject, heads, tokens + 3)
    q[tokens:] = NAN
    out = pool.prefill(subject, q, runs)
    assert not out[tokens:].any()
    first = 0
    for row, start, end in runs:
        for i in {0, 1, (end - start) // 2, end - start - 1} & set(range(end - start)):
            close(out[first + i], pool.attend(row, q[first + i], start + i), subject.dtype)
        first += end - start


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
def test_decode_rows_and_chunks_of_a_step_each_attend_to_their_own_row(subject: Subject, recorded: bool) -> None:
    pool = Pool(subject, [70, 1, 300, 35, 66])
    rows, runs = [2, 1], [(0, 60, 70), (3, 34, 35), (4, 63, 66)]
    q = queries(subject, 20, 3)
    q[16:] = NAN
    out = pool.step(subject, q, rows, runs, recorded)
    assert not out[16:].any()
    tokens = [(2, 299), (1, 0), *((row, position) for row, start, end in runs for position in range(start, end))]
    for i, (row, position) in enumerate(tokens):
        close(out[i], pool.attend(row, q[i], position), subject.dtype)


@pytest.mark.parametrize("size", [48, 80, 96, 128])
def test_head_sizes_need_not_be_powers_of_two(subject: Subject, size: int) -> None:
    pool = Pool(subject, [70, 3], size)
    q = queries(subject, 2, 3, size)
    decoded = pool.decode(subject, q, [0, 1])
    filled = pool.prefill(subject, q, [(0, 68, 70)])
    close(decoded[0], pool.attend(0, q[0], 69), subject.dtype)
    close(decoded[1], pool.attend(1, q[1], 2), subject.dtype)
    close(filled[1], pool.attend(0, q[1], 69), subject.dtype)


@pytest.mark.parametrize("contiguous", [False, True], ids=["scattered", "contiguous"])
@pytest.mark.parametrize("group", GROUPS)
def test_heads_of_the_usual_size_attend_over_tiles_and_splits(subject: Subject, group: int, contiguous: bool) -> None:
    lengths = [600, *EDGES, 15, 16, 17] if group == 3 else [600, 70, 16, 257, 1]
    pool = Pool(subject, lengths, 64, contiguous=contiguous)
    q = queries(subject, len(lengths), group, 64)
    out = pool.decode(subject, q, list(range(len(lengths))))
    for row, length in enumerate(lengths):
        close(out[row], pool.attend(row, q[row], length - 1), subject.dtype)
        if subject.backend.startswith("cpu"):
            assert torch.equal(pool.decode(subject, q[row : row + 1], [row])[0], out[row])


def test_a_row_may_have_more_heads_than_are_read_together(subject: Subject) -> None:
    lengths, kv_heads, size = [40, 7, 33, 64], 12, 32
    pool = Pool(subject, lengths, size, kv_heads=kv_heads)
    q = torch.randn(len(lengths), 2 * kv_heads, size).to(subject.dtype).to(subject.device)
    out = pool.decode(subject, q, list(range(len(lengths))))
    for row, length in enumerate(lengths):
        close(out[row], pool.attend(row, q[row], length - 1), subject.dtype)


@pytest.mark.parametrize("cache", [INT8, FP8], ids=["int8", "fp8"])
def test_scales_of_an_8_bit_cache_are_part_of_its_numbers(subject: Subject, cache: torch.dtype) -> None:
    pool = Pool(subject, [1, 64, 65, 300], cache=cache)
    q = queries(subject, 7, 3)
    out = pool.decode(subject, q[:4], [0, 1, 2, 3])
    for row, length in enumerate((1, 64, 65, 300)):
        close(out[row], pool.attend(row, q[row], length - 1), subject.dtype)
    out = pool.prefill(subject, q, [(1, 63, 64), (3, 68, 70), (2, 61, 65)])
    for i, row, position in ((0, 1, 63), (1, 3, 68), (2, 3, 69), (3, 2, 61), (6, 2, 64)):
        close(out[i], pool.attend(row, q[i], position), subject.dtype)


# Windows begin just before, at and after the edge of a tile, and within and after the first split of a row.
OPTIONS = {
    "softcap": dict(softcap=2.0),
    "slopes": dict(slopes=True),
    "sinks": dict(sinks=True),
    "window": dict(window=70),
    "all": dict(softcap=2.0, slopes=True, sinks=True, window=600),
}
OPTION_LENGTHS = {"window": [1, 69, 70, 71, 133, 134, 135, 300], "all": [1, 599, 600, 601, 664, 1300]}
OPTION_SPANS = {"window": [(0, 75), (69, 72), (132, 136), (100, 199)], "all": [(590, 605), (663, 664), (1290, 1300)]}


def make_options(
    subject: Subject, heads: int, softcap: float | None = None, slopes: bool = False, sinks: bool = False,
    window: int | None = None,
) -> AttentionOptions:  # fmt: skip
    slopes_H, sinks_H = (torch.linspace(*ends, heads, device=subject.device) for ends in ((0.5, 0.004), (-2, 5)))
    return AttentionOptions(1.0, softcap, slopes_H if slopes else None, sinks_H if sinks else None, window)


@pytest.mark.parametrize(
    ("name", "group", "size"), [*((name, 3, 64) for name in OPTIONS), ("all", 1, 80), ("all", 8, 128), ("all", 4, 256)]
)
def test_options_change_the_scores_and_what_is_seen(subject: Subject, name: str, group: int, size: int) -> None:
    lengths = OPTION_LENGTHS.get(name, [70, 1, 600])
    spans = OPTION_SPANS.get(name, [(60, 70), (0, 1), (590, 600)])
    if size != 64:
        lengths, spans = [1, 664], [(655, 664)]
    options = make_options(subject, group * KV_HEADS, **OPTIONS[name])
    pool = Pool(subject, lengths, size, options=options)
    for row, length in enumerate(lengths):
        pool.forget(row, options.first_seen(length - 1))
    q = queries(subject, len(lengths), group, size)
    out = pool.decode(subject, q, list(range(len(lengths))))
    for row, length in enumerate(lengths):
        close(out[row], pool.attend(row, q[row], length - 1), subject.dtype)

    pool = Pool(subject, [end for _, end in spans], size, options=options)
    for row, (start, _) in enumerate(spans):
        pool.forget(row, options.first_seen(start))
    q = queries(subject, sum(end - start for start, end in spans), group, size)
    out = pool.prefill(subject, q, [(row, start, end) for row, (start, end) in enumerate(spans)])
    first = 0
    for row, (start, end) in enumerate(spans):
        for i in {0, (end - start) // 2, end - start - 1}:
            close(out[first + i], pool.attend(row, q[first + i], start + i), subject.dtype)
        first += end - start


@pytest.mark.parametrize("cache", [INT8, FP8], ids=["int8", "fp8"])
def test_scales_of_an_8_bit_cache_are_not_read_before_the_window(subject: Subject, cache: torch.dtype) -> None:
    options = make_options(subject, 3 * KV_HEADS, softcap=2.0, window=70)
    pool = Pool(subject, [300, 140], cache=cache, options=options)
    pool.forget(0, 230)
    pool.forget(1, 61)
    q = queries(subject, 11, 3)
    out = pool.step(subject, q, [0], [(1, 130, 140)])
    for i, row, position in ((0, 0, 299), (1, 1, 130), (10, 1, 139)):
        close(out[i], pool.attend(row, q[i], position), subject.dtype)


# Heads whose sizes are multiples of 32 are computed by dot products, where the processor has them.
@pytest.mark.parametrize("subject", [(f"cpu_{t}", torch.bfloat16) for t in NEEDS], indirect=True, ids=str)
@pytest.mark.parametrize("cache", [INT8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize(
    ("name", "group", "size"), [("window", 3, 64), ("all", 5, 96), ("sinks", 1, 32), ("slopes", 4, 128)]
)
def test_rows_over_an_8_bit_cache_attend_alike_alone_and_together(
    subject: Subject, cache: torch.dtype, name: str, group: int, size: int
) -> None:
    lengths = [1, 15, 16, 17, 85, 86, 700]
    options = make_options(subject, group * KV_HEADS, **OPTIONS[name])
    pool = Pool(subject, lengths, size, cache, options=options)
    for row, length in enumerate(lengths):
        pool.forget(row, options.first_seen(length - 1))
    q = queries(subject, len(lengths), group, size)
    out = pool.decode(subject, q, list(range(len(lengths))))
    for row, length in enumerate(lengths):
        close(out[row], pool.attend(row, q[row], length - 1), subject.dtype)
        assert torch.equal(pool.decode(subject, q[row : row + 1], [row])[0], out[row])
    q[6, 0, 7] = NAN
    broken = pool.decode(subject, q, list(range(len(lengths))))
    assert broken[6, 0].isnan().all() and torch.equal(broken[6, 1:], out[6, 1:])


@pytest.mark.parametrize("cache", [INT8, FP8], ids=["int8", "fp8"])
def test_large_values_count_where_all_weights_are_small(subject: Subject, cache: torch.dtype) -> None:
    options = AttentionOptions(1.0, sinks_H=torch.full((KV_HEADS,), 12.0, device=subject.device))
    pool = Pool(subject, [20], 32, cache, options=options)
    assert pool.kv.scales is not None
    pool.kv.scales.mul_(1e5)
    pool.states.mul_(1e5)
    q = torch.zeros_like(queries(subject, 1, 1, 32))
    out = pool.decode(subject, q, [0])
    assert out.abs().max() > 0.1
    close(out[0], pool.attend(0, q[0], 19), subject.dtype)


@pytest.mark.parametrize("subject", EXACT, indirect=True, ids=str)
@pytest.mark.usefixtures("ordered_products")
def test_with_options_a_row_depends_on_no_other_row_and_on_no_cut(subject: Subject) -> None:
    options = make_options(subject, 3 * KV_HEADS, softcap=2.0, slopes=True, sinks=True, window=40)
    pool = Pool(subject, [5, 64, 257, 130], options=options)
    q = queries(subject, 4, 3)
    together = pool.decode(subject, q, [0, 1, 2, 3])
    for row in range(4):
        assert torch.equal(pool.decode(subject, q[row : row + 1], [row])[0], together[row])
    whole = pool.prefill(subject, q := queries(subject, 130, 3), [(3, 0, 130)])
    pool.forget(3, options.first_seen(111))
    cut = pool.prefill(subject, q[111:], [(3, 111, 117), (3, 117, 130)])
    assert torch.equal(cut, whole[111:])


def test_padding_rows_of_a_decode_change_no_other_row(subject: Subject) -> None:
    pool = Pool(subject, [40, 1])
    q = queries(subject, 7, 4)
    q[2:] = NAN
    out = pool.decode(subject, q, [0, 1, 2, 2])
    for row, position in ((0, 39), (1, 0)):
        close(out[row], pool.attend(row, q[row], position), subject.dtype)
    assert not out[4:].any()


@pytest.mark.parametrize("subject", EXACT, indirect=True, ids=str)
@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize("heads", [Heads(3), *LARGE_HEADS], ids=said)
def test_a_decoding_row_does_not_depend_on_its_neighbours_or_its_place(subject: Subject, heads: Heads) -> None:
    heads.check(subject)
    pool = pool_of(subject, heads, [1000, 2049, 300, 5000] if heads.large else [5, 64, 257, 130])
    q = queries_of(subject, heads, 4)
    together = pool.decode(subject, q, [0, 1, 2, 3])
    shuffled = pool.decode(subject, q[[2, 0, 3]], [2, 0, 3])
    assert torch.equal(shuffled, together[[2, 0, 3]])
    for row in range(4):
        assert torch.equal(pool.decode(subject, q[row : row + 1], [row])[0], together[row])


@pytest.mark.parametrize("subject", EXACT, indirect=True, ids=str)
@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize("heads", [Heads(3), *LARGE_HEADS], ids=said)
def test_a_decoding_row_does_not_depend_on_chunks_beside_it(subject: Subject, heads: Heads) -> None:
    heads.check(subject)
    pool = pool_of(subject, heads, [5000 if heads.large else 600, 40, 70])
    decoding, q = queries_of(subject, heads, 2), queries_of(subject, heads, 20)
    alone = pool.decode(subject, decoding, [0, 1])
    for recorded in (False, True):
        beside = pool.step(subject, torch.cat([decoding, q]), [0, 1], [(2, 50, 70)], recorded)
        assert torch.equal(beside[:2], alone)
        assert torch.equal(beside[2:], pool.prefill(subject, q, [(2, 50, 70)]))


@pytest.mark.parametrize("subject", EXACT, indirect=True, ids=str)
@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize("heads", [Heads(3), *LARGE_HEADS], ids=said)
def test_a_run_does_not_depend_on_its_neighbours_its_place_or_its_cut(subject: Subject, heads: Heads) -> None:
    heads.check(subject)
    longest = 700 if heads.large else 130
    pool = pool_of(subject, heads, [65, 3, longest, 40])
    runs = [(0, 64, 65), (1, 0, 3), (2, 0, longest), (3, 30, 40)]
    parts = [queries_of(subject, heads, end - start) for _, start, end in runs]
    alone = [pool.prefill(subject, part, [run]) for part, run in zip(parts, runs, strict=True)]
    assert torch.equal(pool.prefill(subject, torch.cat(parts), runs), torch.cat(alone))
    assert torch.equal(pool.prefill(subject, torch.cat(parts[::-1]), runs[::-1]), torch.cat(alone[::-1]))
    cut = pool.prefill(subject, torch.cat([parts[2], parts[0]]), [(2, 0, 51), (2, 51, longest), (0, 64, 65)])
    assert torch.equal(cut, torch.cat([alone[2], alone[0]]))


# Floats are computed alike in decode rows and in runs; pairs of bfloat16, where the processor multiplies them, are not.
IN_PAIRS = [(f"cpu_{target}", torch.bfloat16) for target in ("amx", "avx512_bf16")]


@pytest.mark.parametrize(
    "subject", [(f"cpu_{t}", d) for t in NEEDS for d in (torch.float32, torch.bfloat16)], indirect=True, ids=str
)
@pytest.mark.parametrize("name", ["plain", "int8", "options"])
def test_a_long_run_has_the_bits_of_any_cut_and_of_decode_rows(subject: Subject, name: str) -> None:
    options = make_options(subject, 3 * KV_HEADS, **OPTIONS["all"]) if name == "options" else None
    pool = Pool(subject, [5, 700], 64, INT8 if name == "int8" else None, options=options)
    q = queries(subject, 200, 3, 64)
    whole = pool.prefill(subject, q, [(1, 500, 700)])
    assert torch.equal(pool.prefill(subject, q, [(1, 500, 513), (1, 513, 640), (1, 640, 700)]), whole)
    assert torch.equal(pool.prefill(subject, q[100:], [(1, 600, 700)]), whole[100:])
    if (subject.backend, subject.dtype) not in IN_PAIRS:
        for i in (0, 11, 12, 75, 76, 199):
            assert torch.equal(pool.prefill(subject, q[i : i + 1], [(1, 500 + i, 501 + i)])[0], whole[i])


@pytest.mark.parametrize(
    "subject", [(f"cpu_{t}", d) for t in NEEDS if t != "amx" for d in (torch.float32, torch.bfloat16)],
    indirect=True, ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", ["plain", "int8", "options"])
def test_a_run_computed_split_by_split_has_the_bits_of_a_long_run(
    subject: Subject, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "LEAST_SPLITS", 0)
    options = make_options(subject, 3 * KV_HEADS, **OPTIONS["all"]) if name == "options" else AttentionOptions(1.0)
    options = replace(options, window=1000 if name == "options" else None)
    pool = Pool(subject, [1600, 5, 600], 64, INT8 if name == "int8" else None, options=options)
    q = queries(subject, 200, 3, 64)
    whole = pool.prefill(subject, q, [(0, 1400, 1600)])
    assert isinstance(subject.kernels, CpuKernels)
    runs = [(0, 1400, 1410), (0, 1410, 1495), (2, 500, 600), (0, 1495, 1508), (1, 2, 5), (0, 1508, 1590)]
    split = [subject.kernels._split_queries(start, end, 3, KV_HEADS, options) > 0 for _, start, end in runs]
    assert split == [True, True, False, True, True, True]
    parts = [q[:95], q[:100], q[95:108], q[:3], q[108:190]]
    together = pool.prefill(subject, torch.cat(parts), runs)
    assert torch.equal(together[:95], whole[:95]) and torch.equal(together[195:208], whole[95:108])
    assert torch.equal(together[211:], whole[108:190])
    assert torch.equal(together[95:195], pool.prefill(subject, q[:100], [(2, 500, 600)]))


def test_a_product_in_order_has_the_same_bits_in_any_shape() -> None:
    a, b = torch.randn(3, 40, 100), torch.randn(3, 100, 64)
    whole = reference._product(a, b)
    torch.testing.assert_close(whole.double(), a.double() @ b.double(), atol=1e-4, rtol=1e-5)
    for first, last in ((0, 1), (1, 2), (5, 22), (39, 40)):
        alone = reference._product(a[1:2, first:last], b[1:2, :, 3:20])
        assert torch.equal(alone[0], whole[1, first:last, 3:20])


@pytest.mark.parametrize("subject", SMALL_NUMBERS, indirect=True, ids=str)
def test_slots_may_lie_beyond_31_bits(subject: Subject) -> None:
    """The memory is only reserved: few of its pages are ever written."""
    if subject.interpreted:
        pytest.skip(
            "needs a GPU: the interpreter copies all of its arguments; test_triton.py tests the arithmetic alone"
        )
    size, length = 128, 5
    slots = 2**31 // (2 * size)
    heads = torch.empty((slots + 1, 2, size), dtype=subject.dtype, device=subject.device)
    kv = KvLayer(heads)
    kernels = subject.kernels
    states = torch.randn(length, 4 * size).to(subject.dtype).to(subject.device)
    mine = torch.arange(slots - length, slots, dtype=torch.int32, device=subject.device)
    positions = torch.arange(length, dtype=torch.int32, device=subject.device)
    still = (torch.ones(8, size // 2, device=subject.device), torch.zeros(8, size // 2, device=subject.device))
    q = kernels.rope_and_store_kv(states, (2, 1), still, positions, kv, mine)
    stored = states.view(length, 4, size)[:, 2:]
    assert torch.equal(heads[slots - length : slots], stored)
    rows, lengths = int32(0).to(subject.device), int32(length).to(subject.device)
    decoded = kernels.attend(q[-1:].contiguous(), kv, mine.unsqueeze(0), rows, lengths, None, AttentionOptions(0.1))
    scores = torch.einsum("hd,ld->hl", q[-1].double(), stored[:, 0].double()) * 0.1
    close(decoded[0], (scores.softmax(dim=1) @ stored[:, 1].double()).cpu(), subject.dtype)
    offsets = int32(0, length).to(subject.device)
    segments = Segments(rows, rows, offsets, length)
    filled = kernels.attend(q, kv, mine.unsqueeze(0), rows[:0], rows[:0], segments, AttentionOptions(0.1))
    close(filled[-1], decoded[0].cpu(), subject.dtype)


@pytest.mark.parametrize(
    "subject", [("reference", torch.float32), ("reference", torch.bfloat16)], indirect=True, ids=str
)
def test_long_prompts_in_blocks_are_the_same(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> None:
    pool = Pool(subject, [150, 150])
    q = queries(subject, 150, 2)
    filled, decoded = pool.prefill(subject, q, [(0, 0, 150)]), pool.decode(subject, q[:2], [0, 1])
    monkeypatch.setattr(reference, "MAX_SCORES", 4 * 192 * 40)
    monkeypatch.setattr(reference, "MAX_GATHERED", 192 * 4 * HEAD)
    close(pool.prefill(subject, q, [(0, 0, 150)]), filled, subject.dtype)
    assert torch.equal(pool.decode(subject, q[:2], [0, 1]), decoded)


class Rope:
    """Input of rope_and_store_kv: five tokens, and two tokens of padding in the extra slot."""

    tokens, slots = 7, 11

    def __init__(
        self, subject: Subject, cache: torch.dtype, shape: Heads, weights_type: torch.dtype | None = None
    ) -> None:
        """`weights_type`: the type of the norms' weights; None: there are no norms."""
        check_cache(subject, cache)
        torch.manual_seed(1)
        self.kv_heads, self.size = shape.kv_heads, shape.size
        self.heads = shape.group * shape.kv_heads
        all_heads = self.heads + 2 * self.kv_heads
        states = torch.randn(self.tokens, all_heads, self.size).to(subject.dtype)
        states[1, -1] = 0
        # The scale of these numbers is 1, and many of them are half-way between two integers.
        states[2, -1] = torch.cat([torch.tensor([127.0]), (torch.arange(self.size - 1) - 7.5).clamp(max=126.5)])
        self.positions, self.slot_of = int32(3, 0, 7, 9, 1, 0, 0), int32(8, 2, 0, 5, 9, 11, 11)
        angles = torch.outer(torch.arange(12.0), 1 / 100 ** (torch.arange(0, self.size, 2) / self.size))
        norms, before = None, states.double()
        if weights_type is not None:
            weights = (1 + 0.5 * torch.randn(2, self.size)).to(weights_type)
            norms = HeadNorms(*weights.to(subject.device), 1e-5)
            before /= (before.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
            before[:, : self.heads] *= weights[0].double()
            before[:, self.heads :] *= weights[1].double()
        turned = torch.view_as_complex(torch.stack(before.chunk(2, dim=-1), dim=-1).contiguous())
        turned = torch.view_as_real(
            turned * torch.polar(torch.ones_like(angles).double(), angles.double())[self.positions, None]
        )
        self.turned = torch.cat([turned[..., 0], turned[..., 1]], dim=-1)
        self.values = states[:5, self.heads + self.kv_heads :]
        shape = (self.slots + 1, 2 * self.kv_heads, self.size)
        heads = torch.full(shape, 77).to(cache) if cache == INT8 else torch.full(shape, NAN).to(cache)
        scales = torch.full(shape[:2], NAN) if cache in (INT8, FP8) else None
        device = subject.device
        self.kv = KvLayer(heads.to(device), None if scales is None else scales.to(device))
        self.q = subject.kernels.rope_and_store_kv(
            states.view(self.tokens, -1).to(device),
            (self.heads, self.kv_heads),
            (angles.cos().to(device), angles.sin().to(device)),
            self.positions.to(device),
            self.kv,
            self.slot_of.to(device),
            norms,
        )

    @property
    def keys(self) -> Tensor:
        return self.turned[:5, self.heads : self.heads + self.kv_heads]

    def untouched(self) -> list[int]:
        return sorted(set(range(self.slots)) - set(self.slot_of.tolist()))


ROPES = [Heads(3, 24), *(heads for heads in LARGE_HEADS if heads.cache is None)]


@pytest.mark.parametrize("norms", ["no", "narrow", "float32"])
@pytest.mark.parametrize("heads", ROPES, ids=said)
def test_rope_turns_queries_and_keys_and_stores_keys_and_values(subject: Subject, heads: Heads, norms: str) -> None:
    heads.check(subject)
    weights_type = {"no": None, "narrow": subject.dtype, "float32": torch.float32}[norms]
    rope = Rope(subject, subject.dtype, heads, weights_type)
    stored = rope.kv.heads.cpu()[rope.slot_of[:5]]
    close(rope.q, rope.turned[:, : rope.heads], subject.dtype)
    close(stored[:, : rope.kv_heads], rope.keys, subject.dtype)
    assert torch.equal(stored[:, rope.kv_heads :], rope.values)
    assert rope.kv.heads[rope.untouched()].isnan().all()


@pytest.mark.parametrize("heads", ROPES, ids=said)
@pytest.mark.parametrize("cache", [INT8, FP8], ids=["int8", "fp8"])
def test_an_8_bit_cache_is_written_with_numbers_rounded_to_the_nearest(
    subject: Subject, cache: torch.dtype, heads: Heads
) -> None:
    heads.check(subject)
    if subject.interpreted and cache == FP8:
        pytest.skip("needs a GPU: the interpreter loses carries when it rounds to fp8")
    rope = Rope(subject, cache, heads)
    assert rope.kv.scales is not None
    heads, scales = rope.kv.heads.cpu()[rope.slot_of[:5]], rope.kv.scales.cpu()[rope.slot_of[:5]]
    largest = 127 if cache == INT8 else 448
    expected_scales = (rope.values.float().abs().amax(-1) / largest).clamp(min=1e-6)
    assert torch.equal(scales[:, rope.kv_heads :], expected_scales)
    numbers = rope.values.float() / expected_scales.unsqueeze(2)
    numbers = (numbers.round() if cache == INT8 else numbers).to(cache)
    assert torch.equal(heads[:, rope.kv_heads :].float(), numbers.float())
    exact = torch.cat([rope.keys, rope.values.double()], dim=1)
    step = scales.double().unsqueeze(2)
    half_a_step = step * 0.5 if cache == INT8 else exact.abs() * 2**-4 + step * 2**-9
    rounded_before = exact.abs() * torch.finfo(subject.dtype).eps + 1e-6
    assert ((heads.double() * step - exact).abs() <= half_a_step * 1.001 + rounded_before).all()
    assert rope.kv.scales[rope.untouched()].isnan().all()


def normalised(x_TH: Tensor, weight_H: Tensor) -> Tensor:
    x_TH = x_TH.double()
    return x_TH / (x_TH.pow(2).mean(1, keepdim=True) + 1e-5).sqrt() * weight_H.double().cpu()


def test_the_norm_is_that_of_the_formula_for_many_rows(subject: Subject) -> None:
    x, weight = torch.randn(1030, 8).to(subject.dtype), torch.randn(8).to(subject.dtype).to(subject.device)
    close(subject.kernels.rms_norm(x.to(subject.device), weight, 1e-5), normalised(x, weight), subject.dtype)


@pytest.mark.parametrize("size", [96] + [2880, 4096, 8192] * GPU)
def test_the_norm_of_a_sum_is_that_of_the_rounded_sum(subject: Subject, size: int) -> None:
    x, residual = (torch.randn(7, size).to(subject.dtype) for _ in range(2))
    weight = torch.randn(size).to(subject.dtype).to(subject.device)
    summed = x + residual
    y, total = subject.kernels.add_rms_norm(x.to(subject.device), residual.to(subject.device), weight, 1e-5)
    assert torch.equal(total.cpu(), summed)
    close(y, normalised(summed, weight), subject.dtype)


@pytest.mark.parametrize("size", [48] + [4096] * GPU)
@pytest.mark.parametrize("exact", [False, True], ids=["narrow weight", "float32 weight"])
def test_the_norm_of_a_part_leaves_the_other_columns_as_they_are(subject: Subject, size: int, exact: bool) -> None:
    part = range(32, 32 + size)
    x = torch.randn(7, size + 80).to(subject.dtype)
    weight = (1 + 0.5 * torch.randn(size)).to(torch.float32 if exact else subject.dtype).to(subject.device)
    y = x.to(subject.device, copy=True)
    subject.kernels.rms_norm_part(y, part, weight, 1e-5)
    close(y[:, 32 : 32 + size], normalised(x[:, 32 : 32 + size], weight), subject.dtype)
    y[:, 32 : 32 + size] = x[:, 32 : 32 + size].to(subject.device)
    assert torch.equal(y.cpu(), x)


@pytest.mark.parametrize("exact", [False, True], ids=["narrow weight", "float32 weight"])
def test_a_float32_weight_multiplies_before_the_rounding(subject: Subject, exact: bool) -> None:
    """In both norms, to the bit of torch's own operations."""
    x = torch.full((1, 64), 2.0).to(subject.dtype)
    weight = torch.linspace(0.4, 1.7, 64).to(torch.float32 if exact else subject.dtype)
    norm = torch.tensor((4 + 0.5) ** -0.5)
    expected = (2 * norm * weight if exact else (2 * norm).to(subject.dtype) * weight).to(subject.dtype).view(1, 64)
    y = subject.kernels.rms_norm(x.to(subject.device), weight.to(subject.device), 0.5)
    close(y, expected, torch.float32)
    y = x.to(subject.device, copy=True)
    subject.kernels.rms_norm_part(y, range(64), weight.to(subject.device), 0.5)
    close(y, expected, torch.float32)
    rotary = (torch.ones(1, 32).to(subject.device), torch.zeros(1, 32).to(subject.device))
    kv = KvLayer(torch.zeros(2, 2, 64).to(subject.dtype).to(subject.device))
    norms = HeadNorms(weight.to(subject.device), weight.to(subject.device), 0.5)
    zero, qkv = int32(0).to(subject.device), x.repeat(1, 3).to(subject.device)
    q = subject.kernels.rope_and_store_kv(qkv, (1, 1), rotary, zero, kv, zero, norms)
    close(q[:, 0], expected, torch.float32)
    close(kv.heads[:1, 0], expected, torch.float32)


def test_a_comparison_fails_on_a_nan() -> None:
    for wrong in (NAN, float("inf")):
        for dtype in TOLERANCE:
            with pytest.raises(AssertionError):
                close(torch.tensor([1.0, wrong]), torch.ones(2), dtype)


@pytest.mark.parametrize("size", [8, 40, 1030])
def test_a_nan_stays_a_nan_and_reaches_only_its_own_row_of_norms_and_place_of_gates(
    subject: Subject, size: int
) -> None:
    clean = torch.randn(5, size).to(subject.dtype)
    weight = torch.ones(size).to(subject.dtype).to(subject.device)
    for place in (0, size // 2, size - 1):
        x = clean.clone()
        x[2, place] = NAN
        on_device, zeros = x.to(subject.device), torch.zeros_like(x).to(subject.device)
        normed = subject.kernels.rms_norm(on_device, weight, 1e-5)
        added, _ = subject.kernels.add_rms_norm(on_device, zeros, weight, 1e-5)
        for y in (normed.cpu(), added.cpu()):
            assert y[2].isnan().all()
            close(y[[0, 1, 3, 4]], normalised(clean, weight)[[0, 1, 3, 4]], subject.dtype)
        ones = torch.ones_like(x)
        for gate_up in (torch.cat([x, ones], dim=1), torch.cat([ones, x], dim=1)):
            out = subject.kernels.silu_mul(gate_up.to(subject.device)).cpu()
            assert torch.equal(out.isnan(), x.isnan())


@pytest.mark.parametrize("size", [40, 1030] + [14_336] * GPU)
def test_silu_mul_takes_gate_first(subject: Subject, size: int) -> None:
    gate, up = (torch.randn(3, size).to(subject.dtype) for _ in range(2))
    gate[0, :2] = torch.tensor([-200.0, 200.0])
    out = subject.kernels.silu_mul(torch.cat([gate, up], dim=1).to(subject.device))
    close(out, gate.double() * torch.sigmoid(gate.double()) * up.double(), subject.dtype)


EXACT_ACTIVATIONS = {
    Activation.silu: torch.nn.functional.silu,
    Activation.gelu_tanh: partial(torch.nn.functional.gelu, approximate="tanh"),
    Activation.gelu: torch.nn.functional.gelu,
    Activation.relu: torch.nn.functional.relu,
}


@pytest.mark.parametrize("size", [40, 1024])
@pytest.mark.parametrize("activation", Activation, ids=lambda activation: activation.name)
def test_activations_with_and_without_a_gate(subject: Subject, activation: Activation, size: int) -> None:
    x, up = (torch.randn(3, size).to(subject.dtype) * 2 for _ in range(2))
    x[0, :8] = torch.tensor([-200.0, 200.0, -15.0, 15.0, 0.0, -0.5, -5.0, 5.0])
    x[1, 3] = NAN
    expected = EXACT_ACTIVATIONS[activation](x.double())
    out = subject.kernels.activate(x.to(subject.device), activation, False)
    torch.testing.assert_close(
        out.double().cpu(), expected, atol=TOLERANCE[subject.dtype], rtol=TOLERANCE[subject.dtype], equal_nan=True
    )
    gated = subject.kernels.activate(torch.cat([x, up], dim=1).to(subject.device), activation, True)
    torch.testing.assert_close(
        gated.double().cpu(), expected * up.double(), atol=TOLERANCE[subject.dtype], rtol=TOLERANCE[subject.dtype],
        equal_nan=True,
    )  # fmt: skip


def layer_normed(x_TH: Tensor, weight_H: Tensor, bias_H: Tensor | None) -> Tensor:
    bias = None if bias_H is None else bias_H.double().cpu()
    return torch.nn.functional.layer_norm(x_TH.double(), x_TH.shape[1:], weight_H.double().cpu(), bias, 1e-5)


@pytest.mark.parametrize("size", [40, 1024])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
def test_layer_norm_with_and_without_a_residual(subject: Subject, size: int, has_bias: bool) -> None:
    x, residual = (torch.randn(5, size).to(subject.dtype) + 0.5 for _ in range(2))
    weight, bias = (torch.randn(size).to(subject.dtype).to(subject.device) for _ in range(2))
    offset = bias if has_bias else None
    y = subject.kernels.layer_norm(x.to(subject.device), weight, offset, 1e-5)
    close(y, layer_normed(x, weight, offset), subject.dtype)
    expected = x + residual
    parts = (x.to(subject.device, copy=True), residual.to(subject.device, copy=True))
    y, total = subject.kernels.add_layer_norm(*parts, weight, offset, 1e-5)
    assert torch.equal(total.cpu(), expected)
    close(y, layer_normed(expected, weight, offset), subject.dtype)
    assert torch.equal(
        subject.kernels.add(x.to(subject.device, copy=True), residual.to(subject.device)).cpu(), expected
    )
    x[2, 7] = NAN
    broken = subject.kernels.layer_norm(x.to(subject.device), weight, offset, 1e-5).cpu()
    assert broken[2].isnan().all() and not broken[[0, 1, 3, 4]].isnan().any()


@pytest.mark.parametrize("over_chosen", [False, True], ids=["over all", "over the chosen"])
def test_a_token_goes_to_the_experts_with_the_largest_logits(subject: Subject, over_chosen: bool) -> None:
    tokens, count, chosen = 37, 5, 3
    logits = torch.randn(tokens, count).to(subject.dtype)
    logits[4] = 0.5  # equal logits: the first experts
    logits[7, 0] = 300.0
    padded = torch.nn.functional.pad(logits, (0, 3), value=999.0).to(subject.device)[:, :count]
    routes = subject.kernels.route(padded, chosen, over_chosen)
    values, ids = logits.double().sort(dim=1, descending=True, stable=True)
    shares = values[:, :chosen].softmax(1) if over_chosen else values.softmax(1)[:, :chosen]
    close(routes.scores_P.view(tokens, chosen), shares, torch.float32)
    assert routes.offsets[0] == 0 and routes.offsets[-1] == tokens * chosen
    experts = torch.repeat_interleave(torch.arange(count), routes.offsets.cpu().diff())
    pairs = routes.pairs_P.cpu().long()
    assert torch.equal(ids[:, :chosen].flatten()[pairs], experts)
    assert torch.equal(pairs.sort().values, torch.arange(tokens * chosen))


class RandomAdapters:
    """Two adapters of experts, whose matrices are NaN behind their ranks. Adapter 1 leaves the downs as they are."""

    def __init__(self, subject: Subject, count: int, width: int, inner: int) -> None:
        self._subject = subject
        ranks = torch.tensor([[[3, 5]], [[0, 1]]], dtype=torch.int32).expand(2, count, 2).clone()
        ranks[0, 0] = 0  # an expert without matrices
        sizes = ((width, (inner, 2 * inner), ranks), (inner, (width,), ranks[:, :, :1]))
        self._matrices, self.deltas = [], []
        for inputs, ends, of in sizes:
            parts = len(ends)
            down = torch.randn(2, count, parts, 6, inputs) * inputs**-0.5
            up = torch.randn(2, count, 6, ends[-1]) / 2
            down, up = down.to(subject.dtype), up.to(subject.dtype)
            has = torch.arange(6) < of.unsqueeze(3)  # [2, count, parts, 6]
            halves = up.double().unflatten(3, (parts, -1)).transpose(2, 3)  # [2, count, parts, 6, ...]
            delta = halves.mul(has.unsqueeze(4)).transpose(3, 4) @ down.double()
            self.deltas.append(delta.flatten(2, 3))  # [2, count, outputs, inputs]
            down[~has] = NAN
            up.unflatten(3, (parts, -1)).transpose(2, 3)[~has] = NAN
            flat = down.view(2 * count, parts * 6, inputs), up.view(2 * count, 6, -1), of.reshape(2 * count, parts)
            on_device = (t.contiguous().to(subject.device) for t in (*flat, torch.tensor(ends, dtype=torch.int32)))
            self._matrices.append(AdapterMatrices(*on_device, ends))

    def of_step(self, slots_T: Tensor, routes: Routes) -> AdaptedPairs:
        kernels = self._subject.kernels
        return AdaptedPairs(kernels, kernels.pair_slots(slots_T.to(self._subject.device), routes), *self._matrices)

    def merged(self, weights: ExpertWeights, expert: int, slot: int) -> ExpertWeights:
        """The weights of one expert, alone or among those of all, with what an adapter adds."""
        numbers = [exact_weight(of) for of in (weights.gate_up, weights.down)]
        at = expert if len(numbers[0]) > 1 else 0
        stacks = [of[at].double() for of in numbers]
        if slot >= 0:
            stacks = [of + delta[slot, expert] for of, delta in zip(stacks, self.deltas, strict=True)]
        biases = (None if of is None else of[at : at + 1] for of in (weights.gate_up_bias, weights.down_bias))
        return ExpertWeights(*(Dense(of.unsqueeze(0)) for of in stacks), *biases, weights.clamped)


def experts_of(
    subject: Subject, x: Tensor, logits: Tensor, weights: ExpertWeights, adapters: RandomAdapters | None = None,
    slots: Tensor | None = None,
) -> Tensor:  # fmt: skip
    parts = {field.name: getattr(weights, field.name) for field in fields(weights)}
    on_device = {name: part.to(subject.device) for name, part in parts.items() if isinstance(part, Tensor)}
    routes = subject.kernels.route(logits.to(subject.device), min(2, logits.shape[1]), True)
    stacks = {
        name: on_tensors(getattr(weights, name), lambda part: part.to(subject.device)) for name in ("gate_up", "down")
    }
    adapted = None if adapters is None or slots is None else adapters.of_step(slots, routes)
    return subject.kernels.experts(x.to(subject.device), routes, replace(weights, **on_device, **stacks), adapted)


def exact_expert(x: Tensor, weights: ExpertWeights, expert: int) -> Tensor:
    """The result of one expert for one token, in float64."""

    def of_expert(biases: Tensor | None) -> Tensor | float:
        return 0.0 if biases is None else biases[expert].double()

    gate, up = (exact_weight(weights.gate_up)[expert].double() @ x.double() + of_expert(weights.gate_up_bias)).chunk(2)
    inner = torch.nn.functional.silu(gate) * up
    if clamped := weights.clamped:
        gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
        inner = (up + 1) * gate / (1 + torch.exp(-clamped.slope * gate))
    return exact_weight(weights.down)[expert].double() @ inner + of_expert(weights.down_bias)


@pytest.mark.parametrize("width", [48, 72])
@pytest.mark.parametrize("has_options", [False, True], ids=["plain", "biases, clamped, adapters"])
def test_experts_compute_their_tokens_and_no_others(subject: Subject, width: int, has_options: bool) -> None:
    tokens, count, inner = 21, 6, 32
    x = torch.randn(tokens, width).to(subject.dtype)
    # No two logits of a token are equal in any type, so that its choice of experts is certain.
    logits = (torch.stack([torch.randperm(count) for _ in range(tokens)]) * 0.5 - 1).to(subject.dtype)
    logits[:, 4] = -300.0  # no token goes to this expert, so its weights are not read
    gate_up = (torch.randn(count, 2 * inner, width) / width**0.5).to(subject.dtype)
    down = (torch.randn(count, width, inner) / inner**0.5).to(subject.dtype)
    weights = ExpertWeights(Dense(gate_up), Dense(down))
    if has_options:
        biases = (torch.randn(count, size).to(subject.dtype) for size in (2 * inner, width))
        weights = ExpertWeights(Dense(gate_up), Dense(down), *biases, ClampedGate(1.25, 1.7))
    for field in fields(weights):
        if isinstance(part := getattr(weights, field.name), Tensor):
            part[4] = NAN
    adapters = RandomAdapters(subject, count, width, inner)
    slots = (torch.arange(tokens, dtype=torch.int32) % 3 - 1) if has_options else torch.full((tokens,), -1)
    given = (adapters, slots) if has_options else (None, None)
    values, ids = logits.double().topk(2)
    expected = torch.zeros(tokens, width, dtype=torch.float64)
    for t in range(tokens):
        for share, expert in zip(values[t].softmax(0), ids[t].tolist(), strict=True):
            expected[t] += share * exact_expert(x[t], adapters.merged(weights, expert, int(slots[t])), 0)
    out = experts_of(subject, x, logits, weights, *given)
    close(out, expected, subject.dtype)
    if (subject.backend, subject.dtype) in EXACT and not subject.interpreted:
        for t in (0, 9, 10):
            one = slice(t, t + 1)
            alone = experts_of(subject, x[one], logits[one], weights, adapters, slots[one].int())
            assert torch.equal(alone, out[one])


@pytest.mark.parametrize("has_options", [False, True], ids=["plain", "biases, clamped, a factor"])
def test_experts_of_codes_compute_their_tokens_whatever_the_form_of_each(subject: Subject, has_options: bool) -> None:
    count, tokens, width, inner, chosen = len(FORMS), 117, 64, 48, 3
    clamped, factor = (ClampedGate(1.25, 1.7), 0.5) if has_options else (None, 1.0)
    experts, numbers = [], []
    for number, form in enumerate(FORMS):
        gate_up = random_weight(form, 2 * inner, width, (16, 24, 64)[number % 3], number)
        down = random_weight(FORMS[number - 3], width, inner, (16, 48)[number % 2], number)
        biases = [torch.randn(size).to(subject.dtype) if has_options else None for size in (2 * inner, width)]
        down_numbers = exact_weight(down) * (1 if isinstance(down, Dense) else factor)
        experts.append(ExpertCodes([gate_up], down, *biases, factor=1 if isinstance(down, Dense) else factor))
        one = (Dense(matrix.unsqueeze(0)) for matrix in (exact_weight(gate_up), down_numbers))
        numbers.append(ExpertWeights(*one, *(None if of is None else of.unsqueeze(0) for of in biases), clamped))
    compute = subject.kernels.experts_of_codes(experts, clamped, subject.dtype)
    if compute is None:
        assert not isinstance(subject.kernels, CpuKernels)
        return
    x = (torch.randn(tokens, width) / 4).to(subject.dtype)
    logits = (torch.stack([torch.randperm(count) for _ in range(tokens)]) * 0.5 - 1).to(subject.dtype)
    logits[:, 4], logits[:, 5] = -300.0, 300.0  # an expert without tokens, and one with more than a block of rows
    adapters, slots = RandomAdapters(subject, count, width, inner), torch.arange(tokens, dtype=torch.int32) % 3 - 1

    def computed(part: slice) -> Tensor:
        routes = subject.kernels.route(logits[part], chosen, True)
        return compute(x[part], routes, adapted=adapters.of_step(slots[part], routes) if has_options else None)

    out = computed(slice(None))
    values, ids = logits.double().topk(chosen)
    expected = torch.zeros(tokens, width, dtype=torch.float64)
    for t in range(tokens):
        for share, expert in zip(values[t].softmax(0), ids[t].tolist(), strict=True):
            slot = int(slots[t]) if has_options else -1
            expected[t] += share * exact_expert(x[t], adapters.merged(numbers[expert], expert, slot), 0)
    scale = expected.abs().amax(1, keepdim=True)  # weights are large in some forms, and so are the errors of rounding
    close(out / scale, expected / scale, subject.dtype)
    for part in (slice(0, 1), slice(9, 10), slice(50, 54)):
        assert torch.equal(computed(part), out[part])


def test_experts_whose_gates_and_ups_differ_in_form_are_not_multiplied_together(subject: Subject) -> None:
    weights = [random_weight(form, 32, 64, 32) for form in ("int4", "int8")]
    experts = [ExpertCodes(weights, random_weight("int4", 64, 32, 32))]
    assert subject.kernels.experts_of_codes(experts, None, subject.dtype) is None


def test_a_clamped_gate_keeps_what_is_not_finite(subject: Subject) -> None:
    gate_up, down = torch.eye(32).repeat(2, 1).unsqueeze(0), torch.eye(32).unsqueeze(0)
    x = torch.linspace(-3, 3, 64).view(2, 32)
    x[1, 5] = NAN
    weights = ExpertWeights(
        Dense(gate_up.to(subject.dtype)), Dense(down.to(subject.dtype)), clamped=ClampedGate(2.0, 1.5)
    )
    out = experts_of(subject, x.to(subject.dtype), torch.zeros(2, 1).to(subject.dtype), weights).cpu()
    assert out[1].isnan().all() and out[0].isfinite().all()


@pytest.mark.parametrize("size", [40, 1024])
def test_add_scored_adds_a_share_of_each_token(subject: Subject, size: int) -> None:
    x, y, inputs = (torch.randn(5, size).to(subject.dtype) for _ in range(3))
    weight = (torch.randn(size) * 4 / size**0.5).to(subject.dtype)
    inputs[3] *= 50  # a score of 0 or 1
    inputs[4, 7] = NAN
    scores = torch.sigmoid(inputs.double() @ weight.double()).unsqueeze(1)
    for addend in (None, torch.randn(5, 16)):
        if addend is not None:
            scores = torch.sigmoid(inputs.double() @ weight.double() + addend[:, 0]).unsqueeze(1)
        on_device = (t.to(subject.device, copy=True) for t in (x, y, inputs, weight))
        out = subject.kernels.add_scored(*on_device, None if addend is None else addend.to(subject.device))
        assert out[4].isnan().all()
        close(out[:4], (x.double() + scores * y.double())[:4], subject.dtype)


def test_each_pair_has_the_matrices_of_its_token_and_its_expert(subject: Subject) -> None:
    logits, slots = torch.randn(40, 7).to(subject.dtype), torch.arange(40, dtype=torch.int32) % 4 - 1
    routes = subject.kernels.route(logits.to(subject.device), 3, True)
    found = subject.kernels.pair_slots(slots.to(subject.device), routes).tolist()
    experts = [e for e, (start, end) in enumerate(pairwise(routes.offsets.tolist())) for _ in range(start, end)]
    own = [int(slots[pair // 3]) for pair in routes.pairs_P.tolist()]
    assert found == [-1 if slot < 0 else slot * 7 + expert for slot, expert in zip(own, experts, strict=True)]


@pytest.mark.parametrize(("inputs", "ends"), [(64, (32, 48, 176)), (2064, (1104,)), (40, (20, 33))])
def test_adapt_multiplies_each_token_by_the_matrices_of_its_adapter_alone(
    subject: Subject, inputs: int, ends: tuple[int, ...]
) -> None:
    """The numbers behind an adapter's rank, and those of an adapter that no other token has, are NaN."""
    slots = torch.tensor([1, -1, 0, 2, 0, 1, -1], dtype=torch.int32)
    ranks = torch.tensor([[5, 0, 1][: len(ends)], [8, 3, 6][: len(ends)], [8] * len(ends)], dtype=torch.int32)
    x = (torch.randn(len(slots), inputs) * inputs**-0.5).to(subject.dtype)
    down, up = torch.randn(3, len(ends) * 8, inputs).to(subject.dtype), torch.randn(3, 8, ends[-1]).to(subject.dtype)
    expected = torch.full((len(slots), ends[-1]), -0.0, dtype=torch.float64)
    down[2] = NAN
    for slot, of in enumerate(ranks[:2].tolist()):
        for part, (start, end) in enumerate(pairwise((0, *ends))):
            own = slice(part * 8, part * 8 + of[part])
            delta = down[slot, own].double().T @ up[slot, : of[part], start:end].double()
            expected[slots == slot, start:end] = x[slots == slot].double() @ delta + (0.0 if of[part] else -0.0)
            down[slot, own.stop : part * 8 + 8] = NAN
            up[slot, of[part] :, start:end] = NAN
    on_device = (t.to(subject.device) for t in (down, up, ranks, torch.tensor(ends, dtype=torch.int32)))
    matrices = AdapterMatrices(*on_device, ends)
    out = subject.kernels.adapt(x.to(subject.device), slots.to(subject.device), matrices).cpu()
    assert out.dtype == torch.float32 and out[3].isnan().all()
    assert out[slots < 0].view(torch.int32).eq(-(2**31)).all()  # -0
    known = slots < 2
    close(out[known].to(subject.dtype), expected[known], subject.dtype)
    for token in range(len(slots)):
        single = subject.kernels.adapt(x[token : token + 1].to(subject.device), slots[token : token + 1], matrices)
        assert torch.equal(single.cpu().view(torch.int32)[0], out[token].view(torch.int32))


def test_adapt_adds_the_bias_of_each_tokens_adapter_also_where_there_are_no_matrices(subject: Subject) -> None:
    slots = torch.tensor([1, -1, 0, 2], dtype=torch.int32)
    ranks = torch.tensor([[4, 0], [0, 0], [0, 3]], dtype=torch.int32)
    x, bias = torch.randn(4, 64).to(subject.dtype), torch.randn(3, 96)
    down, up = torch.randn(3, 8, 64).to(subject.dtype), torch.randn(3, 4, 96).to(subject.dtype)
    on_device = (t.to(subject.device) for t in (down, up, ranks, torch.tensor([32, 96], dtype=torch.int32)))
    matrices = AdapterMatrices(*on_device, (32, 96))
    x, slots = x.to(subject.device), slots.to(subject.device)
    plain = subject.kernels.adapt(x, slots, matrices).cpu()
    found = subject.kernels.adapt(x, slots, replace(matrices, bias=bias.to(subject.device))).cpu()
    assert found[1].view(torch.int32).eq(-(2**31)).all() and torch.equal(found[0], bias[1])
    torch.testing.assert_close(found, plain + torch.stack([bias[1], torch.zeros(96), bias[0], bias[2]]))


@pytest.mark.parametrize("width", [128, 20])
def test_adapt_embeddings_adds_the_product_of_each_tokens_id(subject: Subject, width: int) -> None:
    ids, slots = torch.tensor([3, 0, 8, 3, 5, 3]), torch.tensor([0, 1, -1, 1, 2, 0])
    ranks = torch.tensor([[5], [16], [0]], dtype=torch.int32)
    x = torch.randn(6, width).to(subject.dtype)
    down, up = torch.randn(3, 9, 16).to(subject.dtype), torch.randn(3, 16, width).to(subject.dtype)
    expected = x.double()
    for token, (id_, slot) in enumerate(zip(ids.tolist(), slots.tolist(), strict=True)):
        if slot >= 0:
            own = int(ranks[slot])
            expected[token] += down[slot, id_, :own].double() @ up[slot, :own].double()
    up[0, 5:], up[2], down[1, 8], down[2] = NAN, NAN, NAN, NAN
    on_device = (t.to(subject.device) for t in (down, up, ranks, torch.tensor([width], dtype=torch.int32)))
    matrices = AdapterMatrices(*on_device, (width,))
    given = [t.to(subject.device) for t in (x, ids.int(), slots.int())]
    out = subject.kernels.adapt_embeddings(given[0], given[1], given[2], matrices).cpu()
    assert out.dtype == subject.dtype and torch.equal(out[[2, 4]], x[[2, 4]])
    close(out, expected, subject.dtype)


@pytest.mark.parametrize("size", [20] + [4096] * GPU)
def test_embed_picks_rows(subject: Subject, size: int) -> None:
    weight = torch.randn(9, size).to(subject.dtype)
    # A program of Triton's kernel has one row, however many there are.
    ids = torch.randint(0, 9, (70 if subject.interpreted else 1030,), dtype=torch.int32)
    assert torch.equal(subject.kernels.embed(ids.to(subject.device), weight.to(subject.device)).cpu(), weight[ids])


def test_a_step_places_its_slots_and_advances_its_rows_and_no_others(subject: Subject) -> None:
    count, width = 1030, 9
    rows = torch.randperm(count + 5)[:count].to(torch.int32)
    lengths = torch.randint(1, width, (count + 5,), dtype=torch.int32)
    history, table = (torch.randint(0, 10**6, (count + 5, width), dtype=torch.int32) for _ in range(2))
    slots, ids = (torch.randint(0, 2**31 - 1, (count,), dtype=torch.int32) for _ in range(2))
    on_device = [t.to(subject.device, copy=True) for t in (rows, slots, history, table, lengths)]
    placed = subject.kernels.place(*on_device)
    before = lengths[rows]
    for actual, expected in zip(placed, (history[rows, before - 1], before - 1, before), strict=True):
        assert actual.dtype == torch.int32 and torch.equal(actual.cpu(), expected)
    table[rows, before - 1] = slots
    rows_, _, history_, table_, lengths_ = on_device
    assert torch.equal(table_.cpu(), table) and torch.equal(history_.cpu(), history)
    subject.kernels.advance(history_, lengths_, rows_, ids.to(subject.device))
    history[rows, before] = ids
    lengths[rows] += 1
    assert torch.equal(history_.cpu(), history) and torch.equal(lengths_.cpu(), lengths)


def test_nothing_of_the_interface_is_missing(subject: Subject) -> None:
    names = [name for name in vars(Kernels) if not name.startswith("_")]
    assert "attend" in names
    assert [name for name in names if not callable(getattr(subject.kernels, name, None))] == []


def test_gates_that_are_closed_let_nothing_through(subject: Subject) -> None:
    gate = torch.tensor([-50.0, -80, -89, -120, -177.5, -1e3, -1e4, 90, 1e3, 1e4, 0, -0.0, -1, 1, -15, 15])
    up = torch.full_like(gate, 0.5)
    gate_up = torch.cat([gate, up]).to(subject.dtype).unsqueeze(0)
    out = subject.kernels.silu_mul(gate_up.to(subject.device))
    close(out, torch.nn.functional.silu(gate_up[:, :16].double()) * 0.5, subject.dtype)
