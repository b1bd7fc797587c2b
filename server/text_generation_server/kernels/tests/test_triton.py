"""Tests of parts that only the Triton kernels have: tables of tiles, splits, runs found on the device, 64-bit slots."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from text_generation_server.kernels import reference
from text_generation_server.kernels.interface import KvLayer, Segments

triton = pytest.importorskip("triton", reason="triton is not installed: pip install triton")
tl = triton.language

from text_generation_server.kernels.triton.attend_decode import MAX_SPLITS, attend_decode_tiled  # noqa: E402
from text_generation_server.kernels.triton.attend_prefill import attend_prefill_tiled  # noqa: E402
from text_generation_server.kernels.triton.tiles import slot_offset  # noqa: E402
from text_generation_server.kernels.triton.tuning import FOLDER, Tile, TunedRow, find_tile, read_rows  # noqa: E402

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


def one_row(length: int) -> tuple[Tensor, KvLayer, Tensor]:
    torch.manual_seed(length)
    q = torch.randn(length, 2, 16, device=DEVICE)
    table = torch.randperm(length, device=DEVICE).to(torch.int32).unsqueeze(0)
    return q, KvLayer(torch.randn(length + 1, 2, 16, device=DEVICE)), table


@pytest.mark.parametrize("length", [1, 16, 17, 16 * MAX_SPLITS, 16 * MAX_SPLITS + 1, 16 * MAX_SPLITS + 40])
def test_splits_grow_where_a_row_would_have_too_many(length: int) -> None:
    q, kv, table = one_row(16 * MAX_SPLITS + 40)
    rows, lengths = (torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (0, length))
    out = attend_decode_tiled(q[:1], kv, table, rows, lengths, 0.3, Tile(warps=4, columns=16, split=16))
    expected = reference.attend_decode(q[:1], kv, table, rows, lengths, 0.3)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_each_of_hundreds_of_runs_is_found() -> None:
    q, kv, _ = one_row(300)
    counts = [1] * 200 + [3, 40, 1, 17]
    ends = [1 + i % 3 for i in range(200)] + [3, 140, 9, 17]
    table = torch.randint(0, 300, (len(counts), 140), device=DEVICE).to(torch.int32)
    runs = tuple((row, end - count, end) for row, (count, end) in enumerate(zip(counts, ends, strict=True)))
    rows, starts, _ = torch.tensor(runs, dtype=torch.int32, device=DEVICE).T.contiguous()
    offsets = torch.tensor([0, *counts], device=DEVICE).cumsum(0, dtype=torch.int32)
    segments = Segments(rows, starts, offsets, runs)
    out = attend_prefill_tiled(q, kv, table, segments, 0.3, Tile(warps=4, rows=16, columns=16))
    torch.testing.assert_close(out, reference.attend_prefill(q, kv, table, segments, 0.3), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str
)
def test_every_kernel_has_a_tile_for_every_shape_and_type(kernel: str, dtype: torch.dtype) -> None:
    for head_size in (16, 80, 128, 256):
        assert find_tile(kernel, 5, head_size, dtype, torch.device("cpu")).warps in (1, 2, 4, 8, 16)


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


def test_tiles_are_not_measured_where_there_is_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, and measuring takes minutes")
    command = [sys.executable, "-m", "text_generation_server.kernels.triton.tune", "--write"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1 and result.stderr.count("\n") == 1 and "no GPU" in result.stderr
