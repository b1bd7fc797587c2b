"""Failures of a job. The code that submits a job turns them into errors of its own route."""

import signal


class JobError(Exception):
    """A job failed. Base class of the errors below."""


class BusyError(JobError):
    """Too many jobs wait, or this job waited too long for a child."""


class JobTimeoutError(JobError):
    """The job ran longer than its timeout, and its child was killed."""


class JobLostError(JobError):
    """The child died during the job, for example because the job exceeded a hard limit of memory or CPU time."""

    def __init__(self, status: int | None = None) -> None:
        """`status`: the child's exit status, negative for a signal; None: unknown."""
        super().__init__(f"exit status {status}")
        self.status = status

    @property
    def is_own_fault(self) -> bool:
        """Whether the child died of what it did. SIGKILL comes from outside, or from a kernel that lacks memory."""
        return self.status not in (None, 0, -signal.SIGKILL)


class JobFailedError(JobError):
    """The handler raised an exception. `reason` is the exception's class name: the text could hold a user's words."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
