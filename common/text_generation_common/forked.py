"""What launcher, templates and forked shards say to each other: see the shard's `template.py`."""

import os

READY = b"ready\n"  # a shard's second line
MAX_MESSAGE_BYTES = 4096
KEEPS = b"keeps"
# Exit status of a shard that ends itself without any cleanup, because its group, device or worker is broken. Its keys
# and values are as sound as those of a shard that was killed.
BROKEN_STATUS = os.EX_SOFTWARE
