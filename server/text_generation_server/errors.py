"""What can be wrong with a shard's options, weights or memory, in one small tree. `cli.py` shows one as a line."""


class ShardError(Exception):
    """Something the user can mend. The text is one line: what is wrong, why, and what to do."""


class OptionError(ShardError):
    """A command-line option or an environment variable asks for something that does not exist."""


class WeightsError(ShardError):
    """Weights, or the files beside them, are missing, broken, refused, or could not be fetched."""


class NetworkError(WeightsError):
    """The hub could not be reached, or broke off: trying again may help."""


class ModelError(ShardError):
    """config.json describes a model that is not supported, or does not describe one."""


class MemoryLimitError(ShardError):
    """The KV cache that is asked for, or the largest step, does not fit."""


class StepError(ShardError):
    """A call that does not fit what the shard holds. A bug of the caller: nothing has been changed."""


class StepRefused(ShardError):
    """A step of another generation, or one that has been run already."""


class StepAborted(ShardError):
    """A step that was not run: its predecessor did not come, or an earlier one failed."""


class StepFailed(ShardError):
    """A step that raised. All rows are void until a ClearCache."""


class GroupBroken(ShardError):
    """A rank failed after the group's first collective of a step: the others may wait for it, so its process ends."""
