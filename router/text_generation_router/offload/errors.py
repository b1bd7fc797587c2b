"""Failures of a job. The code that submits a job turns them into errors of its own route."""


class JobError(Exception):
    """A job failed. Base class of the errors below."""


class BusyError(JobError):
    """Too many jobs wait, or this job waited too long for a child."""


class JobTimeoutError(JobError):
    """The job ran longer than its timeout, and its child was killed."""


class JobLostError(JobError):
    """The child died during the job, for example because the job exceeded a hard limit of memory or CPU time."""


class JobFailedError(JobError):
    """The handler raised an exception. `reason` is the exception's class name: the text could hold a user's words."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
