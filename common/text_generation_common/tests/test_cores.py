from pathlib import Path

from text_generation_common.cores import usable_cores


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
