"""The version of proto/engine.proto that this build speaks, and which versions of its peer it understands."""

from text_generation_router.wire.errors import WireError

VERSION = 2
# Since this version an engine tells which requests have begun, takes suspects of one loss only, and gives running
# requests back.
WITH_BEGUN = 2


def check_version(peer: int) -> int:
    """The version that both sides speak. `peer`: the other side's newest. Raises WireError."""
    if peer < 1 or peer < VERSION - 1:
        raise WireError(
            f"the peer speaks version {peer} of engine.v1, and this build {VERSION}: upgrade the peer first"
        )
    return min(peer, VERSION)
