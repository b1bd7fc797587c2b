import resource
from pathlib import Path

import pytest

from text_generation_common.memory import free_bytes, usable_cores

GIB = 1 << 30


def test_without_limits_the_machine_s_memory_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(tmp_path) > 0


def test_files_that_were_read_do_not_count_as_used(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{3 * GIB - 1000}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 2}\nactive_file 7\n")
    assert free_bytes(tmp_path) == GIB // 2 + 1000


def test_what_a_limited_address_space_leaves_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = mapped + 100 * 2**20
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, resource.RLIM_INFINITY))
    assert 0 < free_bytes(tmp_path) <= 100 * 2**20
    limit = 5
    assert free_bytes(tmp_path) == 0


def test_without_limits_all_cores_of_the_machine_count(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) == usable_cores(tmp_path / "nothing") >= 1


def test_a_quota_of_time_counts_as_cores(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(tmp_path) == 1
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == usable_cores(tmp_path / "nothing")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("20000\n")
    assert usable_cores(tmp_path) == 1
