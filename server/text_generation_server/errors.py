"""Errors of a shard's options, weights, memory and steps, in one small tree. `cli.py` prints an error as one line.

`step_requests.py` turns an error of a call into the gRPC status to the right of the error's name.

    ShardError                      INTERNAL where no status follows; of text_generation_common
    ├── OptionError
    ├── WeightsError                of text_generation_common
    │   └── NetworkError
    │       └── SilentHub
    ├── ModelError                  of text_generation_common
    ├── MemoryLimitError            RESOURCE_EXHAUSTED; of text_generation_common
    ├── ShardLoading                UNAVAILABLE
    ├── StepError                   INVALID_ARGUMENT from Warmup; a step that raises it becomes a StepFailed
    ├── StepRefused                 FAILED_PRECONDITION
    ├── StepAborted                 ABORTED
    ├── StepFailed                  INTERNAL
    ├── MatcherError                no status: one request of a step fails
    └── GroupBroken                 no status: the process ends
"""

from text_generation_common.errors import ShardError, WeightsError


class OptionError(ShardError):
    """A command-line option or an environment variable asks for something that does not exist."""


class NetworkError(WeightsError):
    """The hub could not be reached, or the connection was lost: trying again may help."""


class SilentHub(NetworkError):
    """The hub has never answered."""


class ShardLoading(ShardError):
    """The shard has not loaded its weights yet."""


class StepError(ShardError):
    """A call contradicts the rows and batches that the shard holds: a bug in the caller. Nothing has been changed."""


class StepRefused(ShardError):
    """A step of another epoch, or a step that has been run already."""


class StepAborted(ShardError):
    """A step that was not run, because its predecessor did not arrive or an earlier step failed."""


class StepFailed(ShardError):
    """A step that raised an exception. All rows are invalid until a ClearCache."""


class MatcherError(ShardError):
    """A request's grammar cannot be used, or does not go on. The text is for the client."""


class GroupBroken(ShardError):
    """A rank failed after the first collective of a step. Other ranks may wait for it, so its process must end."""
