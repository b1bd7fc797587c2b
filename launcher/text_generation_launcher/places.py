"""Where a server's sockets, lock and rendezvous files lie: by default a folder of its port, private to its user.

Two servers of one user need two ports and nothing else, and commands that talk to a server find it by its port.
"""

import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from text_generation_launcher.errors import AddressInUse, ArgumentValidation

# `sockaddr_un.sun_path` holds 108 bytes on Linux, and a closing zero.
MAX_SOCKET_PATH_BYTES = 107
OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class Place:
    """The files of one server begin with `prefix`."""

    prefix: str
    folder: Path | None  # made and removed by us; None when the user chose the prefix, and has made its folder
    advice: str  # how to choose another place, for error messages

    @property
    def lock(self) -> str:
        return f"{self.prefix}.lock"

    def socket(self, rank: int) -> str:
        return socket_path(self.prefix, rank)

    def check_length(self, num_shard: int) -> None:
        longest = self.socket(num_shard - 1)
        if len(os.fsencode(longest)) > MAX_SOCKET_PATH_BYTES:
            raise ArgumentValidation(
                f"the socket path {longest} has more than {MAX_SOCKET_PATH_BYTES} bytes: {self.advice}"
            )

    def make(self) -> None:
        """The folder, or AddressInUse when somebody else may write to it. Its parent may vanish: FileNotFoundError."""
        if self.folder is not None:
            for folder in (self.folder.parent, self.folder):
                _make_private(folder, self.advice)

    def clear(self) -> None:
        """Removes what shards have left. AddressInUse for what cannot be theirs or cannot be removed: a shard would
        fail there, or meet a stranger. For who holds the lock, when no shard lives."""
        for path in self._files():
            if not _is_a_shard_s(path):
                raise AddressInUse(f"{path} is in the way and is no file of a server's: {self.advice}")
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                owner = f"it belongs to uid {os.lstat(path).st_uid}"
                raise AddressInUse(f"cannot remove {path} ({error.strerror}; {owner}): {self.advice}") from error

    def leave(self) -> None:
        """Removes what can be removed, the lock included. Raises nothing: this is the end."""
        self.remove_shard_files()
        with suppress(OSError):
            os.unlink(self.lock)
        self._remove_folders()

    def remove_shard_files(self) -> None:
        """As `clear`, but what cannot be removed stays."""
        for path in filter(_is_a_shard_s, self._files()):
            with suppress(OSError):
                os.unlink(path)

    def sweep(self) -> None:
        """Removes the folders of other ports whose launchers, and their janitors, were killed."""
        if self.folder is None:
            return
        for folder in self.folder.parent.iterdir():
            if folder.name.isdigit() and folder != self.folder:
                _in(folder)._remove_if_nobody_holds_it()

    def _files(self) -> Iterator[str]:
        """Not those of a launcher whose prefix begins with ours."""
        folder, name = os.path.split(self.prefix)
        ours = re.compile(re.escape(name) + r"-\d+(\.rendezvous)?")
        with suppress(OSError):
            yield from (os.path.join(folder, found) for found in os.listdir(folder) if ours.fullmatch(found))

    def _remove_folders(self) -> None:
        with suppress(OSError):  # another launcher may be there already
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
        self._remove_folders()  # an empty one has no lock; one in use is not empty


def socket_path(prefix: str, rank: int) -> str:
    return f"{prefix}-{rank}"


def chosen(prefix: str) -> Place:
    """By the user."""
    # gRPC's `unix://` takes absolute paths only.
    return Place(os.path.abspath(prefix), None, "choose another --shard-uds-path")


def of_port(port: int, runtime_dir: str) -> Place:
    """`runtime_dir` is the environment's XDG_RUNTIME_DIR, or empty."""
    return _in(_roots(runtime_dir)[0] / str(port))


def find_master_socket(port: int, runtime_dir: str) -> str:
    """Of the server that this user runs on `port`, whose environment may have been another. AddressInUse for a folder
    that is not the user's own."""
    places = [_in(root / str(port)) for root in _roots(runtime_dir)]
    for place in places:
        if place.folder is not None and os.path.lexists(place.socket(0)):
            for folder in (place.folder.parent, place.folder):
                _check_private(folder, "give the path of the shard's socket")
            return place.socket(0)
    return places[0].socket(0)


def _in(folder: Path) -> Place:
    return Place(str(folder / "shard"), folder, "choose another --port, or a --shard-uds-path in a folder of your own")


def _roots(runtime_dir: str) -> list[Path]:
    """The first is for new servers. A runtime directory that is not this user's, as `sudo` and containers inherit it,
    is as good as none."""
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
    """A socket, or a file through which shards meet: never a user's file that has the name of a socket."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return True
    return stat.S_ISREG(mode) if path.endswith(".rendezvous") else stat.S_ISSOCK(mode)
