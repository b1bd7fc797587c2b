"""The router's flags as given, and its settings: checked values, with files read, addresses parsed and keys as
digests.
"""

# ruff: noqa: RUF009  (`flag` returns `dataclasses.field`, which ruff cannot see)

from collections.abc import Mapping
from dataclasses import dataclass, field

from text_generation_common.flags.cluster import EngineListFlags, SecurityFlags
from text_generation_common.flags.declaration import REQUIRED, borrowed, flag
from text_generation_common.flags.http import AccessFlags, HttpFlags
from text_generation_common.flags.kinds import Topic
from text_generation_common.flags.model import AdapterFlags, CacheFlags, FileFlags, FormatFlags, NameFlags
from text_generation_common.flags.process import AbsentFlags, InheritedFlags, ProcessFlags, TracingFlags
from text_generation_common.flags.requests import RequestFlags, SchedulingFlags, TokenFlags
from text_generation_router.fleet.choice import PlacementPolicy
from text_generation_router.http.peer import Network

IMAGE_BYTES = 1_073_741_824


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFlags:
    """The router's command line. `resolve.py` makes a `RouterConfig` of it."""

    tokenizer_name: str = flag(REQUIRED, "Local directory or hub id.", topic=Topic.MODEL)
    names: NameFlags = NameFlags()
    files: FileFlags = FileFlags()
    weights_cache_override: str | None = borrowed(CacheFlags, "weights_cache_override")
    requests: RequestFlags = RequestFlags()
    formats: FormatFlags = FormatFlags()
    adapter_list: AdapterFlags = AdapterFlags()
    tokens: TokenFlags = TokenFlags()
    scheduling: SchedulingFlags = SchedulingFlags()
    http: HttpFlags = HttpFlags()
    listen_fd: int | None = flag(
        None, "A bound socket to listen on; replaces --hostname and --port.", topic=Topic.HTTP, env=False, min=0
    )
    access: AccessFlags = AccessFlags()
    master_shard_uds_path: str | None = flag(
        None,
        "The first shard's socket; the socket in the folder of --port when not given.",
        topic=Topic.COMPUTING,
    )
    engine_list: EngineListFlags = EngineListFlags()
    engines_by_launcher: bool = flag(
        False, "The engines are processes elsewhere that the launcher names.", env=False, hidden=True
    )
    placement: PlacementPolicy = flag(
        PlacementPolicy.SCORE, "How an engine is chosen for a request, of several.", env=False, hidden=True
    )
    # The launcher passes `block_hash_key` and `usage_key` in environment variables only, because every user of the
    # machine can read command lines.
    block_hash_key: str = flag("", "Key of what engines tell of their caches.", hidden=True, secret=True)
    usage_key: str = flag("", "Key of the digests of API keys on /metrics.", hidden=True, secret=True)
    security: SecurityFlags = SecurityFlags()
    launcher_fd: int | None = flag(None, "An inherited socket to the launcher.", env=False, hidden=True, min=0)
    probed_tokenizer: str | None = flag(None, "Which tokenizer.json the launcher has probed.", env=False, hidden=True)
    connections_fd: int | None = flag(
        None, "An inherited file with the number of connections of each front.", env=False, hidden=True, min=0
    )
    front_number: int = flag(0, "Place of this front in the file.", env=False, hidden=True, min=0)
    metrics_file: str | None = flag(
        None, "File with this process's metrics, beside those of the server's other processes.", env=False, hidden=True
    )
    process: ProcessFlags = ProcessFlags()
    log_level: str = flag("info", "A level's name, or a filter such as info,NAME=debug.", hidden=True)
    inherited: InheritedFlags = InheritedFlags()
    compute_type: str = flag("gpu+optimized", "What answers call the hardware.", hidden=True)
    tracing: TracingFlags = TracingFlags()
    absent: AbsentFlags = AbsentFlags()
    max_image_fetch_size: int = flag(IMAGE_BYTES, "Not supported yet.", hidden=True, refused_except=(IMAGE_BYTES,))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    tokenizer_name: str  # a local directory or a hub id; also the `model_id` of /info
    served_model_name: str  # the model's name in /v1/models, and `model` in answers
    adapters: Mapping[str, str]  # digests of LoRA adapters, by their names
    adapter_list: AdapterFlags
    files: FileFlags
    weights_cache_override: str | None  # a folder with the model's files, used instead of `tokenizer_name`
    requests: RequestFlags
    formats: FormatFlags
    tokens: TokenFlags
    scheduling: SchedulingFlags
    http: HttpFlags
    tracing: TracingFlags
    listen_fd: int | None  # a bound socket, inherited; replaces hostname and port
    launcher_fd: int | None  # an inherited socket to the launcher; None: no launcher
    probed_tokenizer: str | None  # the identity of a tokenizer.json that need not be probed again
    connections_fd: int | None  # see `connection_counts.py`; None: there are no other fronts
    front_number: int
    metrics_file: str | None  # file with this process's metrics; None: /metrics shows this process only
    placement: PlacementPolicy
    block_hash_key: bytes | None = field(repr=False)  # key of the deployment; None: engines do not tell their caches
    usage_key: str = field(repr=False)  # key of the launcher, which its fronts share
    engine_list: EngineListFlags
    engines_by_launcher: bool  # whether the launcher names the engines, which are other processes
    security: SecurityFlags
    master_shard_uds_path: str  # "" if the engine is in another process
    compute_type: str
    # The names of the API keys by their digests, "" for a key without one; if empty, no request needs a key.
    api_keys: Mapping[bytes, str] = field(repr=False)
    admin_key_digest: bytes | None = field(repr=False)  # None: there are no routes for administrators
    trusted_proxies: tuple[Network, ...]  # proxies whose forwarding headers name the client's address

    @property
    def is_front(self) -> bool:
        """Whether the engines are other processes."""
        return has_engines_elsewhere(self.engine_list, self.engines_by_launcher)


def has_engines_elsewhere(engine_list: EngineListFlags, engines_by_launcher: bool) -> bool:
    return engine_list.is_given or engines_by_launcher
