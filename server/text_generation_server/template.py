"""A template: a process that has loaded a rank's model, never computes, and forks the shards of that rank, one after
the other. A shard has the template's weights without reading them, in the same memory, until one of both writes there.

While a template forks it has one thread: no other process could go on with threads of OpenMP or of gRPC, which it has
imported only.
A template that cannot fork, because the weights are on a GPU, a library has left a thread or the system refuses another
process, becomes the shard itself.

The launcher asks for a shard with a message on a socket: the number of the epoch; that of the shards on this machine, 0
for those of the group; the word KEEPS if the shard may use the keys and values of the shard before; and two
descriptors, for the shard's output and for its report. The report has two lines, the shard's process id and READY. It
ends without a line if there is no shard. While the template loads, it sends a byte now and then as a sign of life.
"""

import gc
import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import torch

from text_generation_common import faults
from text_generation_common.forked import (
    KEEPS,
    MAX_MESSAGE_BYTES,
    READY,
    TEMPLATE_NAME,
    be_ended_first,
    fork_below,
    name_process,
    set_oom_score,
)
from text_generation_common.grammars import COMPILER_STACK_BYTES
from text_generation_server.config import ShardConfig
from text_generation_server.device.kept import KeptMemory, memory_for_keys
from text_generation_server.distributed import prepare_to_join, unjoined
from text_generation_server.load import LoadedModel, Shard, load_model, load_shard, take_over
from text_generation_server.runner import Capacity, Measured
from text_generation_server.worker import Worker

logger = logging.getLogger("text_generation_server")

SIGN_S = 1.0  # seconds between two signs of life
LOOK_S = 0.0002
END_S = 3.0  # seconds that threads get to end
NOT_KEPT = (
    "keys and values of a dead shard are computed again: this kernel makes no huge pages of shared memory (Linux 6.1 "
    "does, unless shmem_enabled is deny), and small ones would slow each step down"
)


@dataclass(frozen=True, slots=True)
class NewShard:
    """What a shard has of its template."""

    epoch: int
    machine_shards: int | None
    report_fd: int
    measured_fd: int  # takes what its Warmup has measured
    measured: Measured | None  # by earlier shards
    kept: KeptMemory | None  # for keys and values

    def note_measured(self, measured: Measured) -> None:
        if measured != self.measured:
            with suppress(BrokenPipeError):  # The template has ended, and the launcher makes another one.
                os.write(self.measured_fd, json.dumps(asdict(measured)).encode() + b"\n")

    def note_ready(self) -> None:
        with suppress(BrokenPipeError):
            os.write(self.report_fd, READY)
        os.close(self.report_fd)


def serve(config: ShardConfig, control_fd: int, set_up: Callable[[int], None]) -> None:
    """Loads the model, and forks shards until the launcher ends. Returns in shards only, when they have served.
    `set_up` is called in each shard with the number of its epoch. ShardError if the model cannot be served."""
    control, launcher = socket.socket(fileno=control_fd), os.getppid()
    # The launcher has seen no GPU. If torch does, its memory cannot be forked: this process becomes the shard.
    loaded = None if torch.cuda.is_available() else _load(config, control)
    can_fork = loaded is not None and _has_one_thread()
    kept = memory_for_keys() if can_fork else None
    if can_fork and kept is None and config.rank == 0:
        logger.info("%s", NOT_KEPT)
    gc.collect()
    gc.freeze()  # The collector would write to every object, and so copy the pages that are shared.
    score = be_ended_first()
    name_process(TEMPLATE_NAME)
    forget = (lambda: None) if loaded is None else loaded.adapters.forget
    shard = TemplateLoop(control, launcher, kept, forget, can_fork).fork_for_ever()
    set_oom_score(score)
    set_up(shard.epoch)
    _serve_shard(replace(config, epoch=shard.epoch, machine_shards=shard.machine_shards), loaded, shard)


def _load(config: ShardConfig, control: socket.socket) -> LoadedModel:
    threading.stack_size(COMPILER_STACK_BYTES)  # as in `server.serve`
    prepare_to_join(config.world_size)
    _leave_out_spare_pool()
    # OpenMP's threads end with the thread that has used them.
    with ThreadPoolExecutor(1, "loading") as pool:
        group = unjoined(config.rank, config.world_size)
        loading = pool.submit(
            load_model, config, _signs_of_life(control), lambda device: group, kept=KeptMemory("tgi-adapters")
        )
        # What a shard imports, and this process never calls: gRPC starts threads with its first server or channel.
        from text_generation_server import server  # noqa: F401
    loaded = loading.result()
    loaded.end_threads()
    return loaded


def _serve_shard(config: ShardConfig, loaded: LoadedModel | None, shard: NewShard) -> None:
    from text_generation_server import server

    def load(config: ShardConfig, worker: Worker) -> Shard:
        if loaded is None:
            return load_shard(config, worker)
        made = take_over(config, loaded, worker)
        made.runner.measured, made.runner.kept = shard.measured, shard.kept
        return made

    server.serve(config, load, shard.note_ready, shard.note_measured)


class TemplateLoop:
    """Forks a shard for each message on `control`. `launcher`: the process that becomes the parent of each. `kept`: for
    the keys and values of all. `forget`: called after a shard that may have left anything in memory that the next one
    would use. `can_fork`: False if this process is to become the first shard itself."""

    def __init__(
        self,
        control: socket.socket,
        launcher: int,
        kept: KeptMemory | None,
        forget: Callable[[], None],
        can_fork: bool = True,
    ) -> None:
        self._control = control
        self._launcher = launcher
        self._forget = forget
        self._is_first = True
        self._can_fork = can_fork
        self._measured: Measured | None = None
        self._kept = kept
        self._reports: dict[int, bytes] = {}  # open pipes from shards, and what came since the last whole line
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def fork_for_ever(self) -> NewShard:
        """Returns in each new shard. The template ends with its launcher."""
        while True:
            ready = [key.fd for key, _ in self._selector.select()]
            for fd in self._reports.keys() & ready:  # first: the next shard should know what the last one has measured
                self._read_measured(fd)
            if self._control.fileno() in ready and (shard := self._fork_one()) is not None:
                return shard

    def _read_measured(self, fd: int) -> None:
        content = os.read(fd, MAX_MESSAGE_BYTES)
        if not content:
            self._selector.unregister(fd)
            del self._reports[fd]
            os.close(fd)
            return
        *lines, self._reports[fd] = (self._reports[fd] + content).split(b"\n")
        if lines:
            fields = json.loads(lines[-1])
            capacity = Capacity(**fields["capacity"])
            self._measured = Measured(tuple(fields["asked"]), capacity, fields["longest_pause_s"])

    def _fork_one(self) -> NewShard | None:
        message, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 2)
        if not message:
            os._exit(0)  # The launcher has ended.
        output_fd, report_fd = fds
        measured_fd, write_fd = os.pipe()
        faults.point("template.fork")
        number, shards, *keeps = message.decode().split()
        epoch = int(number)
        if keeps != [KEEPS]:
            if self._kept is not None:
                self._kept.rename(0)
            if not self._is_first:
                self._forget()
        self._is_first = False
        if fork_below(self._launcher, f"tgi-shard {epoch}", self._can_fork):
            for fd in (output_fd, report_fd, write_fd):
                os.close(fd)
            self._selector.register(measured_fd, selectors.EVENT_READ)
            self._reports[measured_fd] = b""
            return None
        os.write(report_fd, f"{os.getpid()}\n".encode())
        for standard in (1, 2):
            os.dup2(output_fd, standard)
        for fd in (output_fd, measured_fd, *self._reports):
            os.close(fd)
        self._selector.close()
        self._control.close()
        return NewShard(
            epoch=epoch,
            machine_shards=int(shards) or None,
            report_fd=report_fd,
            measured_fd=write_fd,
            measured=self._measured,
            kept=self._kept,
        )


def _leave_out_spare_pool() -> None:
    """torch makes a pool of threads, which no layer of ours uses, when it is first told their number: here without any
    threads."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_num_threads(number)


def _has_one_thread() -> bool:
    """Waits for threads that are ending."""
    deadline_s = time.monotonic() + END_S
    while (count := len(os.listdir("/proc/self/task"))) > 1:
        if time.monotonic() > deadline_s:
            logger.warning("loading has left %d threads: this shard has no template", count)
            return False
        time.sleep(LOOK_S)
    return True


def _signs_of_life(control: socket.socket) -> Callable[[], None]:
    last_s = 0.0

    def on_tensor() -> None:
        nonlocal last_s
        if (now_s := time.monotonic()) - last_s >= SIGN_S:
            last_s = now_s
            with suppress(OSError):  # The launcher has ended, or does not read.
                control.send(b".", socket.MSG_DONTWAIT)

    return on_tensor
