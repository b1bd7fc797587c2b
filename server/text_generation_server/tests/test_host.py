from pathlib import Path

from text_generation_server import host

GIB = 1 << 30


def test_without_limits_all_cores_of_the_machine_count(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert host.usable_cores(tmp_path) == host.usable_cores(tmp_path / "nothing") >= 1
    assert host.available_bytes(tmp_path) > 0


def test_a_quota_of_time_counts_as_cores(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert host.usable_cores(tmp_path) == 1
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert host.usable_cores(tmp_path) == host.usable_cores(tmp_path / "nothing")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("20000\n")
    assert host.usable_cores(tmp_path) == 1


def test_files_that_were_read_do_not_count_as_used(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{3 * GIB - 1000}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 2}\nactive_file 7\n")
    assert host.available_bytes(tmp_path) == GIB // 2 + 1000
