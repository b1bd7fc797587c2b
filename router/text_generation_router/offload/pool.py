"""A pool of child processes. Each child does one job at a time, and is replaced when it dies or takes too long.

The pool is for work that holds the interpreter lock for a long time, because a thread would still block the event loop,
and for work that may never end, because a thread cannot be stopped.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from text_generation_common.logs import request_id
from text_generation_common.tasks import cancelled
from text_generation_router.offload.errors import BusyError, JobError, JobLostError, JobTimeoutError
from text_generation_router.offload.process import ChildProcess

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Job:
    """A job for a child."""

    name: str
    content: bytes
    tenant: str
    timeout_s: float  # seconds that the job may take once a child has it
    answer: asyncio.Future[bytes]
    refusal_timer: asyncio.TimerHandle | None = None  # refuses the job if no child gets it in time
    id_in_logs: str = field(default_factory=request_id.get)  # the HTTP request's


class Waiting:
    """A bounded queue of jobs that wait for a child. Tenants take turns; the jobs of one tenant keep their order."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._size = 0
        self._tenants: OrderedDict[str, deque[Job]] = OrderedDict()

    def __len__(self) -> int:
        return self._size

    def put(self, job: Job) -> Job | None:
        """Adds `job`. If the queue is full, removes and returns the newest job of the tenant with most waiting jobs."""
        self._tenants.setdefault(job.tenant, deque()).append(job)
        self._size += 1
        if self._size <= self._capacity:
            return None
        # Between tenants with equal numbers of jobs, the tenant of the new job loses a job: jobs that wait already
        # stay.
        largest = max(self._tenants, key=lambda tenant: (len(self._tenants[tenant]), tenant == job.tenant))
        last = self._tenants[largest][-1]
        self.remove(last)
        return last

    def take(self) -> Job | None:
        """The oldest job of the tenant whose turn it is; the turn then passes to the next tenant."""
        if not self._tenants:
            return None
        tenant, jobs = next(iter(self._tenants.items()))
        job = jobs[0]
        self.remove(job)
        if tenant in self._tenants:
            self._tenants.move_to_end(tenant)
        return job

    def remove(self, job: Job) -> bool:
        """Removes the job. Returns whether it was still waiting."""
        jobs = self._tenants.get(job.tenant)
        if jobs is None or job not in jobs:
            return False
        jobs.remove(job)
        self._size -= 1
        if not jobs:
            del self._tenants[job.tenant]
        return True


# Seconds between two attempts to start a child.
START_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class PoolLimits:
    children: int
    waiting: int  # most jobs that may wait for a child
    wait_s: float = 10.0  # seconds that a job may wait for a child
    memory_bytes: int = 256 * 2**20  # bytes that a child may allocate in addition to its memory when it is ready
    # Seconds of processor time that one job may take. The jobs' timeouts are shorter, except where a job may wait for a
    # processor: this limit ends a child whose parent is suspended.
    cpu_s: float = 30.0
    max_answer_bytes: int = 64 * 2**20


class ProcessPool:
    """The pool. Its children start with `start` or the first `run`. `close` must be called at the end."""

    def __init__(self, entry: str, setup: bytes, limits: PoolLimits) -> None:
        """`entry`: MODULE:FUNCTION. Each child calls the function with `setup` to get its handlers by name."""
        self._entry = entry
        self._setup = setup
        self._limits = limits
        self._waiting = Waiting(limits.waiting)
        self._changed = asyncio.Condition()
        self._keepers: list[asyncio.Task[None]] = []
        self._ready: set[ChildProcess] = set()
        self._is_closed = False

    def start(self) -> None:
        """Starts the children, unless they have been started before, or the pool is closed."""
        if self._keepers or self._is_closed:
            return
        for number in range(self._limits.children):
            self._keepers.append(asyncio.create_task(self._keep(), name=f"offload child {number}"))

    async def run(self, name: str, content: bytes, timeout_s: float, tenant: str = "") -> bytes:
        """Gives `content` to the handler `name`, and returns its answer. Raises JobError. `timeout_s` begins when a
        child gets the job. If the caller is cancelled, its waiting job leaves the queue; its running job continues
        until its end or timeout.
        """
        if self._is_closed:
            raise BusyError
        self.start()
        loop = asyncio.get_running_loop()
        job = Job(name, content, tenant, timeout_s, loop.create_future())
        job.refusal_timer = loop.call_later(self._limits.wait_s, _fail, job, BusyError())
        if (refused := self._waiting.put(job)) is not None:
            _fail(refused, BusyError())
        try:
            async with self._changed:
                self._changed.notify_all()
            return await job.answer
        finally:
            job.refusal_timer.cancel()
            self._waiting.remove(job)

    async def all_ready(self) -> None:
        """Waits until a child is ready in the place of each that has died, but at most `wait_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.wait_s), self._changed:
                await self._changed.wait_for(lambda: len(self._ready) == self._limits.children)

    async def close(self) -> None:
        """Kills the children. Waiting and running jobs end with JobLostError. May be called more than once."""
        self._is_closed = True
        keepers, self._keepers = self._keepers, []
        await cancelled(*keepers)
        while (job := self._waiting.take()) is not None:
            _fail(job, JobLostError())

    async def _keep(self) -> None:
        """Keeps one child running, and gives it one job at a time."""
        job: Job | None = None
        try:
            while True:
                async with self._child() as child:
                    while child.is_usable:
                        job = job or await self._next()
                        # Otherwise the child was killed from outside, and the next child does the job.
                        if child.is_usable:
                            await self._do(job, child)
                            job = None
        finally:
            if job is not None:
                _fail(job, JobLostError())

    @asynccontextmanager
    async def _child(self) -> AsyncGenerator[ChildProcess, None]:
        """Starts a child and yields it once it is ready. Retries until a child starts; jobs that wait too long
        meanwhile are refused.
        """
        while True:
            try:
                limits = self._limits
                child = await ChildProcess.start(
                    self._entry, limits.memory_bytes, limits.cpu_s, limits.max_answer_bytes
                )
                try:
                    await child.set_up(self._setup)
                    self._ready.add(child)
                    async with self._changed:
                        self._changed.notify_all()
                    yield child
                    return
                finally:
                    self._ready.discard(child)
                    await child.end()
            except (OSError, JobError, TimeoutError) as error:
                logger.error("a child process did not start (%s): trying again", type(error).__name__)
                await asyncio.sleep(START_AGAIN_S)

    async def _next(self) -> Job:
        async with self._changed:
            while (job := self._waiting.take()) is None:
                await self._changed.wait()
            return job

    async def _do(self, job: Job, child: ChildProcess) -> None:
        assert job.refusal_timer is not None
        job.refusal_timer.cancel()
        if job.answer.done():  # the job was refused, or its caller was cancelled
            return
        try:
            async with asyncio.timeout(job.timeout_s):
                answer = await child.ask(job.name, job.content)
        except TimeoutError:
            slow = "a child was killed: a job (%s) took longer than %g s"
            logger.warning(slow, job.name, job.timeout_s, extra={"request_id": job.id_in_logs})
            _fail(job, JobTimeoutError())
        except JobError as error:
            if isinstance(error, JobLostError):
                about = {"request_id": job.id_in_logs}
                logger.warning("a child died while it worked on a job (%s): %s", job.name, error, extra=about)
            _fail(job, error)
        else:
            if not job.answer.done():
                job.answer.set_result(answer)


def _fail(job: Job, error: JobError) -> None:
    if not job.answer.done():
        job.answer.set_exception(error)
