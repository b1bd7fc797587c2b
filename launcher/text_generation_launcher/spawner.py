"""Starts the children of one server, and knows which children are running."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from text_generation_common.connection_counts import PLACES, ConnectionCounts, make_file
from text_generation_common.errors import ArgumentValidation, CommandError
from text_generation_common.memory import usable_cores
from text_generation_common.places import ServerPlace
from text_generation_launcher import commands
from text_generation_launcher.commands import Command, Programs
from text_generation_launcher.config import LaunchPlan, ReplicaSite
from text_generation_launcher.errors import DownloadError, RayFailed, ShardCannotStart, WebserverCannotStart
from text_generation_launcher.janitor import Janitor
from text_generation_launcher.process import Child
from text_generation_launcher.router_template import RouterTemplate
from text_generation_launcher.standby import Templates

MORE_FILES = "raise the limit of open files (ulimit -n)"


class Spawner:
    """The only class that starts children. `plan` is replaced once, when the weights are there. `listen_fd` is the
    bound API socket and `port` its number; a launcher without an API starts neither router nor front. The janitor is
    told of every child, to kill it when the launcher is killed. `has_templates`: whether templates fork the shards.
    `has_router_template`: whether one forks routers, fronts and engines.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        programs: Programs,
        environ: Mapping[str, str],
        place: ServerPlace,
        listen_fd: int | None,
        port: int,
        janitor: Janitor,
        has_templates: bool,
        has_router_template: bool,
    ) -> None:
        self.plan = plan
        self.running: list[Child] = []
        self.num_replicas = 1  # number of replicas that share this machine
        self.has_checked_files = asyncio.Event()  # routers and fronts wait for it
        self.probed_tokenizer: str | None = None
        self._programs = programs
        self._environ = environ
        self._place = place
        self._listen_fd = listen_fd
        self.port = port
        self._janitor = janitor
        self._connections: ConnectionCounts | None = None  # numbers of the fronts
        self._connections_fd: int | None = None
        self._templates = Templates(self._start_template, self._added, janitor.add) if has_templates else None
        template = RouterTemplate(self._start_router_template, self._added, janitor.add)
        self._router_template = template if has_router_template else None

    async def start_download(self, takes: Callable[[logging.LogRecord], bool]) -> Child:
        command = commands.download(self.plan, self._programs, self._environ)
        return await self._start(command, DownloadError, takes)

    async def start_file_check(self, folder: Path) -> Child:
        return await self._start(commands.file_check(self.plan, self._environ, folder), ArgumentValidation)

    async def start_shard(self, site: ReplicaSite, rank: int, epoch: int) -> Child:
        site.place.make_again()
        cores = usable_cores()
        command = commands.shard(self.plan, self._programs, self._environ, site, rank, epoch, cores, self.num_replicas)
        if self._templates is None:
            return await self._start(command, ShardCannotStart)
        with _told_as(ShardCannotStart, "cannot fork a shard", MORE_FILES):
            return await self._templates.start_shard(command, site.number, rank)

    def stands_by(self, site: ReplicaSite) -> bool:
        """Whether the shards of `site` would be replaced at once."""
        return self._templates is not None and self._templates.stand_by(site.number, self.plan.num_shard)

    async def _start_template(self, command: Command) -> Child:
        return await self._start(command, ShardCannotStart)

    async def start_router(self, launcher_fd: int) -> Child:
        """Starts a router. `launcher_fd` is the router's end of the line to the launcher."""
        assert self._listen_fd is not None
        await self.has_checked_files.wait()
        command = commands.router(
            self.plan,
            self._programs,
            self._environ,
            self._place,
            self._listen_fd,
            self.port,
            launcher_fd,
            self.probed_tokenizer,
        )
        return await self._start_router(command)

    async def start_engine(self, site: ReplicaSite, address: str, metrics_file: str | None, launcher_fd: int) -> Child:
        """Starts an engine without HTTP. `launcher_fd`: as in `start_router`."""
        command = commands.engine(self.plan, self._programs, self._environ, site, address, launcher_fd, metrics_file)
        return await self._start_router(command)

    async def start_front(self, number: int, launcher_fd: int) -> Child:
        """Starts one of the engines' fronts. `launcher_fd`: as in `start_router`."""
        assert self._listen_fd is not None
        if self._connections is None:
            self._connections_fd = make_file()
            self._connections = ConnectionCounts(self._connections_fd)
        await self.has_checked_files.wait()
        connections, is_placed = self._connections, number < PLACES
        command = commands.front(
            self.plan,
            self._programs,
            self._environ,
            self._place,
            number,
            self._listen_fd,
            self.port,
            launcher_fd,
            self._connections_fd if is_placed else None,
            self.probed_tokenizer,
        )
        child = await self._start_router(command)
        if is_placed:
            child.exited.add_done_callback(lambda _: connections.clear(number))
        return child

    @property
    def router_stands_by(self) -> bool:
        """Whether a router, a front or an engine would be replaced at once."""
        return self._router_template is not None and self._router_template.stands_by

    def read_code_again(self) -> None:
        """Routers, fronts and engines that start from now on have the code as it is on disk now."""
        if self._router_template is not None:
            self._router_template.renew()

    async def _start_router(self, command: Command) -> Child:
        if self._router_template is None:
            return await self._start(command, WebserverCannotStart)
        with _told_as(WebserverCannotStart, "cannot fork a webserver", MORE_FILES):
            return await self._router_template.start_child(command, self._programs.router)

    async def _start_router_template(self, command: Command) -> Child:
        return await self._start(command, WebserverCannotStart)

    async def start_ray_driver(self, launcher_fd: int) -> Child:
        """Starts the process that asks Ray for replicas. `launcher_fd`: as in `start_router`."""
        return await self._start(commands.ray_driver(self.plan, self._environ, self.port, launcher_fd), RayFailed)

    def running_as(self, name: str, replica: int | None = None) -> list[Child]:
        """The running children of one kind, download, shard, engine or router; or those of one replica. Fronts are
        routers."""
        found = [child for child in self.running if child.command.name == name]
        return [child for child in found if replica in (None, child.command.replica)]

    async def _start(
        self,
        command: Command,
        error: Callable[[str, str], CommandError],
        takes: Callable[[logging.LogRecord], bool] = lambda record: False,
    ) -> Child:
        with _told_as(error, f"cannot run {command.argv[0]}", "install tgi-py again"):
            child = await Child.start(command, takes)
        self._janitor.add(child.pid)
        return self._added(child)

    def _added(self, child: Child) -> Child:
        self.running.append(child)
        child.exited.add_done_callback(lambda _: self._remove(child))
        return child

    def _remove(self, child: Child) -> None:
        self._janitor.remove(child.pid)
        self.running.remove(child)


@contextmanager
def _told_as(error: Callable[[str, str], CommandError], what: str, hint: str) -> Iterator[None]:
    """Makes what the system refuses an error of a start: a later start is tried again."""
    try:
        yield
    except OSError as reason:
        raise error(f"{what}: {reason.strerror}", hint) from reason
