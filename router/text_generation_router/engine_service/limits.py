"""The sizes of messages that proto/engine.proto allows."""

from text_generation_router.engine.protocol import Snapshot

MESSAGE_BYTES = 4 * 2**20
# A Submit may have as many bytes besides 4 for each token of the context.
SUBMIT_BYTES = 2**20
# Bytes of the message around a Submit.
ENVELOPE_BYTES = 16


def submit_bytes(snapshot: Snapshot) -> int:
    """The largest Submit."""
    tokens = max(snapshot.model.max_positions, snapshot.limits.max_total_tokens)
    return 4 * tokens + SUBMIT_BYTES
