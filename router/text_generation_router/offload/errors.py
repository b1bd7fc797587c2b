"""What can become of a job other than an answer. Whoever submits a job turns these into errors of its own route."""


class JobError(Exception):
    """There is no answer."""


class BusyError(JobError):
    """Too many jobs wait, or this one waited too long for a child."""


class JobTimeoutError(JobError):
    """The job ran longer than it may: its child was killed."""


class JobLostError(JobError):
    """The child died while it worked on the job; a job that exceeds a hard limit of memory or time ends so."""


class JobFailedError(JobError):
    """The handler raised. `reason` is the exception's class name: its text could hold a user's words."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
