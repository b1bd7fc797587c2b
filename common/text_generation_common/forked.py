"""What launcher and templates say to each other: see the shard's `template.py`."""

READY = b"ready\n"  # a shard's second line
MAX_MESSAGE_BYTES = 4096
