"""Starts and stops the children in order: weights first, then shards and router side by side; stops the router first.

There is one event loop and no thread. `serving.py` keeps the children alive, which it starts through the supervisor's
`Spawner`. The supervisor gets the weights, and handles signals.
"""

import asyncio
import logging
import signal
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from text_generation_common.addresses import mention_openness
from text_generation_common.errors import INTERRUPTED, ArgumentValidation
from text_generation_common.flags.cluster import Way
from text_generation_common.model_files import has_model_file
from text_generation_common.places import ServerPlace
from text_generation_common.tasks import cancelled
from text_generation_common.weights.child import why_killed
from text_generation_common.weights.tokenizer_files import FILE, identity_of
from text_generation_launcher import model
from text_generation_launcher.commands import Programs
from text_generation_launcher.config import LaunchPlan
from text_generation_launcher.control import commands_of, controlled
from text_generation_launcher.errors import DownloadError
from text_generation_launcher.janitor import Janitor
from text_generation_launcher.process import PARENT_ENDED, SEE_LOG, Child, log_last_lines
from text_generation_launcher.progress import make_display
from text_generation_launcher.resolve import with_prefill_budget
from text_generation_launcher.service_manager import ServiceManager
from text_generation_launcher.serving import DRAIN_MARGIN_S, FrontsAndRay, FrontsAndReplicas, serving_of
from text_generation_launcher.spawner import Spawner

if TYPE_CHECKING:
    from text_generation_launcher.preflight import Machine

logger = logging.getLogger("text_generation_launcher")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The signal for a restart of all fronts. SIGHUP comes when a terminal is closed; to many programs SIGUSR1 is the order
# to open their log files again.
RESTART_SIGNAL = signal.SIGUSR2
# Seconds between SIGTERM and SIGKILL for each kind of child, in the order in which children are stopped. A router gets
# additional time before that in which it drains.
STOP_S: Mapping[str, float] = {
    "check": 0.0, "download": 10.0, "router": 5.0, "engine": 5.0, "shard": 5.0, "template": 0.0,
    "router-template": 0.0, "ray": 5.0,
}  # fmt: skip
# The same for all children at once before the server has served: no request is lost.
STOP_UNREADY_S = 0.7


class Supervisor:
    """Runs one server; `run` may be called once. `listen_fd` is the bound API socket, and `port` its port; None and 0
    for a launcher without an API. `place` must be claimed."""

    def __init__(
        self,
        plan: LaunchPlan,
        programs: Programs,
        environ: Mapping[str, str],
        listen_fd: int | None,
        port: int,
        place: ServerPlace,
        janitor: Janitor,
        machine: "Machine",
    ) -> None:
        self._place = place
        self._port = port
        self._stop_asked = asyncio.Event()
        self._kill_asked = asyncio.Event()
        self._first_signal: signal.Signals | None = None
        self._machine = machine
        self._has_weights = asyncio.Event()
        templates = machine.has_templates(plan.standby), machine.has_router_template(plan.standby)
        self._spawner = Spawner(plan, programs, environ, place, listen_fd, port, janitor, *templates)
        self._serving = serving_of(self._spawner, place)
        self._manager = ServiceManager(environ)

    async def run(self) -> int:
        """Runs the server until a signal, and returns the exit status: 0, or INTERRUPTED after Ctrl-C before the server
        has served. Raises a CommandError when children end too often. In all cases no child is left running.
        """
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            # A signal that the launcher was started to ignore (by nohup, or as a background job) stays ignored.
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(PARENT_ENDED, self._stop_asked.set)
        loop.add_signal_handler(RESTART_SIGNAL, self._restart_fronts)
        self._place.remove_adapters()
        self._place.remove_metrics()  # a launcher that was killed together with its janitor may have left some
        serving = asyncio.create_task(self._serve())
        reporting = asyncio.create_task(self._manager.report(lambda: self._serving.has_listened))
        try:
            await _first_of(serving, self._stop_asked)
            self._manager.send("STOPPING=1")
            if self._serving.has_listened and not serving.done():
                await self._drain(serving)
            if serving.done():
                serving.result()
        finally:
            await cancelled(serving, reporting)
            await (self._stop_all() if self._serving.has_listened else self._stop_unready())
        return INTERRUPTED if self._first_signal is signal.SIGINT and not self._serving.has_listened else 0

    def _on_signal(self, number: signal.Signals) -> None:
        """The first signal lets running requests end; the second signal kills all children."""
        self._first_signal = self._first_signal or number
        if self._stop_asked.is_set():
            self._kill_asked.set()
            for child in self._spawner.running:
                child.send(signal.SIGKILL)
        self._stop_asked.set()

    def _restart_fronts(self) -> None:
        if isinstance(self._serving, FrontsAndReplicas):
            self._serving.restart_fronts()
        elif self._spawner.plan.cluster.way is Way.ENGINE:
            logger.warning("There are no fronts here to be restarted: --engine-only serves fronts elsewhere")
        else:
            logger.warning("The webserver is not restarted: only --api-workers has others that serve meanwhile")

    async def _serve(self) -> None:
        """Returns when `stop` has ended what serves. Raises when that cannot be kept alive, or a file is refused."""
        tasks = [asyncio.create_task(self._check_files()), asyncio.create_task(self._serve_model())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await cancelled(*tasks)

    async def _check_files(self) -> None:
        """Checks tokenizer and chat templates in a child: beside the download, or beside the shards' start if they are
        downloaded or made first. Routers, which read the same files, start afterwards."""
        plan = self._spawner.plan
        folder = model.folder_of(plan) if model.is_local(plan) else None
        if folder is None or not has_model_file(folder / FILE):
            await self._has_weights.wait()
            folder = model.folder_of(plan)
        if folder is not None and has_model_file(folder / FILE):
            identity = identity_of(folder / FILE)
            child = await self._spawner.start_file_check(folder)
            if status := await asyncio.shield(child.exited):
                why = why_killed(status) if status < 0 else child.how_it_ended
                raise ArgumentValidation(child.error or f"the check of {folder / FILE} and of the chat templates {why}")
            self._spawner.probed_tokenizer = identity
        self._spawner.has_checked_files.set()

    async def _serve_model(self) -> None:
        if self._spawner.plan.cluster.has_model_here:  # Fronts read no weights.
            await self._get_weights()
        self._has_weights.set()
        if self._port:
            self._mention_port()
        async with AsyncExitStack() as stack:
            if isinstance(self._serving, FrontsAndReplicas):
                await stack.enter_async_context(controlled(self._place.control_socket, commands_of(self._serving)))
            await self._serving.run()

    def _mention_port(self) -> None:
        http = self._spawner.plan.http
        if http.port == 0:
            logger.info("Port %d was chosen for --port 0", self._port)
        mention_openness(http.hostname, self._port, logger)

    async def _get_weights(self) -> None:
        plan = self._spawner.plan
        logger.info("Starting check and download process for %s", plan.model_id)
        if model.is_ready(plan):
            logger.info("Files are already present on the host. Skipping download.")
            await self._spawner.has_checked_files.wait()  # a bad file ends the start before a shard begins
        else:
            await self._download(plan)
        logger.info("Successfully downloaded weights for %s", plan.model_id)
        self._spawner.plan = with_prefill_budget(plan, model.model_config(plan))

    async def _download(self, plan: LaunchPlan) -> None:
        display = make_display(plan.process.json_output)
        download = await self._spawner.start_download(display.takes)
        try:
            status = await asyncio.shield(download.exited)
        finally:
            display.clear()
        if status != 0:
            if download.error:
                raise DownloadError(download.error)
            log_last_lines(f"Download {download.how_it_ended}", download)
            raise DownloadError(f"the download {download.how_it_ended}", SEE_LOG)
        # Imported here, like in `cli.py`.
        from text_generation_launcher.preflight import check_model

        if not model.is_local(plan) and (folder := model.folder_of(plan)) is not None:
            check_model(plan, folder, self._machine)  # A local model was checked before any child was started.

    async def _drain(self, serving: "asyncio.Task[None]") -> None:
        """Asks the router to end, which it does when its requests are done. Until then the shards are kept alive."""
        logger.info("Terminating webserver")
        self._serving.stop()
        limit_s = self._spawner.plan.http.graceful_termination_timeout + DRAIN_MARGIN_S
        await _first_of(serving, self._kill_asked, limit_s)
        if serving.done() and serving.exception() is None:
            logger.info("webserver terminated")
        elif not serving.done() and not self._kill_asked.is_set():
            for child in self._spawner.running_as("router") or self._spawner.running_as("engine"):
                child.send(signal.SIGKILL)
            await asyncio.wait([serving], timeout=STOP_S["router"] + STOP_S["engine"])
            logger.info("webserver killed")

    async def _stop_all(self) -> None:
        """Stops all children, the router before the shards, which the router may still call."""
        for name in STOP_S:
            if name == "ray":
                await self._withdraw()
            children = self._spawner.running_as(name)
            if children and name == "shard":
                logger.info("Shutting down shards")
            await asyncio.gather(*(self._stop_child(child) for child in children))
        self._place.remove_shard_files()

    async def _stop_unready(self) -> None:
        """Stops all children at once. A shard that warms up does not react to SIGTERM for seconds, and is killed."""
        drivers = self._spawner.running_as("ray")
        others = [child for child in self._spawner.running if child not in drivers]
        await asyncio.gather(*(self._stop_child(child, STOP_UNREADY_S) for child in others))
        await self._withdraw()
        await asyncio.gather(*(self._stop_child(child) for child in self._spawner.running_as("ray")))
        self._place.remove_shard_files()

    async def _withdraw(self) -> None:
        if not isinstance(self._serving, FrontsAndRay):
            return
        withdrawing = asyncio.create_task(self._serving.withdraw())
        try:
            await _first_of(withdrawing, self._kill_asked)
        finally:
            await cancelled(withdrawing)

    async def _stop_child(self, child: Child, timeout_s: float | None = None) -> None:
        name = "webserver" if child.command.name == "router" else child.command.name
        # After an error of the start, its two lines are all that matters.
        level = logging.DEBUG if timeout_s is not None and not self._stop_asked.is_set() else logging.INFO
        logger.log(level, "Terminating %s", name)
        if timeout_s is None:
            timeout_s = STOP_S[child.command.name]
        timeout_s = 0.0 if self._kill_asked.is_set() else timeout_s
        logger.log(level, "%s %s", name, "terminated" if await child.stop(timeout_s) else "killed")


async def _first_of(task: "asyncio.Task[None]", event: asyncio.Event, timeout_s: float | None = None) -> None:
    """Waits until `task` has ended, `event` is set, or `timeout_s` seconds are over."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait([task, waiting], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancelled(waiting)
