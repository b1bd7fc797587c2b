"""Tests of parts that only the Triton kernels have: tables of tiles, splits, runs found on the device, 64-bit slots."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from text_generation_server.kernels import reference
from text_generation_server.kernels.interface import AttentionOptions, KvLayer, Segments

triton = pytest.importorskip("triton", reason="triton is not installed: pip install triton")
tl = triton.language

from text_generation_server.kernels import triton as kernels  # noqa: E402
from text_generation_server.kernels.triton import attend_decode, attend_prefill  # noqa: E402
from text_generation_server.kernels.triton.attend_decode import (  # noqa: E402
    attend_decode_tiled,
    count_programs,
    max_splits,
)
from text_generation_server.kernels.triton.attend_prefill import attend_prefill_tiled  # noqa: E402
from text_generation_server.kernels.triton.interpreter import products_in_fixed_order  # noqa: E402
from text_generation_server.kernels.triton.layers import UnroundedProduct  # noqa: E402
from text_generation_server.kernels.triton.tiles import (  # noqa: E402
    attend_tile,
    prepare_queries,
    slot_offset,
    unpack,
)
from text_generation_server.kernels.triton.tuning import (  # noqa: E402
    FOLDER,
    Gpu,
    Tile,
    TunedRow,
    find_tile,
    find_tile_for,
    read_rows,
)
from text_generation_server.layers.linear import make_linear  # noqa: E402
from text_generation_server.layers.weights import dense  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn]
KERNELS = ["attend_decode", "attend_prefill", "embed", "rms_norm", "rope_and_store_kv", "silu_mul"]


@triton.jit
def _offsets(slots, out, SIZE: tl.constexpr):
    i = tl.arange(0, 4)
    tl.store(out + i, slot_offset(tl.load(slots + i), SIZE))


def test_slots_are_multiplied_in_64_bits() -> None:
    slots = torch.tensor([0, 1, 70_000, 2**31 - 1], dtype=torch.int32, device=DEVICE)
    out = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    _offsets[(1,)](slots, out, SIZE=70_000)
    assert out.tolist() == [0, 70_000, 4_900_000_000, (2**31 - 1) * 70_000]


@triton.jit
def _unpacked(numbers, out):
    i = tl.arange(0, 256)
    tl.store(out + i, unpack(tl.load(numbers + i)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_every_8_bit_number_becomes_the_same_float16(dtype: torch.dtype) -> None:
    """On a GPU this shows what its instructions do. The interpreter knows plain conversions only, and no 8-bit NaN."""
    numbers = torch.arange(-128, 128, device=DEVICE).to(torch.int8).view(dtype)
    out = torch.zeros(256, dtype=torch.float16, device=DEVICE)
    _unpacked[(1,)](numbers, out)
    expected = numbers.half()
    compared = expected.isfinite() if DEVICE.type == "cpu" else torch.ones_like(expected, dtype=torch.bool)
    torch.testing.assert_close(out[compared], expected[compared], rtol=0, atol=0, equal_nan=True)


@triton.jit
def _prepared(q, out, scales, M: tl.constexpr, D: tl.constexpr):
    m, d = tl.arange(0, M), tl.arange(0, D)
    at_MD = m[:, None] * D + d[None, :]
    q_MD, scale_M = prepare_queries(tl.load(q + at_MD), 0.25, True)
    tl.store(out + at_MD, q_MD)
    tl.store(scales + m, scale_M)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_queries_for_8_bits_are_scaled_exactly_into_the_range_of_float16(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    q = torch.randn(16, 16, device=DEVICE) * torch.tensor([0, 1e-4, 1, 9000.0] * 4, device=DEVICE).unsqueeze(1)
    q = q.to(dtype)
    out, scales = torch.empty_like(q), torch.empty(16, device=DEVICE)
    _prepared[(1,)](q, out, scales, M=16, D=16)
    assert torch.equal(out.double() * scales.double().unsqueeze(1), q.double() * 0.25)
    peaks = out.double().abs().amax(dim=1)
    assert (peaks[::4] == 0).all() and scales.gt(0).all()
    for first in (1, 2, 3):
        assert ((peaks[first::4] >= 2**14) & (peaks[first::4] < 2**15)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_chunk_of_8_bit_keys_has_the_same_bits_wherever_the_prompt_is_cut(dtype: torch.dtype) -> None:
    """The scales of the 8-bit values grow tenfold with every ten keys. A chunk that ends earlier does not see the
    largest scales."""
    torch.manual_seed(1)
    heads = torch.randint(-127, 128, (61, 2, 16), dtype=torch.int8, device=DEVICE)
    growth = 10.0 ** torch.arange(-5, 1, device=DEVICE).repeat_interleave(10)
    scales = torch.rand(61, 2, device=DEVICE) / 50 + 0.01
    scales[:60, 1] *= growth
    kv, q = KvLayer(heads, scales), torch.randn(60, 2, 16, device=DEVICE).to(dtype)
    table = torch.arange(60, dtype=torch.int32, device=DEVICE).unsqueeze(0)

    def fill(*starts: int) -> Tensor:
        out = torch.zeros_like(q)
        segments = Segments(int32(*[0] * len(starts)), int32(*starts), int32(*starts, 60), 60)
        attend_prefill_tiled(q, kv, table, segments, PLAIN, out, Tile(warps=4, rows=16, columns=16))
        return out

    with products_in_fixed_order():
        whole, cut = fill(0), fill(0, 7, 41)
    assert torch.equal(whole, cut)
    states = heads.double() * scales.double().unsqueeze(2)
    scores = torch.einsum("thd,ld->htl", q.double(), states[:60, 0]) * 0.3
    scores = scores.masked_fill(torch.ones(60, 60, device=DEVICE).triu(1).bool(), float("-inf"))
    expected = torch.einsum("htl,ld->thd", scores.softmax(dim=2), states[:60, 1])
    largest = expected.abs().amax(dim=2, keepdim=True)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(whole.double() / largest, expected / largest, atol=tolerance, rtol=tolerance)


def one_row(length: int) -> tuple[Tensor, KvLayer, Tensor]:
    torch.manual_seed(length)
    q = torch.randn(length, 2, 16, device=DEVICE)
    table = torch.randperm(length, device=DEVICE).to(torch.int32).unsqueeze(0)
    return q, KvLayer(torch.randn(length + 1, 2, 16, device=DEVICE)), table


TILE = Tile(warps=4, columns=16, split=16)  # splits of 16 keys
PLAIN = AttentionOptions(0.3)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def decode(
    q: Tensor, kv: KvLayer, table: Tensor, lengths: list[int], programs: int | None = None, tile: Tile = TILE
) -> Tensor:
    """Attention of queries of row 0 at these lengths."""
    out = torch.full_like(q[: len(lengths)], float("nan"))
    rows = int32(*[0] * len(lengths))
    attend_decode_tiled(q[: len(lengths)], kv, table, rows, int32(*lengths), PLAIN, out, tile, programs)
    return out


def expected(q: Tensor, kv: KvLayer, table: Tensor, lengths: list[int]) -> Tensor:
    rows = int32(*[0] * len(lengths))
    return reference.attend(q[: len(lengths)], kv, table, rows, int32(*lengths), None, PLAIN)


def test_splits_grow_where_a_row_would_have_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_decode, "MIN_MAX_SPLITS", 4)  # splits that are merged at a time
    monkeypatch.setattr(attend_decode, "MAX_ROW_PROGRAMS", 8)
    q, kv, table = one_row(168)
    assert max_splits(table, kv, TILE) == 8
    lengths = [1, 16, 17, 64, 65, 128, 129, 168]
    torch.testing.assert_close(decode(q, kv, table, lengths), expected(q, kv, table, lengths), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kv_heads", "most"), [(1, 256), (2, 128), (8, 32), (32, 32)])
def test_a_long_row_has_more_splits_where_there_are_few_key_heads(kv_heads: int, most: int) -> None:
    kv, tile = KvLayer(torch.empty(1, 2 * kv_heads, 16)), Tile(warps=4, columns=64, split=256)
    assert max_splits(torch.empty(1, 2**20), kv, tile) == most
    assert max_splits(torch.empty(1, 513), kv, tile) == 3


def test_any_number_of_programs_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of no, one, two and many splits."""
    monkeypatch.setattr(attend_decode, "ROWS_AT_ONCE", 4)
    lengths = [1, 200, 16, 17, 33, 3, 3, 3, 40, 0, 0]
    q, kv, table = one_row(200)
    with products_in_fixed_order():
        once = decode(q, kv, table, lengths, programs=100)
        torch.testing.assert_close(once, expected(q, kv, table, lengths), atol=1e-5, rtol=1e-5)
        for programs in (1, 7):
            assert torch.equal(decode(q, kv, table, lengths, programs), once)


@pytest.mark.parametrize("width", [1_000, 4_608, 8_192, 131_072])
def test_programs_are_as_many_as_the_device_runs_whatever_the_tables_width(width: int) -> None:
    splits = max_splits(torch.empty(1, width), KvLayer(torch.empty(1, 16, 16)), Tile(warps=4, columns=64, split=256))
    assert [8 * count_programs(rows, 8, splits, processors=132) for rows in (64, 256)] == [792, 792]
    assert count_programs(1, 8, splits, processors=132) == splits  # one row alone: each split has a program


def test_a_row_of_one_split_needs_no_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    q, kv, table = one_row(40)
    lengths = [1, 9, 16]
    merge = attend_decode._merge

    class NoMerge:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            nonlocal launched
            launched += 1
            return lambda *_, **__: None

    monkeypatch.setattr(attend_decode, "_merge", NoMerge())
    launched = 0
    whole = Tile(warps=4, columns=16, split=48)  # no row of this table has more than one split
    torch.testing.assert_close(decode(q, kv, table, [40, 16], tile=whole), expected(q, kv, table, [40, 16]))
    assert launched == 0
    torch.testing.assert_close(decode(q, kv, table, lengths), expected(q, kv, table, lengths))
    assert launched == 1
    monkeypatch.setattr(attend_decode, "_merge", merge)
    torch.testing.assert_close(decode(q, kv, table, [40, 16]), expected(q, kv, table, [40, 16]))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU's programs do not say how many tiles they have read")
@pytest.mark.parametrize("window", [1, 16, 40, None])
def test_tiles_that_are_read_follow_the_window_and_not_the_length(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []  # the first key of each tile

    def noted(*arguments: Any, first_key: Any, **named: Any) -> Any:
        begun.append(int(first_key))
        return attend_tile(*arguments, first_key=first_key, **named)

    for module in (attend_decode, attend_prefill):
        monkeypatch.setattr(module, "attend_tile", noted)
    options, (q, kv, table) = AttentionOptions(0.3, window=window), one_row(330)

    def tiles(first: int, last: int) -> list[int]:
        """The tiles of 16 keys that hold what the queries at first … last see."""
        return list(range(options.first_seen(first) // 16 * 16, last + 1, 16))

    for length in (1, 17, 330):
        begun.clear()
        attend_decode_tiled(q[:1], kv, table, int32(0), int32(length), options, torch.empty_like(q[:1]), TILE)
        assert sorted(begun) == tiles(length - 1, length - 1)
    begun.clear()
    tile, segments = Tile(warps=4, rows=16, columns=16), Segments(int32(0), int32(300), int32(0, 30), 30)
    attend_prefill_tiled(q, kv, table, segments, options, torch.empty_like(q), tile)
    # A program has 8 positions of 2 heads each.
    assert sorted(begun) == sorted(tiles(300, 307) + tiles(308, 315) + tiles(316, 323) + tiles(324, 329))


def test_each_of_hundreds_of_runs_is_found() -> None:
    q, kv, _ = one_row(300)
    counts = [1] * 200 + [3, 40, 1, 17]
    ends = [1 + i % 3 for i in range(200)] + [3, 140, 9, 17]
    table = torch.randint(0, 300, (len(counts), 140), device=DEVICE).to(torch.int32)
    starts = [end - count for count, end in zip(counts, ends, strict=True)]
    offsets = torch.tensor([0, *counts], device=DEVICE).cumsum(0, dtype=torch.int32)
    segments = Segments(int32(*range(len(counts))), int32(*starts), offsets, sum(counts))
    out = torch.zeros_like(q)
    attend_prefill_tiled(q, kv, table, segments, PLAIN, out, Tile(warps=4, rows=16, columns=16))
    wanted = reference.attend(q, kv, table, int32(), int32(), segments, PLAIN)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str
)
def test_every_kernel_has_a_tile_for_every_shape_and_type(kernel: str, dtype: torch.dtype) -> None:
    for head_size in (16, 80, 128, 256):
        assert find_tile(kernel, 5, head_size, dtype, torch.device("cpu")).warps in (1, 2, 4, 8, 16)


def test_a_gpus_own_table_comes_first_and_then_the_table_of_its_capability() -> None:
    names = [path.name for path in Gpu("NVIDIA H200", 90).tables]
    assert names == ["nvidia-h200.json", "sm_90.json", "default.json"]
    hopper, ada = (find_tile_for("attend_prefill", 4, 128, torch.bfloat16, Gpu("", n)) for n in (90, 89))
    assert hopper.stages > ada.stages and hopper.stages >= 5  # with 4, the loop waits for its loads
    assert ada == find_tile("attend_prefill", 4, 128, torch.bfloat16, torch.device("cpu"))


def test_tables_name_kernels_that_exist_and_tiles_that_triton_takes() -> None:
    for path in FOLDER.glob("*.json"):
        for row in read_rows(path):
            tile = row.tile
            assert row.kernel in KERNELS
            assert all(n & (n - 1) == 0 for n in (tile.rows, tile.columns, tile.warps))
            assert tile.split % tile.columns == 0 or row.kernel != "attend_decode"


def test_the_first_row_that_matches_counts() -> None:
    row = TunedRow("attend_decode", 4, "*", "bfloat16", Tile(warps=4))
    assert row.matches("attend_decode", 4, 128, "bfloat16")
    assert not row.matches("attend_decode", 8, 128, "bfloat16")
    assert not row.matches("attend_prefill", 4, 128, "bfloat16")
    wide = find_tile("attend_decode", 4, 256, torch.bfloat16, torch.device("cpu"))
    assert wide.columns < find_tile("attend_decode", 4, 128, torch.bfloat16, torch.device("cpu")).columns


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations on tensors of a GPU that torch only pretends to have."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_logits_are_float32_without_a_second_pass(dtype: torch.dtype, has_bias: bool) -> None:
    with FakeTensorMode(), Operations() as operations:
        weight, x = (torch.empty(n, 64, dtype=dtype, device="cuda") for n in (320, 3))
        bias = torch.empty(320, dtype=dtype, device="cuda") if has_bias else None
        linear = make_linear(kernels, dense(weight), bias, y_type=torch.float32)  # type: ignore[arg-type]
        operations.names.clear()
        logits = linear(x)
    assert (logits.dtype, logits.shape, logits.stride()) == (torch.float32, (3, 320), (320, 1))
    assert operations.names == ["aten::mm.dtype", *["aten::add_.Tensor"] * has_bias]


def test_all_other_products_of_numbers_are_torch_s() -> None:
    with FakeTensorMode():
        half, whole = (torch.empty(32, 64, dtype=t, device="cuda") for t in (torch.bfloat16, torch.float32))
        for weight, options in (
            (dense(half), {}),
            (dense(half), {"gated": True, "y_type": torch.float32}),
            (dense(whole), {"y_type": torch.float32}),
            (dense(whole), {"x_type": torch.float32, "y_type": torch.float32}),
            (dense(half), {"y_type": torch.float32, "factor": 0.5}),
        ):
            linear = kernels.linear(
                weight, None, **{"gated": False, "x_type": half.dtype, "y_type": half.dtype} | options
            )
            assert not isinstance(linear._multiply, UnroundedProduct)
