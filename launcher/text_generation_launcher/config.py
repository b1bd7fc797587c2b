"""The launcher's flags as given, and the plan that is made from them: which children to start, and how.

`resolve.py` makes the plan. The rest of the launcher reads the plan and never the command line.
"""

# ruff: noqa: RUF009  (`flag` returns `dataclasses.field`, which ruff cannot see)

from dataclasses import dataclass

from text_generation_common.flags.cluster import ClusterFlags
from text_generation_common.flags.declaration import flag
from text_generation_common.flags.http import AccessFlags, HttpFlags
from text_generation_common.flags.kinds import LoadFormat, Standby, Topic, TrueFalse
from text_generation_common.flags.model import (
    AdapterFlags,
    CacheFlags,
    ComputeFlags,
    FileFlags,
    FormatFlags,
    ModelFlags,
    NameFlags,
    ShardFlags,
)
from text_generation_common.flags.process import AbsentFlags, AbsentShardFlags, ProcessFlags, TracingFlags
from text_generation_common.flags.requests import RequestFlags, SchedulingFlags, TokenFlags
from text_generation_common.places import ServerPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherConfig:
    """The command line. The value of a flag that is not given may be None."""

    model: ModelFlags = ModelFlags()
    names: NameFlags = NameFlags()
    files: FileFlags = FileFlags()
    cache: CacheFlags = CacheFlags()
    compute: ComputeFlags = ComputeFlags()
    sharded: TrueFalse | None = flag(None, "Whether to spread the model over several shards.", topic=Topic.COMPUTING)
    num_shard: int | None = flag(
        None, "Number of shards, on GPUs or CPUs; the number of visible GPUs when not given.", topic=Topic.COMPUTING
    )
    shard_uds_path: str | None = flag(
        None,
        "Path prefix of the shards' sockets, `<prefix>-<rank>`; a private folder for each port when not given.",
        topic=Topic.COMPUTING,
    )
    standby: Standby | None = flag(
        None,
        "on: on CPUs, a process waits for each shard that has loaded the model, and replaces a dead shard at once. It"
        " has the weights in common with the shard, and takes some tens of MiB of its own. One more does so for routers"
        " and engines. On when not given, on Linux; with GPUs for routers and engines only.",
        topic=Topic.COMPUTING,
        env="TGI_STANDBY",
    )
    shard: ShardFlags = ShardFlags()
    adapters: AdapterFlags = AdapterFlags()
    requests: RequestFlags = RequestFlags()
    formats: FormatFlags = FormatFlags()
    tokens: TokenFlags = TokenFlags()
    max_input_length: int | None = flag(
        None, "Old name of --max-input-tokens.", topic=Topic.SCHEDULING, min=0, positive=True
    )
    scheduling: SchedulingFlags = SchedulingFlags()
    http: HttpFlags = HttpFlags()
    cluster: ClusterFlags = ClusterFlags()
    access: AccessFlags = AccessFlags()
    process: ProcessFlags = ProcessFlags()
    # The variable is not CONFIG, which other programs and builds set for themselves.
    config: str | None = flag(
        None,
        "TOML file with values by the names of flags, as in max-best-of = 2. Flags and the environment override it.",
        topic=Topic.MODEL,
        env="TGI_CONFIG",
    )
    print_config: bool = flag(
        False,
        "Print each value with its source, as such a file, and what a start would refuse; start nothing.",
        topic=Topic.LOGS,
        env=False,
    )
    env: bool = flag(False, "Log versions, platform and GPUs, then serve.", topic=Topic.LOGS, short="-e", env=False)
    tracing: TracingFlags = TracingFlags()
    absent: AbsentFlags = AbsentFlags()
    absent_of_shards: AbsentShardFlags = AbsentShardFlags()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Checked flags, and all values derived from flags, environment and model. Children get the groups unchanged;
    `tokens` is completed once the model's files are there.
    """

    model_id: str  # an absolute directory, or a hub id
    num_shard: int
    load_format: LoadFormat
    names: NameFlags = NameFlags()
    files: FileFlags
    cache: CacheFlags
    compute: ComputeFlags
    shard: ShardFlags
    standby: Standby | None = None  # as given: engines elsewhere choose by their own machine
    adapters: AdapterFlags = AdapterFlags()
    requests: RequestFlags
    formats: FormatFlags = FormatFlags()
    tokens: TokenFlags
    scheduling: SchedulingFlags
    http: HttpFlags
    cluster: ClusterFlags = ClusterFlags()
    devices: tuple[str, ...] = ()  # GPUs that replicas share out, as CUDA_VISIBLE_DEVICES names them; (): none
    access: AccessFlags
    tracing: TracingFlags = TracingFlags()
    process: ProcessFlags


@dataclass(frozen=True, slots=True)
class ReplicaSite:
    """What is a replica's own on this machine: its place, its name, its GPUs. The first replica's site is also that of
    a server without replicas."""

    place: ServerPlace
    number: int = 0
    is_one_of_several: bool = False
    devices: tuple[str, ...] = ()  # GPUs, as CUDA_VISIBLE_DEVICES names them; (): all that the launcher sees

    @property
    def suffix(self) -> str:
        """What tells this replica's processes from those of others, in names within log lines."""
        return f" {self.number}" if self.is_one_of_several else ""

    @property
    def log_fields(self) -> dict[str, object]:
        return {"replica": self.number} if self.is_one_of_several else {}


def slices(devices: tuple[str, ...], num_shard: int) -> list[tuple[str, ...]]:
    """The GPUs of each replica; a rest too small for a replica is left out."""
    return [devices[start : start + num_shard] for start in range(0, len(devices) - num_shard + 1, num_shard)]
