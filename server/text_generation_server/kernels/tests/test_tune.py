"""Tuning without a GPU: which tiles are measured, on what, and what a compiled kernel's machine code shows."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from text_generation_server.kernels.interface import KvLayer

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from text_generation_server.kernels.triton import compile_all, compiling, tune
from text_generation_server.kernels.triton.compiling import (
    CANDIDATES,
    AttentionShape,
    Compiled,
    fault,
    jobs,
    table_jobs,
)
from text_generation_server.kernels.triton.tuning import Tile, TunedRow, read_rows

BF16 = torch.bfloat16
CPU = torch.device("cpu")
SHAPE = AttentionShape(90, BF16, BF16, 4, 128)
TILE = Tile(warps=4, stages=3, rows=64, columns=64)
SPILLS = compiling.MachineCode(255, 64, 900, 8, (compiling.Loop(300, 64, 2),))
CLEAN = compiling.MachineCode(168, 64, 900, 8, (compiling.Loop(20, 0, 0), compiling.Loop(300, 64, 0)))
LISTING = """\
.text._attend_split:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   STL [R1], R2 ;
.L_x_0:
        /*0020*/                   LDL R2, [R1] ;
        /*0030*/                   MUFU.EX2 R4, R8 ;
.L_x_1:
        /*0040*/                   IADD3 R3, R3, 0x1, RZ ;
        /*0050*/              @!P1 BRA `(.L_x_1) ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0070*/               @P0 BRA `(.L_x_0) ;
        /*0080*/                   EXIT ;
.L_x_2:
        /*0090*/                   BRA `(.L_x_2);
"""


def test_spills_and_exponentials_are_counted_in_the_innermost_loops() -> None:
    code = compiling.parse(LISTING, 168, 8)
    assert (code.registers, code.stack, code.instructions, code.spills) == (168, 8, 10, 2)
    assert code.loops == (compiling.Loop(2, 0, 0),)
    only_outer = compiling.parse(LISTING.replace("@!P1 BRA `(.L_x_1)", "NOP"), 168, 8)
    assert only_outer.loops == (compiling.Loop(6, 1, 1),)
    assert only_outer.tiles == [6] and only_outer.spills_in_loops == 1


def test_tiles_that_a_gpu_runs_badly_or_not_at_all_are_not_measured() -> None:
    tiles = [replace(TILE, columns=columns) for columns in (16, 32, 64, 128)]
    good, large, spilling, refused = (Compiled("attend_prefill", SHAPE, tile, 98_816, CLEAN) for tile in tiles)
    large = replace(large, shared=(227 << 10) + 1)
    spilling = replace(spilling, code=SPILLS)
    refused = replace(refused, error="not compiled")
    assert tune.usable_tiles([good, large, spilling, refused]) == {"attend_decode": [], "attend_prefill": [good.tile]}
    ampere = replace(good, shape=replace(SHAPE, capability=86), shared=(99 << 10) + 1)
    assert fault(good) is None and fault(ampere) is not None


def test_all_workloads_have_equal_weight() -> None:
    tiles = [replace(TILE, columns=columns) for columns in (16, 32)]
    times = {("short", 16): 1.0, ("short", 32): 2.0, ("long", 16): 1000.0, ("long", 32): 600.0}

    def measure(call: tune.Call, tile: Tile) -> float:
        return times[str(call(tile)), tile.columns]

    assert tune.best_tile([lambda _: "short", lambda _: "long"], tiles, measure) == tiles[0]
    assert tune.best_tile([lambda _: "long"], tiles, measure) == tiles[1]


@pytest.mark.parametrize("cache", [torch.float32, torch.int8], ids=str)
def test_what_is_measured_is_attention(monkeypatch: pytest.MonkeyPatch, cache: torch.dtype) -> None:
    shape = AttentionShape(90, torch.float32, cache, 2, 16, kv_heads=1)
    made: list[KvLayer] = []
    cached = tune.cached

    def cache_of(*arguments: object) -> KvLayer:
        made.append(cached(*arguments))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(tune, "cached", cache_of)
    monkeypatch.setattr(tune, "TABLE_WIDTH", 64)
    measured = tune.decode(shape, 2, 20, CPU, cold_bytes=2 * 41 * 2 * 16 * cache.itemsize)
    out = measured(Tile(warps=4, columns=16, split=16))
    assert isinstance(out, torch.Tensor) and out.isfinite().all() and len(made) == 2
    out = tune.prefill(shape, 5, 25, CPU)(Tile(warps=4, rows=16, columns=16))
    assert isinstance(out, torch.Tensor) and out.isfinite().all() and out.any(dim=2).all()


def test_tuned_rows_take_the_place_of_older_rows(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    old = [TunedRow("attend_decode", 4, size, "bfloat16", TILE) for size in (64, 128)]
    tune.add_rows(path, old)
    new = TunedRow("attend_decode", 4, 128, "bfloat16", replace(TILE, warps=8))
    tune.add_rows(path, [new])
    assert read_rows(path) == [old[0], new] and len(json.loads(path.read_text())) == 2


def test_tiles_are_not_measured_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, and measuring takes minutes")
    monkeypatch.setattr(sys, "argv", ["tune", "--write"])
    with pytest.raises(SystemExit, match=r"\Atune: .*no GPU.*\Z"):
        tune.main()


def test_every_tile_of_the_tuner_and_the_tables_is_compiled_for_a_shape() -> None:
    wanted = compile_all.shape_jobs(SHAPE)
    assert len(wanted) == len(set(wanted)) and set(table_jobs(SHAPE)) <= set(wanted)
    unsplit = {(kernel, replace(tile, split=0)) for kernel, _, tile in wanted}
    assert {(kernel, replace(tile, split=0)) for kernel, _, tile in jobs(SHAPE)} <= unsplit
    floats = replace(SHAPE, dtype=torch.float32, cache=torch.float32)
    assert compile_all.shape_jobs(floats) == table_jobs(floats)


def test_a_table_whose_tile_spills_fails_and_so_does_a_shape_without_tiles(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = compile_all.shape_jobs(SHAPE)
    good = [Compiled(*job, 98_816, CLEAN) for job in wanted]
    assert list(compile_all.report(SHAPE, good)) == []
    one = [replace(good[0], code=SPILLS), *good[1:]]
    assert len(list(compile_all.report(SHAPE, one))) == 1
    bad = [replace(each, code=SPILLS) if each.kernel == "attend_decode" else each for each in good]
    assert len(list(compile_all.report(SHAPE, bad))) == 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 * len(CANDIDATES) and all("168 registers" in line or "255" in line for line in lines)


TABLE_TILE = """
import torch
from text_generation_server.kernels.triton.compiling import fault, table_jobs
from text_generation_server.kernels.triton.compiling import AttentionShape, compile_attention
shape = AttentionShape({capability}, torch.{dtype}, torch.int8, 4, {head_size}, options=("{option}",))
(job,) = [job for job in table_jobs(shape) if job[0] == "{kernel}"]
print(fault(compile_attention(*job)))
"""


@pytest.mark.parametrize(
    ("kernel", "capability", "dtype", "head_size", "option"),
    [
        # With 64 keys in a tile, 30 accesses to spilled registers were in the loops of this kernel.
        pytest.param("attend_prefill", 100, "bfloat16", 96, "slopes_H", marks=pytest.mark.slow),
        # With 16 keys in a tile, the compiler gave this kernel 128 registers, and 2 accesses were in its loops.
        ("attend_decode", 80, "float32", 64, "softcap"),
    ],
)
def test_tiles_over_8_bit_keys_spill_no_register(
    kernel: str, capability: int, dtype: str, head_size: int, option: str
) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = TABLE_TILE.format(kernel=kernel, capability=capability, dtype=dtype, head_size=head_size, option=option)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, timeout=120, capture_output=True, text=True, check=True
    )
    assert done.stdout == "None\n"
