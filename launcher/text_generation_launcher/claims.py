"""Claims what a server needs before any process starts: the place of its sockets and the API port, which one launcher
must own alone, and enough open files.
"""

import errno
import fcntl
import os
import resource
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from text_generation_common.addresses import bound_socket
from text_generation_common.errors import AddressInUse, ArgumentValidation
from text_generation_common.places import ServerPlace

# Seconds that the janitor of a killed launcher gets to clean up, and seconds between two attempts to lock.
CLEANING_S, POLL_S = 5.0, 0.05
# Attempts to make the folder. Other launchers, when they end, may remove the parent folder between two of our calls.
MAX_TRIES = 20
LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Open files that a process needs: a shard opens about 60 while it loads; the others are for connections. The launcher
# opens a few more for every shard.
NEEDED_FILES = 128


@contextmanager
def claim_sockets(place: ServerPlace) -> Iterator[int]:
    """Holds the lock of `place`, and yields the lock's descriptor. The kernel releases the lock when this process and
    the janitor, which inherits the descriptor, have ended in any way. Files that an earlier server left in the place
    are removed."""
    lock = _locked(place)
    try:
        _write_pid(lock, place)
        place.clear()
        place.sweep()
        yield lock
    finally:
        place.leave()
        os.close(lock)


def _write_pid(lock: int, place: ServerPlace) -> None:
    """Writes this launcher's pid into the lock file. AddressInUse when the disk is full: shards could not write their
    rendezvous file either.
    """
    try:
        os.truncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
    except OSError as error:
        raise AddressInUse(f"cannot write {place.lock} ({error.strerror}): {place.advice}") from error


def _locked(place: ServerPlace) -> int:
    """A descriptor that holds the lock. Its file is still the place's lock file, not a file that an ending launcher has
    just unlinked.
    """
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
            # The lock is soon released if the pid in the file is dead (the janitor of a dead launcher holds the lock)
            # or if the file is empty (a launcher that sweeps other folders or has not written its pid yet).
            is_short = not holder or (holder.isdigit() and not _is_alive(int(holder)))
            if is_short and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
                continue
            who = f"the launcher with pid {holder}" if holder.isdigit() else "another launcher"
            raise AddressInUse(f"socket path {place.prefix} is in use by {who}: {place.advice}") from error
        os.close(lock)


def _open(place: ServerPlace) -> int:
    """A descriptor of the place's lock file, which is made if it is missing. AddressInUse for another user's file."""
    for left in reversed(range(MAX_TRIES)):
        try:
            place.make()
            return _checked(os.open(place.lock, LOCK_FLAGS, stat.S_IRUSR | stat.S_IWUSR), place)
        except FileNotFoundError as error:
            if place.folder is None or not left:
                raise _no_lock(place, error.strerror) from error
            time.sleep(POLL_S)  # another launcher has just ended and removed the folder
        except OSError as error:
            raise _no_lock(place, error.strerror) from error
    raise AssertionError("the last try returns or raises")


def _checked(lock: int, place: ServerPlace) -> int:
    found = os.fstat(lock)
    is_ours = found.st_uid == os.geteuid()
    if is_ours and stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return lock
    os.close(lock)
    raise _no_lock(place, "it is not a lock file" if is_ours else f"it belongs to another user, uid {found.st_uid}")


def _no_lock(place: ServerPlace, reason: str | None) -> AddressInUse:
    return AddressInUse(f"cannot open {place.lock} ({reason}): {place.advice}")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # The process is alive but belongs to another user, so it may not be signalled.
    return True


@contextmanager
def claim_port(hostname: str, port: int) -> Iterator[socket.socket]:
    """A bound socket that does not listen yet: connections are refused until the router is ready."""
    try:
        bound = bound_socket(hostname, port)
    except OSError as error:
        raise _port_error(hostname, port, error) from error
    with bound, _claim_name(hostname, bound.getsockname()[1]):
        yield bound


@contextmanager
def _claim_name(hostname: str, port: int) -> Iterator[None]:
    """Binds a socket name, so that a second launcher is refused: on Linux, two sockets with SO_REUSEADDR can bind one
    port while neither listens.

    An abstract socket name is freed when its process ends and, like a port, belongs to one network namespace. Systems
    other than Linux refuse the second bind of the port.
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


def allow_open_files(num_shard: int) -> None:
    """Raises the soft limit of this process if it is too low. ArgumentValidation if the hard limit is too low."""
    needed = NEEDED_FILES + 8 * num_shard
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ArgumentValidation(
            f"a process of this server may have {hard} open files, and {needed} are needed: raise `ulimit -Hn`"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
