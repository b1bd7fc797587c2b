"""A bounded queue of jobs that wait for a child; tenants take turns. Uses no processes and no event loop."""

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from text_generation_common.logs import request_id


@dataclass(slots=True, eq=False)
class Job:
    name: str
    content: bytes
    tenant: str
    timeout_s: float  # seconds that the job may take once a child has it
    answer: asyncio.Future[bytes]
    refusal_timer: asyncio.TimerHandle | None = None  # refuses the job if no child gets it in time
    id_in_logs: str = field(default_factory=request_id.get)  # the HTTP request's


class Waiting:
    """The queue. Tenants take turns; the jobs of one tenant keep their order."""

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
