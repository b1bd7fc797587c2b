"""Jobs that wait for a child: bounded, each tenant in turn. Pure: no processes, no asyncio beyond a job's future."""

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Job:
    name: str
    content: bytes
    tenant: str
    timeout_s: float  # from when a child gets it
    answer: asyncio.Future[bytes]
    patience: asyncio.TimerHandle | None = None  # until a child gets it


class Waiting:
    """Tenants take turns; the jobs of one go in order."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._size = 0
        self._tenants: OrderedDict[str, deque[Job]] = OrderedDict()

    def __len__(self) -> int:
        return self._size

    def put(self, job: Job) -> Job | None:
        """Returns the job that finds no room: the newest one of the tenant that has most waiting."""
        self._tenants.setdefault(job.tenant, deque()).append(job)
        self._size += 1
        if self._size <= self._capacity:
            return None
        # Of equals the newcomer's: whoever waits already stays.
        greediest = max(self._tenants, key=lambda tenant: (len(self._tenants[tenant]), tenant == job.tenant))
        last = self._tenants[greediest][-1]
        self.remove(last)
        return last

    def take(self) -> Job | None:
        """Of the tenant whose turn it is, the oldest job; then it is the next tenant's turn."""
        if not self._tenants:
            return None
        tenant, jobs = next(iter(self._tenants.items()))
        job = jobs[0]
        self.remove(job)
        if tenant in self._tenants:
            self._tenants.move_to_end(tenant)
        return job

    def remove(self, job: Job) -> bool:
        """Whether it was still waiting."""
        jobs = self._tenants.get(job.tenant)
        if jobs is None or job not in jobs:
            return False
        jobs.remove(job)
        self._size -= 1
        if not jobs:
            del self._tenants[job.tenant]
        return True
