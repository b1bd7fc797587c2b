"""Starts and stops the children in order: weights first, then shards and router side by side; stops the router first.

There is one event loop and no thread. Two tasks keep the children alive: `epochs.py` the shards, `serving.py` the
router, or the engine and its fronts. Both start processes through the supervisor's `Spawner`. The supervisor passes
messages between the two tasks, and handles signals.
"""

import asyncio
import logging
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING

from text_generation_common.link import LinkEvent, LinkMessage
from text_generation_common.places import ServerPlace
from text_generation_common.tasks import cancelled
from text_generation_launcher import model
from text_generation_launcher.commands import Programs
from text_generation_launcher.config import LaunchPlan
from text_generation_launcher.epochs import Epochs
from text_generation_launcher.errors import DownloadError
from text_generation_launcher.janitor import Janitor
from text_generation_launcher.process import SEE_LOG, Child, log_last_lines
from text_generation_launcher.progress import make_display
from text_generation_launcher.resolve import with_prefill_budget
from text_generation_launcher.restarts import MOST_DEATHS, Restarts
from text_generation_launcher.serving import DRAIN_MARGIN_S, ServingProcesses
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
STOP_S: Mapping[str, float] = {"download": 10.0, "router": 5.0, "engine": 5.0, "shard": 5.0}
# The same for all children at once before the server has served: no request is lost.
STOP_UNREADY_S = 0.7
INTERRUPTED = 128 + signal.SIGINT  # exit status after Ctrl-C, as shells have it


class Supervisor:
    """Runs one server; `run` may be called once. `listen_fd` is the bound API socket; `place` must be claimed."""

    def __init__(
        self,
        plan: LaunchPlan,
        programs: Programs,
        environ: Mapping[str, str],
        listen_fd: int,
        port: int,
        place: ServerPlace,
        janitor: Janitor,
        machine: "Machine",
    ) -> None:
        self._place = place
        self._num_shard = plan.num_shard
        self._stop_asked = asyncio.Event()
        self._kill_asked = asyncio.Event()
        self._first_signal: signal.Signals | None = None
        self._machine = machine
        self._spawner = Spawner(plan, programs, environ, place, listen_fd, port, janitor)
        self._serving = ServingProcesses(self._spawner, self._on_message, self._on_owner_end)
        paths = [place.socket(rank) for rank in range(self._num_shard)]
        self._epochs = Epochs(
            self._spawner, paths, self._serving.notify, place.clear, Restarts(most_failures=MOST_DEATHS)
        )

    async def run(self) -> int:
        """Runs the server until a signal, and returns the exit status: 0, or INTERRUPTED after Ctrl-C before the server
        has served. Raises a CommandError when children end too often. In all cases no child is left running.
        """
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            # A signal that the launcher was started to ignore (by nohup, or as a background job) stays ignored.
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(RESTART_SIGNAL, self._serving.restart_fronts)
        self._place.remove_metrics()  # a launcher that was killed together with its janitor may have left some
        serving = asyncio.create_task(self._serve())
        try:
            await _first_of(serving, self._stop_asked)
            if self._serving.has_listened and not serving.done():
                await self._drain(serving)
            if serving.done():
                serving.result()
        finally:
            await cancelled(serving)
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

    async def _serve(self) -> None:
        """Returns when the router was stopped. Raises when router or shards cannot be kept alive."""
        await self._get_weights()
        keepers = [asyncio.create_task(self._epochs.run()), asyncio.create_task(self._serving.run())]
        try:
            done, _ = await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
            for keeper in done:
                keeper.result()
        finally:
            await cancelled(*keepers)

    async def _get_weights(self) -> None:
        plan = self._spawner.plan
        logger.info("Starting check and download process for %s", plan.model_id)
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
        logger.info("Successfully downloaded weights for %s", plan.model_id)
        # Imported here, like in `cli.py`.
        from text_generation_launcher.preflight import check_model

        if not model.is_local(plan) and (folder := model.folder_of(plan)) is not None:
            check_model(plan, folder, self._machine)  # A local model was checked before any child was started.
        self._spawner.plan = with_prefill_budget(plan, model.model_config(plan))

    def _on_message(self, message: LinkMessage) -> None:
        if message.event is LinkEvent.CONFIRMED:
            self._epochs.confirm(message.epoch)
        elif message.event is LinkEvent.BLAMED:
            self._epochs.clear_failures()
        elif message.event is LinkEvent.RESTART:
            self._epochs.end_epoch(message.epoch, message.reason)

    def _on_owner_end(self) -> None:
        """Replaces the shards if there are several: a step of the dead router or engine may have reached only some
        ranks, which then wait for the other ranks in a collective. A single shard continues with the next one.
        """
        if self._num_shard > 1:
            self._epochs.end_ready_epoch("The webserver ended between the calls to its shards")

    async def _drain(self, serving: "asyncio.Task[None]") -> None:
        """Asks the router to end, which it does when its requests are done. Until then the shards are kept alive."""
        logger.info("Terminating webserver")
        self._serving.stop()
        limit_s = self._spawner.plan.http.graceful_termination_timeout + DRAIN_MARGIN_S
        await _first_of(serving, self._kill_asked, limit_s)
        if serving.done() and serving.exception() is None:
            logger.info("webserver terminated")
        elif not serving.done() and not self._kill_asked.is_set():
            for router in self._spawner.running_as("router"):
                router.send(signal.SIGKILL)
            await asyncio.wait([serving], timeout=STOP_S["router"] + STOP_S["engine"])
            logger.info("webserver killed")

    async def _stop_all(self) -> None:
        """Stops all children, the router before the shards, which the router may still call."""
        for name in STOP_S:
            children = self._spawner.running_as(name)
            if children and name == "shard":
                logger.info("Shutting down shards")
            await asyncio.gather(*(self._stop_child(child) for child in children))
        self._place.remove_shard_files()

    async def _stop_unready(self) -> None:
        """Stops all children at once. A shard that warms up does not react to SIGTERM for seconds, and is killed."""
        await asyncio.gather(*(self._stop_child(child, STOP_UNREADY_S) for child in self._spawner.running))
        self._place.remove_shard_files()

    async def _stop_child(self, child: Child, timeout_s: float | None = None) -> None:
        name = "webserver" if child.command.name == "router" else child.command.name
        logger.info("Terminating %s", name)
        if timeout_s is None:
            timeout_s = STOP_S[child.command.name]
        timeout_s = 0.0 if self._kill_asked.is_set() else timeout_s
        logger.info("%s %s", name, "terminated" if await child.stop(timeout_s) else "killed")


async def _first_of(task: "asyncio.Task[None]", event: asyncio.Event, timeout_s: float | None = None) -> None:
    """Waits until `task` has ended, `event` is set, or `timeout_s` seconds are over."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait([task, waiting], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancelled(waiting)
