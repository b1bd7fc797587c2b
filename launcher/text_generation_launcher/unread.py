"""Which of the launcher's flags a way to serve does not read, because their reader is a process that another launcher
starts."""

from collections.abc import Collection, Iterator, Mapping

from text_generation_common.flags.cluster import Way
from text_generation_common.flags.declaration import Flag, flags_of
from text_generation_common.flags.http import AccessFlags, HttpFlags
from text_generation_common.flags.model import ComputeFlags, FormatFlags, NameFlags, ShardFlags
from text_generation_common.flags.process import TracingFlags
from text_generation_common.flags.requests import RequestFlags, SchedulingFlags, TokenFlags

# Groups of flags that fronts, or engines, read; with the flags that a launcher needs even if it starts none of them.
_OF_FRONTS: Mapping[type, Collection[str]] = {
    NameFlags: (),
    RequestFlags: ("max_concurrent_requests", "disable_grammar_support"),
    FormatFlags: (),
    HttpFlags: ("tgi_buckets", "graceful_termination_timeout"),
    AccessFlags: (),
    TracingFlags: (),
}
_OF_ENGINES: Mapping[type, Collection[str]] = {
    ComputeFlags: (),
    ShardFlags: (),
    TokenFlags: (),
    SchedulingFlags: ("prefix_cache_scope",),  # what fronts make of a request's key and tenant
}
_SHARDS = ("sharded", "num_shard", "load_format", "max_input_length")

_UNREAD = {
    Way.ENGINE: (frozenset[str](), _OF_FRONTS, "with --engine-only: it is for fronts, so give it to them"),
    Way.FRONTS: (
        frozenset(_SHARDS),
        _OF_ENGINES,
        "on a server without engines: it is for them, so give it to each beside --engine-only",
    ),
}


def unread_flags(way: Way) -> frozenset[str]:
    """Names of the flags that have no effect in this way to serve."""
    if way not in _UNREAD:
        return frozenset()
    others, groups, _ = _UNREAD[way]
    return others.union(*({flag.name for flag in flags_of(group)} - {*read} for group, read in groups.items()))


def unread(flags: Iterator[Flag], values: Mapping[str, object], way: Way) -> Iterator[str]:
    """A line for each flag that is given, and that this way to serve does not read."""
    names = unread_flags(way)
    for flag in flags:
        if flag.name in names and values[flag.name] != flag.default and flag.no_effect is None:
            yield f"{flag.flag_name} has no effect {_UNREAD[way][2]}"
