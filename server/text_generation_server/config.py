"""The flags and variables of the shard's commands, and all settings of a shard process in one value."""

# ruff: noqa: RUF009  (`flag` returns `dataclasses.field`, which ruff cannot see)

from dataclasses import dataclass
from pathlib import Path

from text_generation_common.flags.declaration import borrowed, flag
from text_generation_common.flags.http import HttpFlags
from text_generation_common.flags.kinds import LoadFormat, Topic
from text_generation_common.flags.model import AdapterFlags, ComputeFlags, FileFlags, ModelFlags, ShardFlags
from text_generation_common.flags.process import (
    AbsentFlags,
    AbsentShardFlags,
    InheritedFlags,
    ProcessFlags,
    TracingFlags,
)
from text_generation_common.flags.requests import RequestFlags, TokenFlags


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFlags:
    """Flags that every command of the shard has."""

    model_id: str = borrowed(ModelFlags, "model_id")
    revision: str | None = borrowed(FileFlags, "revision")
    load_format: LoadFormat = borrowed(ModelFlags, "load_format")
    logger_level: str = flag("INFO", "error, warn, info, debug, or a filter like info,NAME=debug.", topic=Topic.LOGS)
    trust_remote_code: bool = borrowed(AbsentFlags, "trust_remote_code")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlags:
    """The command line of `serve`."""

    command: CommandFlags
    process: ProcessFlags = ProcessFlags()
    compute: ComputeFlags = ComputeFlags()
    sharded: bool = flag(False, "Be one rank of a group; needs RANK and WORLD_SIZE.", topic=Topic.COMPUTING, off=True)
    uds_path: str | None = flag(
        None, "Listen on unix://UDS_PATH-RANK; in the folder of --port when not given.", topic=Topic.COMPUTING
    )
    port: int = borrowed(HttpFlags, "port")
    max_input_tokens: int | None = borrowed(TokenFlags, "max_input_tokens")
    disable_grammar_support: bool = borrowed(RequestFlags, "disable_grammar_support")
    speculate: int | None = borrowed(AbsentShardFlags, "speculate")
    otlp_endpoint: str | None = borrowed(TracingFlags, "otlp_endpoint")
    otlp_service_name: str = borrowed(TracingFlags, "otlp_service_name")


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadFlags:
    """The command line of `download-weights`."""

    command: CommandFlags
    json_output: bool = borrowed(ProcessFlags, "json_output")
    extension: str = flag(".safetensors", "Only .safetensors can be served.")
    auto_convert: bool = flag(True, "Convert .bin weights if there are no .safetensors.")
    progress_interval: float = flag(
        5.0, "Seconds between two lines about a download, where there is no terminal.", min=0, positive=True
    )
    merge_lora: bool = flag(False, "Not supported yet.", off=True, refused_except=(False,))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardVariables:
    """Settings that `serve` reads from its environment."""

    rank: int = flag(0, "Number of this shard in its group.", min=0)
    world_size: int = flag(1, "Number of shards in the group.", min=1)
    machine_shards: int | None = flag(
        None,
        "Number of shards that share this machine, also of other groups; those of the group when not given.",
        min=1,
    )
    epoch: int = flag(1, "Each start of the group is a new epoch.", env="TGI_EPOCH", min=1)
    max_total_tokens: int | None = borrowed(TokenFlags, "max_total_tokens")
    shard: ShardFlags = ShardFlags()
    adapters: AdapterFlags = AdapterFlags()
    step_log: Path | None = flag(None, "File to which rank 0 appends a line for each forward step.")
    inherited: InheritedFlags = InheritedFlags()
    template_fd: int | None = flag(None, "Socket on which a template is asked to fork shards.", hidden=True)
    with_families: int = flag(1, "0, with --testing: transformers computes every model.", min=0, max=1, hidden=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardConfig:
    """All settings of a shard process. Made once, by `cli.py`."""

    model_path: Path  # a local directory with config.json and safetensors files, checked
    uds_path: str  # the shard listens on unix://<uds_path>-<rank>
    rank: int
    world_size: int
    epoch: int
    machine_shards: int | None = None  # number of shards that share this machine; None: those of the group
    max_total_tokens: int | None = None  # longest prompt and output together; None: the model's limit
    load_format: LoadFormat = LoadFormat.auto  # "dummy": random weights, and no weights file is read
    compute: ComputeFlags = ComputeFlags()
    shard: ShardFlags = ShardFlags()
    adapters: AdapterFlags = AdapterFlags()
    step_log: Path | None = None
    disable_grammar_support: bool = (
        False  # whether requests with a grammar fail, and the tokenizer is not read for them
    )
    with_families: bool = True  # False in tests: transformers computes the models of all families

    @property
    def num_neighbours(self) -> int:
        """Number of shards that share cores and memory of this machine, this one included."""
        return max(self.world_size, self.machine_shards or 0)

    @property
    def graph_sizes(self) -> tuple[int, ...] | None:
        """Numbers of rows of recorded decode steps; None: the default numbers."""
        text = self.shard.cuda_graphs
        return None if text is None else graph_sizes(text)

    @property
    def watermark(self) -> tuple[float, float]:
        """Watermark parameters of TGI: gamma and delta."""
        gamma, delta = self.shard.watermark_gamma, self.shard.watermark_delta
        return 0.5 if gamma is None else gamma, 2.0 if delta is None else delta


def graph_sizes(text: str) -> tuple[int, ...]:
    """Parses a list of numbers of rows, sorted. Zeros are dropped, so "0" gives an empty list."""
    return tuple(sorted({size for size in map(_natural, text.split(",")) if size}))


def _natural(text: str) -> int:
    if (number := int(text)) < 0:
        raise ValueError("it must not be negative")
    return number
