"""Where sockets and locks lie, and which places are refused: other users' files, folders open to other users, files of
other programs."""

import errno
import fcntl
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from text_generation_common import places
from text_generation_common.errors import AddressInUse, ArgumentValidation, CommandError
from text_generation_common.places import ServerPlace, chosen, find_master_socket, of_port
from text_generation_common.tests.slowness import Seconds, assert_within
from text_generation_launcher.claims import CLEANING_S, claim_sockets

NOBODY, SOMEBODY = 4001, 4002
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two other users")


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A runtime directory with a short path, because socket paths must be short."""
    folder = Path(tempfile.mkdtemp(prefix="run-"))
    yield folder
    shutil.rmtree(folder)


def in_a_child(user: int, code: str) -> str:
    """Runs `code` as another user, and returns its output. `places`, `claim_sockets` and CommandError are imported."""
    script = f"""
import os, socket, sys
from pathlib import Path
from text_generation_common import places
from text_generation_launcher.claims import claim_sockets
from text_generation_common.errors import CommandError
os.setgid({user}); os.setuid({user})
try:
    {code}
except CommandError as error:
    print(error.reason)
"""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def refusal(place: ServerPlace) -> str:
    with pytest.raises(CommandError) as refused, claim_sockets(place):
        pass
    assert "\n" not in refused.value.reason and place.advice in refused.value.reason
    return refused.value.reason


def bind(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)


def test_a_parent_that_has_vanished_is_told(runtime_dir: Path) -> None:
    place = of_port(3000, str(runtime_dir))
    runtime_dir.rmdir()
    try:
        with pytest.raises(FileNotFoundError):
            place.make()
    finally:
        runtime_dir.mkdir()


def test_the_folder_is_the_port_s_and_private(runtime_dir: Path) -> None:
    place = of_port(3000, str(runtime_dir))
    assert place.prefix == f"{runtime_dir}/tgi-py/3000/shard"
    assert (place.socket(1), place.lock) == (f"{place.prefix}-1", f"{place.prefix}.lock")
    with claim_sockets(place):
        for folder in (runtime_dir / "tgi-py", runtime_dir / "tgi-py" / "3000"):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(os.stat(place.lock).st_mode) == 0o600
    assert os.listdir(runtime_dir) == []


@pytest.mark.parametrize("given", ["", "relative", "/no/such/folder", "/dev/null"])
def test_without_a_runtime_directory_of_the_user_the_folder_is_in_tmp(given: str) -> None:
    assert of_port(3000, given).prefix == f"/tmp/tgi-py-{os.geteuid()}/3000/shard"


@as_root
def test_a_runtime_directory_of_another_user_is_ignored(runtime_dir: Path) -> None:
    os.chown(runtime_dir, SOMEBODY, SOMEBODY)
    assert of_port(3000, str(runtime_dir)).prefix == "/tmp/tgi-py-0/3000/shard"


def test_two_ports_are_two_places_and_one_place_is_claimed_once(runtime_dir: Path) -> None:
    first = of_port(3000, str(runtime_dir))
    with claim_sockets(first), claim_sockets(of_port(3001, str(runtime_dir))):
        assert f"is in use by the launcher with pid {os.getpid()}: choose another --port" in refusal(first)
    assert os.listdir(runtime_dir) == []


def test_a_prefix_that_the_user_chose_is_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = chosen("s")
    assert (place.prefix, place.folder) == (str(tmp_path / "s"), None)
    with claim_sockets(place):
        assert os.listdir(tmp_path) == ["s.lock"]
    assert tmp_path.is_dir() and os.listdir(tmp_path) == []


def test_a_socket_path_that_the_kernel_cannot_hold_is_refused(tmp_path: Path) -> None:
    fits = "/tmp/" + "s" * 94  # 107 bytes with the "-0.steps" of the first rank
    chosen(fits).check_length(10)
    for place in (chosen(fits + "s"), chosen(fits)):
        with pytest.raises(ArgumentValidation, match="has more than 107 bytes: choose another --shard-uds-path"):
            place.check_length(11)
    long = tmp_path / ("r" * 80)
    long.mkdir()
    with pytest.raises(ArgumentValidation, match=r"--shard-uds-path in a folder of your own"):
        of_port(3000, str(long)).check_length(1)


@pytest.mark.parametrize("where", ["tgi-py", "tgi-py/3000"])
def test_a_folder_that_is_open_or_a_link_or_a_file_is_refused(runtime_dir: Path, where: str) -> None:
    place = of_port(3000, str(runtime_dir))
    squatted = runtime_dir / where
    squatted.parent.mkdir(exist_ok=True, mode=0o700)
    squatted.mkdir()
    squatted.chmod(0o770)
    assert f"{squatted} is open to other users (mode 770)" in refusal(place)
    squatted.rmdir()
    (runtime_dir / "elsewhere").mkdir(mode=0o700)
    squatted.symlink_to(runtime_dir / "elsewhere")
    assert f"{squatted} is not a folder" in refusal(place)
    squatted.unlink()
    squatted.touch()
    assert f"{squatted} is not a folder" in refusal(place)


@as_root
@pytest.mark.parametrize("where", ["tgi-py", "tgi-py/3000"])
def test_a_folder_of_another_user_is_refused(runtime_dir: Path, where: str) -> None:
    (runtime_dir / "tgi-py").mkdir(mode=0o700)
    (runtime_dir / where).mkdir(exist_ok=True, mode=0o700)
    os.chown(runtime_dir / where, SOMEBODY, SOMEBODY)
    reason = refusal(of_port(3000, str(runtime_dir)))
    assert f"{runtime_dir / where} belongs to another user (uid {SOMEBODY})" in reason


@as_root
def test_files_of_other_users_in_a_shared_folder_are_refused_in_one_line(runtime_dir: Path) -> None:
    """One user has made the files, and another user starts the launcher. Neither is root."""
    runtime_dir.chmod(0o1777)
    prefix = f"{runtime_dir}/s"
    claim = f"with claim_sockets(places.chosen({prefix!r})): print(1)"
    assert in_a_child(NOBODY, claim) == "1"
    advice = "choose another --shard-uds-path"
    for squat, expected in (
        (f"open({prefix!r} + '.lock', 'w').close()", f"cannot open {prefix}.lock (Permission denied): {advice}"),
        (f"os.symlink('/etc/passwd', {prefix!r} + '.lock')", f"cannot open {prefix}.lock"),
        (
            f"socket.socket(socket.AF_UNIX).bind({prefix!r} + '-0')",
            f"cannot remove {prefix}-0 (Operation not permitted; it belongs to uid {SOMEBODY}): {advice}",
        ),
        (f"open({prefix!r} + '-2.rendezvous', 'w').close()", f"cannot remove {prefix}-2.rendezvous"),
        (f"os.mkdir({prefix!r} + '-0')", f"{prefix}-0 is in the way and is not a file of a server"),
    ):
        in_a_child(SOMEBODY, squat)
        told = in_a_child(NOBODY, claim)
        assert told.startswith(expected) and "\n" not in told, (squat, told)
        for left in runtime_dir.iterdir():
            left.rmdir() if left.is_dir() and not left.is_symlink() else left.unlink()


@as_root
def test_no_other_user_reaches_a_socket_in_the_folder(runtime_dir: Path) -> None:
    runtime_dir.chmod(0o777)
    place = of_port(3000, str(runtime_dir))
    with claim_sockets(place), socket.socket(socket.AF_UNIX) as shard:
        shard.bind(place.socket(0))
        os.chmod(place.socket(0), 0o777)
        shard.listen()
        connect = f"print(socket.socket(socket.AF_UNIX).connect_ex({place.socket(0)!r}))"
        assert in_a_child(SOMEBODY, connect) == str(errno.EACCES)
        assert in_a_child(0, connect) == "0"


@as_root
def test_another_user_s_lock_file_with_open_permissions_is_not_used(runtime_dir: Path) -> None:
    place = chosen(f"{runtime_dir}/s")
    Path(place.lock).write_text("theirs")
    os.chown(place.lock, SOMEBODY, SOMEBODY)
    os.chmod(place.lock, 0o666)
    assert f"it belongs to another user, uid {SOMEBODY}" in refusal(place)
    assert Path(place.lock).read_text() == "theirs"


def test_a_lock_file_that_is_a_hard_link_or_a_pipe_is_not_written_to(tmp_path: Path) -> None:
    place, precious = chosen(str(tmp_path / "s")), tmp_path / "precious"
    precious.write_text("mine")
    os.link(precious, place.lock)
    assert "it is not a lock file" in refusal(place)
    assert precious.read_text() == "mine"
    os.unlink(place.lock)
    os.mkfifo(place.lock)
    assert "it is not a lock file" in refusal(place)


def test_a_user_s_file_with_the_name_of_a_socket_is_not_removed(tmp_path: Path) -> None:
    precious = tmp_path / "s-0"
    precious.write_text("mine")
    assert f"{precious} is in the way" in refusal(chosen(str(tmp_path / "s")))
    assert precious.read_text() == "mine" and os.listdir(tmp_path) == ["s-0"]


def test_files_of_a_killed_launcher_and_janitor_are_removed_by_the_next_launcher_on_any_port(runtime_dir: Path) -> None:
    def leave(place: ServerPlace) -> None:
        place.make()
        Path(place.lock).touch()
        bind(place.socket(0))
        bind(place.socket(3))  # The killed server may have had more shards.
        Path(f"{place.prefix}-7.rendezvous").touch()

    same, other, empty = (of_port(port, str(runtime_dir)) for port in (3000, 3001, 3002))
    leave(same)
    leave(other)
    empty.make()
    with claim_sockets(same):
        assert os.listdir(runtime_dir / "tgi-py") == ["3000"]
        assert os.listdir(runtime_dir / "tgi-py" / "3000") == ["shard.lock"]
    assert os.listdir(runtime_dir) == []


def lock_of(place: ServerPlace, pid: int) -> int:
    """The lock of `place`, held by this process, with `pid` in the lock file as the launcher's pid."""
    place.make()
    lock = os.open(place.lock, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, str(pid).encode())
    return lock


def test_a_launcher_waits_for_the_janitor_of_a_dead_launcher(runtime_dir: Path) -> None:
    place, dead = of_port(3000, str(runtime_dir)), subprocess.Popen([sys.executable, "-S", "-c", ""])
    dead.wait()
    janitor = threading.Timer(0.5, os.close, [lock_of(place, dead.pid)])
    janitor.start()
    with claim_sockets(place):
        janitor.join()


def test_a_launcher_does_not_wait_for_a_living_launcher(runtime_dir: Path) -> None:
    place = of_port(3000, str(runtime_dir))
    lock = lock_of(place, os.getpid())

    def refuse() -> None:
        assert f"is in use by the launcher with pid {os.getpid()}" in refusal(place)

    assert_within(lambda: Seconds.of(refuse), clock=CLEANING_S / 5)
    os.close(lock)


def test_the_sweep_leaves_living_servers_and_unknown_files_alone(runtime_dir: Path) -> None:
    living, strange = of_port(3001, str(runtime_dir)), of_port(3002, str(runtime_dir))
    with claim_sockets(living):
        bind(living.socket(0))
        strange.make()
        assert strange.folder is not None
        (strange.folder / "note").touch()
        with claim_sockets(of_port(3000, str(runtime_dir))):
            assert sorted(os.listdir(living.folder)) == ["shard-0", "shard.lock"]  # type: ignore[type-var]
            assert os.listdir(strange.folder) == ["note"]


def test_a_server_is_found_by_its_port_from_any_environment(runtime_dir: Path) -> None:
    assert find_master_socket(3000, str(runtime_dir)) == of_port(3000, str(runtime_dir)).socket(0)
    with claim_sockets(of_port(3000, str(runtime_dir))) as _:
        bind(of_port(3000, str(runtime_dir)).socket(0))
        assert find_master_socket(3000, str(runtime_dir)) == of_port(3000, str(runtime_dir)).socket(0)
    in_tmp = of_port(1, "")
    with claim_sockets(in_tmp):
        bind(in_tmp.socket(0))
        assert find_master_socket(1, str(runtime_dir)) == in_tmp.socket(0)


def test_a_server_is_not_looked_for_in_a_folder_that_others_may_write_to(runtime_dir: Path) -> None:
    place = of_port(3000, str(runtime_dir))
    place.make()
    bind(place.socket(0))
    assert place.folder is not None
    place.folder.chmod(0o777)
    with pytest.raises(AddressInUse, match="is open to other users"):
        find_master_socket(3000, str(runtime_dir))


def test_launchers_that_start_and_end_do_not_hinder_each_other(runtime_dir: Path) -> None:
    """A launcher that ends removes folders while another launcher is about to use them."""
    code = f"""
from text_generation_launcher.claims import claim_sockets
from text_generation_common.places import of_port
for _ in range(300):
    with claim_sockets(of_port(PORT, {str(runtime_dir)!r})):
        pass
"""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    running = [
        subprocess.Popen([sys.executable, "-c", code.replace("PORT", port)], env=environ, stderr=subprocess.PIPE)
        for port in ("3000", "3001", "3002")
    ]
    for process in running:
        _, complaint = process.communicate(timeout=120)
        assert process.returncode == 0, complaint.decode()
    with suppress(FileNotFoundError):
        assert os.listdir(runtime_dir / "tgi-py") == []


def test_length_is_counted_in_bytes() -> None:
    assert places.MAX_SOCKET_PATH_BYTES == 107
    with pytest.raises(ArgumentValidation):
        chosen("/tmp/" + "é" * 60).check_length(1)
