"""What one launcher owns alone: the shards' socket paths and the API port. Taken before any process starts."""

import errno
import fcntl
import glob
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from text_generation_launcher.errors import AddressInUse

# How long the janitor of a killed launcher may need to clean up.
CLEANING_S, POLL_S = 5.0, 0.05


@contextmanager
def claim_sockets(prefix: str) -> Iterator[int]:
    """Holds `<prefix>.lock` and yields its descriptor. The kernel lets go of it when this process, and the janitor that
    inherits it, have ended, however they end."""
    path = lock_path(prefix)
    lock = _locked(path)
    try:
        os.truncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        yield lock
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)
        os.close(lock)


def lock_path(prefix: str) -> str:
    return f"{prefix}.lock"


def socket_path(prefix: str, rank: int) -> str:
    return f"{prefix}-{rank}"


def remove_shard_files(prefix: str, num_shard: int) -> None:
    """Sockets, and the files through which shards meet. For who holds the claim, when no shard lives."""
    found = glob.glob(f"{glob.escape(prefix)}-*.rendezvous")
    # Not those of a launcher whose prefix begins with ours.
    rendezvous = [path for path in found if re.fullmatch(r"-\d+\.rendezvous", path.removeprefix(prefix))]
    for path in [*(socket_path(prefix, rank) for rank in range(num_shard)), *rendezvous]:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _locked(path: str) -> int:
    """A descriptor that holds the lock of the file that is at `path` now, not of one a leaving launcher unlinked."""
    deadline_s = time.monotonic() + CLEANING_S
    while True:
        lock = _open(path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        except BlockingIOError as error:
            holder = os.pread(lock, 20, 0).decode(errors="replace").strip()
            os.close(lock)
            if holder.isdigit() and not _is_alive(int(holder)) and time.monotonic() < deadline_s:
                time.sleep(POLL_S)  # its janitor is at work
                continue
            who = f"the launcher with pid {holder}" if holder.isdigit() else "another launcher"
            prefix = path.removesuffix(".lock")
            raise AddressInUse(f"socket path {prefix} is in use by {who}: choose another --shard-uds-path") from error
        os.close(lock)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise AddressInUse(f"cannot open {path} ({error.strerror}): choose another --shard-uds-path") from error


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
        with _claim_name(hostname, port):
            yield bound


@contextmanager
def _claim_name(hostname: str, port: int) -> Iterator[None]:
    """Linux lets two sockets with SO_REUSEADDR bind one port while neither listens, so a name is claimed as well.

    Abstract socket names live as long as their owner and, like ports, per network namespace. Other systems refuse the
    second bind.
    """
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as name:
        if sys.platform == "linux" and port:
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
