"""What one launcher owns alone: its place for sockets and the API port. Taken before any process starts."""

import errno
import fcntl
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from text_generation_launcher.errors import AddressInUse
from text_generation_launcher.places import Place

# How long the janitor of a killed launcher may need to clean up.
CLEANING_S, POLL_S = 5.0, 0.05
# To make the folder, between other launchers that remove theirs.
MOST_TRIES = 20
LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def claim_sockets(place: Place) -> Iterator[int]:
    """Holds the place's lock, and yields its descriptor. The kernel lets go of it when this process, and the janitor
    that inherits it, have ended, however they end. What an earlier server has left there is removed."""
    lock = _locked(place)
    try:
        _write_pid(lock, place)
        place.clear()
        place.sweep()
        yield lock
    finally:
        place.leave()
        os.close(lock)


def _write_pid(lock: int, place: Place) -> None:
    """Where there is no room for it, there is none either for the file through which shards meet."""
    try:
        os.truncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
    except OSError as error:
        raise AddressInUse(f"cannot write {place.lock} ({error.strerror}): {place.advice}") from error


def _locked(place: Place) -> int:
    """A descriptor that holds the lock of the file that is there now, not of one a leaving launcher unlinked."""
    path = place.lock
    deadline_s = time.monotonic() + CLEANING_S
    while True:
        lock = _open(place)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        except BlockingIOError as error:
            holder = os.pread(lock, 20, 0).decode(errors="replace").strip()
            os.close(lock)
            # Its janitor is at work; without a pid it is a launcher that sweeps, or that has had the lock for no time.
            is_short = not holder or (holder.isdigit() and not _is_alive(int(holder)))
            if is_short and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
                continue
            who = f"the launcher with pid {holder}" if holder.isdigit() else "another launcher"
            raise AddressInUse(f"socket path {place.prefix} is in use by {who}: {place.advice}") from error
        os.close(lock)


def _open(place: Place) -> int:
    """The place's lock file, which is made where there is none. AddressInUse for a file that is somebody else's."""
    for left in reversed(range(MOST_TRIES)):
        try:
            place.make()
            return _checked(os.open(place.lock, LOCK_FLAGS, stat.S_IRUSR | stat.S_IWUSR), place)
        except FileNotFoundError as error:
            if place.folder is None or not left:
                raise _no_lock(place, error.strerror) from error
            time.sleep(POLL_S)  # another launcher has just removed the folder behind itself
        except OSError as error:
            raise _no_lock(place, error.strerror) from error
    raise AssertionError("the last try returns or raises")


def _checked(lock: int, place: Place) -> int:
    found = os.fstat(lock)
    is_ours = found.st_uid == os.geteuid()
    if is_ours and stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return lock
    os.close(lock)
    raise _no_lock(place, "it is not a lock file" if is_ours else f"it belongs to another user, uid {found.st_uid}")


def _no_lock(place: Place, reason: str | None) -> AddressInUse:
    return AddressInUse(f"cannot open {place.lock} ({reason}): {place.advice}")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True


@contextmanager
def claim_port(hostname: str, port: int) -> Iterator[socket.socket]:
    """A bound socket that does not listen yet: clients are turned away until the router is ready."""
    family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as bound:
        # A restart must not wait for the connections that the last server left in TIME_WAIT.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((hostname, port))
        except OSError as error:
            raise _port_error(hostname, port, error) from error
        with _claim_name(hostname, bound.getsockname()[1]):
            yield bound


@contextmanager
def _claim_name(hostname: str, port: int) -> Iterator[None]:
    """Linux lets two sockets with SO_REUSEADDR bind one port while neither listens, so a name is claimed as well.

    Abstract socket names live as long as their owner and, like ports, per network namespace. Other systems refuse the
    second bind.
    """
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as name:
        if sys.platform == "linux":
            try:
                name.bind(f"\0text-generation-launcher/{hostname}/{port}")
            except OSError as error:
                raise _port_error(hostname, port, error) from error
        yield


def _port_error(hostname: str, port: int, error: OSError) -> AddressInUse:
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(f"port {port} is in use on {hostname}: choose another --port")
    return AddressInUse(
        f"cannot bind port {port} on {hostname} ({error.strerror}): choose another --port or --hostname"
    )
