"""The errors that end the launcher, in one small tree. `cli.py` prints them on stderr and exits with 1.

CommandError
├── ArgumentValidation   of text_generation_common
├── AddressInUse         of text_generation_common
├── CredentialsError     of text_generation_common
├── NotEnoughCUDADevices
├── DownloadError
├── ShardCannotStart
├── ShardFailed
├── ScaleRefused
├── RayFailed
├── WebserverCannotStart
└── WebserverFailed
"""

from text_generation_common.errors import CommandError


class NotEnoughCUDADevices(CommandError):
    """`--sharded true` was given, and fewer than two devices are visible."""


class DownloadError(CommandError):
    """The weights are missing or incomplete, or the program that downloads them is missing."""


class ShardCannotStart(CommandError):
    """No group of shards became ready: the user must correct something, or the starts failed too often."""


class ShardFailed(CommandError):
    """Shards died or hung too often without one successful step in between."""


class ScaleRefused(CommandError):
    """There cannot be as many replicas as were asked for."""


class RayFailed(CommandError):
    """Ray cannot be reached, or a replica did not serve on any machine of the cluster."""


class WebserverCannotStart(CommandError):
    """The router's program is missing."""


class WebserverFailed(CommandError):
    """The router ended before it served for the first time, or ended too often."""
