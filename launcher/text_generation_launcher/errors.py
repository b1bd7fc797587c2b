"""What can end the launcher, in one small tree. `cli.py` prints it as `Error: …` on stderr and exits with 1."""

import json


class LauncherError(Exception):
    """Prints as TGI does: the name of the kind, and the reason in quotes where there is one."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        kind = type(self).__name__
        return f"{kind}({json.dumps(self.reason, ensure_ascii=False)})" if self.reason else kind


class ArgumentValidation(LauncherError):
    """A flag or a combination of flags that cannot be served."""


class NotEnoughCUDADevices(LauncherError):
    """`--sharded true` with fewer than two devices in sight."""


class AddressInUse(LauncherError):
    """The API port or the place of the shards' sockets belongs to somebody else, or cannot be had."""


class DownloadError(LauncherError):
    """The weights are not there, not whole, or their program is missing."""


class ShardCannotStart(LauncherError):
    """No group of shards got ready: the user must mend something, or the starts failed too often."""


class ShardFailed(LauncherError):
    """Shards died or hung too often, and no step of theirs was of use in between."""


class WebserverCannotStart(LauncherError):
    """The router's program is missing."""


class WebserverFailed(LauncherError):
    """The router ended before it ever served, or too often."""
