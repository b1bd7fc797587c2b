"""The names by which fronts know an engine, and the digest of everything that decides its tokens."""

import importlib.metadata
from dataclasses import dataclass, fields
from pathlib import Path

from text_generation_common.flags.kinds import LoadFormat
from text_generation_common.flags.model import ComputeFlags, ShardFlags
from text_generation_common.weights.digest import model_digest
from text_generation_router.engine.protocol import ModelInfo

# Flags of shards that are not part of the digest: they change no token, or only through facts that the shards report.
WITHOUT_EFFECT = ("dtype", "cuda_graphs", "cuda_memory_fraction", "cpu_target")


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    engine_id: str  # new at each start of the engine's process
    term: int  # incarnation number of the replica's engine
    digest: bytes  # digest of everything that decides the tokens of a request


def engine_digest(
    folder: Path,
    model: ModelInfo,
    compute: ComputeFlags,
    shard: ShardFlags,
    load_format: LoadFormat = LoadFormat.auto,
) -> bytes:
    """Digest of everything that decides the tokens of a request: the model in `folder`, what the shards report about
    themselves, and flags. WeightsError: the model's files cannot be read."""
    flags = {
        field.name: str(getattr(given, field.name))
        for given in (compute, shard)
        for field in fields(given)
        if field.name not in WITHOUT_EFFECT
    }
    facts = {
        "type": model.dtype,
        "device": model.device_type,
        "kernels": _target(model.kernels),
        "shards": str(model.world_size),
        "grammars": importlib.metadata.version("llguidance"),
    }
    if model.adapters:
        facts["adapters"] = ",".join(sorted(model.adapters))
    if load_format is LoadFormat.dummy:  # the weights are random, and the folder may have no files of weights
        return model_digest(folder, flags | facts | {"weights": "dummy"}, has_weights=False)
    return model_digest(folder, flags | facts)


def _target(kernels: str) -> str:
    """The name of a shard's kernels, without the reason why better kernels were not taken."""
    return kernels.split(";")[0].split(",")[0]
