"""The ways to the processes of a server: for networks the addresses of TCP and UDP sockets, for users of the machine
the unix sockets whose rights and folders let them connect."""

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import processes
import psutil

# Bit of a unix socket's flags that says that it takes connections (Linux, include/linux/net.h: SO_ACCEPTCON).
ACCEPTS = 0x10000


def addresses(launcher: int) -> set[tuple[str, int]]:
    """Address and port of every TCP or UDP socket of the server on which others can begin to talk. gRPC's sockets have
    IPv4 addresses in the form of IPv6."""
    found = processes.listening(processes.family(launcher))
    return {(address.removeprefix("::ffff:"), port) for address, port in found}


def open_to_others(launcher: int) -> list[str]:
    """The unix sockets of the server that another user of the machine could connect to. All abstract sockets are among
    them, because they lie in no folder."""
    found = unix_sockets(processes.family(launcher))
    return sorted(path for path in found if path.startswith("@") or not _is_private(Path(path)))


def unix_sockets(family: Iterable[psutil.Process]) -> set[str]:
    """The paths of the unix sockets on which processes take connections."""
    inodes = {inode for process in family for inode in _inodes(process)}
    lines = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {words[7] for words in lines if len(words) == 8 and words[6] in inodes and int(words[3], 16) & ACCEPTS}


def _inodes(process: psutil.Process) -> Iterator[str]:
    """The inodes of a process's sockets."""
    with suppress(OSError):
        for file in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                link = os.readlink(file)
                if link.startswith("socket:["):
                    yield link.removeprefix("socket:[").removesuffix("]")


def _is_private(path: Path) -> bool:
    own, folder = path.stat(), path.parent.stat()
    return not (stat.S_IMODE(own.st_mode) & 0o077 and stat.S_IMODE(folder.st_mode) & 0o077)
