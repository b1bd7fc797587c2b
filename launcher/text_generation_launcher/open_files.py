"""Raises the limit of open files, which all processes of a server inherit."""

import resource

from text_generation_common.errors import ArgumentValidation

# Open files that a process needs: a shard opens about 60 while it loads; the others are for connections. The launcher
# opens a few more for every shard.
NEEDED = 128


def allow_open_files(num_shard: int) -> None:
    """Raises the soft limit of this process if it is too low. ArgumentValidation if the hard limit is too low."""
    needed = NEEDED + 8 * num_shard
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ArgumentValidation(
            f"a process of this server may have {hard} open files, and {needed} are needed: raise `ulimit -Hn`"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
