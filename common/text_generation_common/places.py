"""Chooses where a server's sockets, lock and rendezvous files lie: by default in a folder that is named after the
server's port and private to its user.

So two servers of one user need two ports and nothing else, and a command that calls a server finds the server by its
port.
"""

import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from text_generation_common.errors import AddressInUse, ArgumentValidation

# `sockaddr_un.sun_path` holds 108 bytes on Linux, the closing zero included.
MAX_SOCKET_PATH_BYTES = 107
OTHERS = stat.S_IRWXG | stat.S_IRWXO
# What follows the prefix in the names of a shard's files, as a regular expression.
SHARD_FILE = r"-\d+(\.rendezvous|\.steps)?"
# Beginning of the names of folders for launchers without a port.
ENGINE_FOLDER = "engine-"


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """The place of one server's files: their paths begin with `prefix`."""

    prefix: str
    folder: Path | None  # made and removed by the launcher; None when the user chose the prefix and made its folder
    advice: str  # tells the user how to choose another place, in error messages

    @property
    def lock(self) -> str:
        return f"{self.prefix}.lock"

    def socket(self, rank: int) -> str:
        return socket_path(self.prefix, rank)

    @property
    def engine_socket(self) -> str:
        """Path of the socket on which an engine without HTTP takes its fronts. It outlives the shards."""
        return f"{self.prefix}-engine"

    @property
    def control_socket(self) -> str:
        """Path of the socket on which the launcher takes commands of its user."""
        return f"{self.prefix}-control"

    def replica(self, number: int) -> "ServerPlace":
        """The place of one of the server's replicas, the first of which has the server's own."""
        return replace(self, prefix=f"{self.prefix}.r{number}", folder=None) if number else self

    def metrics_file(self, name: str) -> str:
        """Path of the file in which the process `name` keeps its metrics. `name` has no hyphen."""
        return f"{self.prefix}-metrics-{name}"

    @property
    def adapters_file(self) -> str:
        """Path of the file in which fronts read which LoRA adapters are served."""
        return f"{self.prefix}-adapters"

    def check_length(self, num_shard: int) -> None:
        longest = steps_path(self.socket(num_shard - 1))
        if len(os.fsencode(longest)) > MAX_SOCKET_PATH_BYTES:
            raise ArgumentValidation(
                f"the socket path {longest} has more than {MAX_SOCKET_PATH_BYTES} bytes: {self.advice}"
            )

    def make(self) -> None:
        """Makes the folder. AddressInUse when other users may write to it. FileNotFoundError when another launcher has
        just removed the parent folder."""
        if self.folder is not None:
            for folder in (self.folder.parent, self.folder):
                _make_private(folder, self.advice)

    def make_again(self) -> None:
        """Makes the folder of the sockets if it has been deleted, as cleaners of /tmp do. AddressInUse as `make`, and
        if more than the folder above is missing as well."""
        folder = Path(self.prefix).parent
        missing = [path for path in (folder.parent, folder) if not path.is_dir()]
        try:
            for path in missing:
                _make_private(path, self.advice)
        except FileNotFoundError:
            raise AddressInUse(f"the folder {folder} was deleted, and those above it: {self.advice}") from None

    def clear(self) -> None:
        """Removes the files that dead shards have left. AddressInUse for a file that no shard can have made, or that
        cannot be removed: a new shard would fail there, or connect to another user's process. The caller holds the
        lock, and no shard is alive."""
        for path in self._files():
            if not _is_a_shard_s(path):
                raise AddressInUse(f"{path} is in the way and is not a file of a server: {self.advice}")
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                owner = f"it belongs to uid {os.lstat(path).st_uid}"
                raise AddressInUse(f"cannot remove {path} ({error.strerror}; {owner}): {self.advice}") from error

    def leave(self) -> None:
        """Removes the files of shards and engines, the lock and the folder as far as possible. Raises nothing: the
        launcher ends."""
        self.remove_shard_files()
        for path in (*self._matching(r"(\.r\d+)?-engine"), self.control_socket):
            with suppress(OSError):
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    os.unlink(path)
        self.remove_metrics()
        self.remove_adapters()
        with suppress(OSError):
            os.unlink(self.lock)
        self._remove_folders()

    def remove_shard_files(self) -> None:
        """Removes the files that shards of any replica have left, as far as possible. Raises nothing."""
        for path in filter(_is_a_shard_s, self._matching(rf"(\.r\d+)?{SHARD_FILE}")):
            with suppress(OSError):
                os.unlink(path)

    def remove_metrics(self) -> None:
        """Removes the metrics of dead processes, as far as possible. Raises nothing."""
        for path in self._matching(r"-metrics-(engine|front)\d*(\.partial)?"):
            with suppress(OSError):
                os.unlink(path)

    def remove_adapters(self) -> None:
        for path in self._matching(r"-adapters(\.partial)?"):
            with suppress(OSError):
                os.unlink(path)

    def sweep(self) -> None:
        """Removes the folders of other ports whose launcher and janitor were both killed."""
        if self.folder is None:
            return
        for folder in self.folder.parent.iterdir():
            if (folder.name.isdigit() or folder.name.startswith(ENGINE_FOLDER)) and folder != self.folder:
                _in(folder)._remove_if_nobody_holds_it()

    def _files(self) -> Iterator[str]:
        """Paths of the shards' files, without those of other replicas."""
        yield from self._matching(SHARD_FILE)

    def _matching(self, ends: str) -> Iterator[str]:
        """Paths of files that are the prefix and one of `ends`, a regular expression: files of another server whose
        prefix begins with this prefix are left out."""
        folder, name = os.path.split(self.prefix)
        ours = re.compile(re.escape(name) + ends)
        with suppress(OSError):
            yield from [os.path.join(folder, found) for found in os.listdir(folder) if ours.fullmatch(found)]

    def _remove_folders(self) -> None:
        with suppress(OSError):  # Another launcher may use the folder already.
            if self.folder is not None:
                self.folder.rmdir()
                self.folder.parent.rmdir()

    def _remove_if_nobody_holds_it(self) -> None:
        with suppress(OSError):
            lock = os.open(self.lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock), os.stat(self.lock)):
                    self.leave()
            finally:
                os.close(lock)
        self._remove_folders()  # An empty folder has no lock file to open; a folder in use is not empty, and stays.


def socket_path(prefix: str, rank: int) -> str:
    return f"{prefix}-{rank}"


def steps_path(socket: str) -> str:
    """Path of the socket on which a shard takes frames with steps (`frames.py`), beside its socket for gRPC."""
    return f"{socket}.steps"


def chosen(prefix: str) -> ServerPlace:
    """A place whose prefix was chosen by the user."""
    # gRPC's `unix://` addresses must be absolute.
    return ServerPlace(os.path.abspath(prefix), None, "choose another --shard-uds-path")


def of_port(port: int, runtime_dir: str) -> ServerPlace:
    """The place of the server on `port`. `runtime_dir` is XDG_RUNTIME_DIR of the environment, or empty."""
    return _in(_roots(runtime_dir)[0] / str(port))


def machine_folder(name: str, runtime_dir: str) -> Path:
    """A private folder for what outlives a launcher on this machine. It is made if it is missing. `runtime_dir`: as in
    `of_port`. AddressInUse when other users may write to it."""
    folder = _roots(runtime_dir)[0] / name
    while True:
        try:
            for path in (folder.parent, folder):
                _make_private(path, "remove it")
        except FileNotFoundError:  # An ending launcher has just removed the parent folder.
            continue
        return folder


def of_engine(pid: int, runtime_dir: str) -> ServerPlace:
    """The place of the launcher `pid`, which serves no HTTP and so has no port."""
    place = _in(_roots(runtime_dir)[0] / f"{ENGINE_FOLDER}{pid}")
    return replace(place, advice="choose a --shard-uds-path in a folder of your own")


def find_control_socket(port: int, prefix: str | None, runtime_dir: str) -> str:
    """Path of the socket for commands of the launcher that this user runs on `port`, or with `prefix` as its
    --shard-uds-path. AddressInUse: see `find_master_socket`."""
    if prefix is not None:
        return chosen(prefix).control_socket
    return _found(port, runtime_dir, lambda place: place.control_socket)


def find_master_socket(port: int, runtime_dir: str) -> str:
    """Path of the socket of rank 0 of the server that this user runs on `port`. The server may have been started with
    another XDG_RUNTIME_DIR. AddressInUse when other users may write to the folder."""
    return _found(port, runtime_dir, lambda place: place.socket(0))


def _found(port: int, runtime_dir: str, path_in: Callable[[ServerPlace], str]) -> str:
    places = [_in(root / str(port)) for root in _roots(runtime_dir)]
    for place in places:
        if place.folder is not None and os.path.lexists(path_in(place)):
            for folder in (place.folder.parent, place.folder):
                _check_private(folder, "give the path of the socket")
            return path_in(place)
    return path_in(places[0])


def _in(folder: Path) -> ServerPlace:
    return ServerPlace(
        str(folder / "shard"), folder, "choose another --port, or a --shard-uds-path in a folder of your own"
    )


def _roots(runtime_dir: str) -> list[Path]:
    """Folders that may contain the servers' folders (one for each port); new servers use the first. A runtime directory
    of another user, which `sudo` and containers inherit, is ignored.
    """
    shared = Path(f"/tmp/tgi-py-{os.geteuid()}")
    folder = Path(runtime_dir)
    with suppress(OSError):
        if folder.is_absolute() and folder.stat().st_uid == os.geteuid() and folder.is_dir():
            return [folder / "tgi-py", shared]
    return [shared]


def _make_private(folder: Path, advice: str) -> None:
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=stat.S_IRWXU)
        _check_private(folder, advice)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise AddressInUse(f"cannot make the folder {folder} ({error.strerror}): {advice}") from error


def _check_private(folder: Path, advice: str) -> None:
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise AddressInUse(f"{folder} is not a folder: {advice}")
    if found.st_uid != os.geteuid():
        raise AddressInUse(f"the folder {folder} belongs to another user (uid {found.st_uid}): {advice}")
    if found.st_mode & OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        raise AddressInUse(f"the folder {folder} is open to other users (mode {mode:o}): remove it, or {advice}")


def _is_a_shard_s(path: str) -> bool:
    """Whether `path` is a socket or a rendezvous file of a shard. A user's file may have the same name."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return True
    return stat.S_ISREG(mode) if path.endswith(".rendezvous") else stat.S_ISSOCK(mode)
