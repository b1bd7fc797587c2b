"""The errors that end the launcher, in one small tree. `cli.py` prints `Error: …` on stderr and exits with 1.

LauncherError
├── ArgumentValidation
├── NotEnoughCUDADevices
├── AddressInUse
├── DownloadError
├── ShardCannotStart
├── ShardFailed
├── WebserverCannotStart
└── WebserverFailed
"""

import json


class LauncherError(Exception):
    """Prints as TGI does: the name of the class, and the reason in quotes if there is a reason."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        kind = type(self).__name__
        return f"{kind}({json.dumps(self.reason, ensure_ascii=False)})" if self.reason else kind


class ArgumentValidation(LauncherError):
    """A flag or a combination of flags is wrong or not supported."""


class NotEnoughCUDADevices(LauncherError):
    """`--sharded true` was given, and fewer than two devices are visible."""


class AddressInUse(LauncherError):
    """The API port or the place of the shards' sockets is in use, belongs to another user, or cannot be made."""


class DownloadError(LauncherError):
    """The weights are missing or incomplete, or the program that downloads them is missing."""


class ShardCannotStart(LauncherError):
    """No group of shards became ready: the user must correct something, or the starts failed too often."""


class ShardFailed(LauncherError):
    """Shards died or hung too often without one successful step in between."""


class WebserverCannotStart(LauncherError):
    """The router's program is missing."""


class WebserverFailed(LauncherError):
    """The router ended before it served for the first time, or ended too often."""
