"""The processes of a running server, found by pid: their roles, their listening sockets and their memory."""

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

KIB = 1024
# Names of the processes of --standby on.
TEMPLATE, FORKED = "tgi-template", "tgi-shard "


def family(launcher: int) -> list[psutil.Process]:
    """The processes of a server: the launcher and all its descendants."""
    root = psutil.Process(launcher)
    return [root, *root.children(recursive=True)]


def shards(launcher: int) -> dict[int, psutil.Process]:
    """The shards by rank. A shard that is being started or has just died may be missing."""
    found = {}
    for process in psutil.Process(launcher).children():
        try:
            if runs(process, "text-generation-server", "serve") and process.name() != TEMPLATE:
                found[int(process.environ()["RANK"])] = process
        except (psutil.Error, KeyError):  # the process ended meanwhile, or has not written its environment yet
            continue
    return found


def templates(launcher: int) -> dict[int, psutil.Process]:
    """With --standby on, the processes that fork shards, by rank."""
    found = _children(launcher, "text-generation-server", "serve", are_templates=True)
    return {int(process.environ()["RANK"]): process for process in found}


def router_template(launcher: int) -> psutil.Process:
    """With --standby on, the process that forks routers, fronts and engines."""
    [found] = _children(launcher, "text-generation-router", are_templates=True)
    return found


def router(launcher: int) -> psutil.Process:
    """The router's process. Raises LookupError while there is none."""
    for process in routers(launcher):
        return process
    raise LookupError(f"the launcher {launcher} has no router now")


def routers(launcher: int) -> list[psutil.Process]:
    """The router or, with --api-workers, the engine's fronts."""
    return _children(launcher, "text-generation-router")


def engine(launcher: int) -> psutil.Process:
    """The engine of --api-workers. Raises LookupError while there is none."""
    for process in _children(launcher, "text-generation-engine"):
        return process
    raise LookupError(f"the launcher {launcher} has no engine now")


def engines(launcher: int) -> dict[int, psutil.Process]:
    """The engines by the numbers of their replicas. An engine that is being started or has just died may be missing."""
    return {_replica(process): process for process in _children(launcher, "text-generation-engine")}


def shards_of_replicas(launcher: int) -> dict[int, psutil.Process]:
    """A shard of each replica, by the replica's number. Shards that start or have just died may be missing."""
    return {_replica(process): process for process in _children(launcher, "text-generation-server", "serve")}


def _replica(process: psutil.Process) -> int:
    """The number in the path of the sockets: `shard-0`, `shard.r1-0` …"""
    words = process.cmdline()
    path = words[words.index("--master-shard-uds-path" if "--master-shard-uds-path" in words else "--uds-path") + 1]
    found = re.search(r"\.r(\d+)(-\d+)?$", path)
    return int(found[1]) if found else 0


def serving(launcher: int) -> set[int]:
    """The pids of the shards and the router."""
    return {process.pid for process in [*shards(launcher).values(), router(launcher)]}


def _children(launcher: int, program: str, *arguments: str, are_templates: bool = False) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(launcher).children():
        with suppress(psutil.Error):  # the process ended meanwhile
            if runs(process, program, *arguments) and (process.name() == TEMPLATE) == are_templates:
                found.append(process)
    return found


def epoch(shard: psutil.Process) -> int:
    """The epoch of a shard: number of the start of its group, from 1."""
    name = shard.name()
    return int(name.removeprefix(FORKED) if name.startswith(FORKED) else shard.environ()["TGI_EPOCH"])


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes that still run. A zombie counts as ended, and a process with a reused pid as another process."""
    return [process for process in processes if _is_alive(process)]


def listening(processes: Iterable[psutil.Process]) -> set[tuple[str, int]]:
    """Address and port of every TCP or UDP socket that takes connections or datagrams."""
    sockets = [(process, connection) for process in processes for connection in process.net_connections("inet")]
    ends = {connection.laddr for _, connection in sockets if connection.status in ("LISTEN", "NONE")}
    return {(end.ip, end.port) for end in ends if end}


def resident(process: psutil.Process) -> int:
    """Resident memory now, in bytes."""
    return int(process.memory_info().rss)


def peak_resident(process: psutil.Process) -> int:
    """Peak resident memory since the process started, in bytes. Linux only."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * KIB
    raise LookupError(f"the kernel does not say how much memory process {process.pid} has had")


def shared_memory() -> set[str]:
    """Names of the files in /dev/shm."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def runs(process: psutil.Process, program: str, *arguments: str) -> bool:
    """Whether the process's command line is `program arguments…`, possibly after an interpreter."""
    words = process.cmdline()
    places = [i for i, word in enumerate(words[:2]) if Path(word).name == program]
    return bool(places) and tuple(words[places[0] + 1 :][: len(arguments)]) == arguments


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
