"""On machines that lack something, the launcher runs anyway or ends at once with one line that names the missing
thing."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from text_generation_common.tests.slowness import Seconds, assert_within

ENDED_S = 5.0


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"{options},mode=700", "tmpfs", folder], capture_output=True)
    if made.returncode != 0:
        pytest.skip("only root may mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that has no byte left."""
    with mounted(tmp_path / "full", "size=4k") as folder:
        with pytest.raises(OSError, match="No space left"):
            (folder / "fill").write_bytes(bytes(1 << 20))
        yield folder


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "fixed", "ro") as folder:
        yield folder


def refused(site, **environ: str) -> str:
    launches = []

    def start_and_end() -> None:
        launches.append(site.launch_in_runtime_dir("-p", "0", **environ))
        assert launches[-1].end() == 1

    assert_within(lambda: Seconds.of(start_and_end), clock=ENDED_S)
    stderr = launches[-1].stderr
    assert stderr.startswith("error: ") and stderr.count("\n") == 2
    assert site.events("start") == []
    return stderr


def test_a_read_only_runtime_directory_is_named(site, read_only):
    assert f"cannot make the folder {read_only}/tgi-py (Read-only file system)" in refused(
        site, XDG_RUNTIME_DIR=str(read_only)
    )


def test_a_runtime_directory_that_takes_no_folders_is_named(site):
    assert re.search(r"/proc/tgi-py.*\(No such file or directory\)", refused(site, XDG_RUNTIME_DIR="/proc"))


def test_a_full_disk_under_the_sockets_is_named(site, full_disk):
    """On a full disk two shards could not write their rendezvous file, so the launcher refuses to start."""
    assert re.search(
        r"cannot write .*/shard.lock \(No space left on device\)", refused(site, XDG_RUNTIME_DIR=str(full_disk))
    )
    assert os.listdir(full_disk) == ["fill"]


def test_a_server_starts_without_a_folder_for_temporary_files(site):
    assert site.launch(TMPDIR="/no/such/folder").ready().end(signal.SIGTERM) == 0


def test_a_soft_limit_of_open_files_is_raised(site):
    site.launch(FAKE_OPEN_FILES="64,256").ready()
    for entry in site.events("start"):
        if entry["role"] != "download":
            (line,) = re.findall(r"Max open files +(\d+) +(\d+)", Path(f"/proc/{entry['pid']}/limits").read_text())
            assert line == ("136", "256")


@pytest.mark.parametrize("hard", [32, 135])
def test_a_hard_limit_of_open_files_that_is_too_low_is_named(site, hard):
    assert f"may have {hard} open files, and 136 are needed" in refused(site, FAKE_OPEN_FILES=f"{hard},{hard}")
