"""The limit of open files, which the processes of a server inherit."""

import resource

from text_generation_launcher.errors import ArgumentValidation

# A shard opens about 60 while it loads, the launcher a few for every shard; the rest is for connections.
NEEDED = 128


def allow_open_files(num_shard: int) -> None:
    """Raises this process's soft limit where it is too low and may be raised. ArgumentValidation where it may not."""
    needed = NEEDED + 8 * num_shard
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ArgumentValidation(
            f"a process of this server may have {hard} open files, and {needed} are needed: raise `ulimit -Hn`"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
