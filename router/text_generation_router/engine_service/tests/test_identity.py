"""The digest of an engine follows the shards' facts and the flags that decide tokens."""

from dataclasses import replace
from pathlib import Path

import pytest

from text_generation_common.errors import WeightsError
from text_generation_common.flags.kinds import ActivationType, KvCacheDtype, LoadFormat, Quantize
from text_generation_common.flags.model import ComputeFlags, ShardFlags
from text_generation_common.model_files import demo_directory
from text_generation_router.engine.tests.fakes import INFO
from text_generation_router.engine_service.identity import engine_digest

COMPUTE, SHARD = ComputeFlags(), ShardFlags()
DEMO: Path = demo_directory()


@pytest.mark.parametrize(
    "model", [replace(INFO, dtype="torch.bfloat16"), replace(INFO, kernels="c avx2"), replace(INFO, world_size=2)]
)
def test_other_shards_have_another_digest(model) -> None:
    assert engine_digest(DEMO, model, COMPUTE, SHARD) != engine_digest(DEMO, INFO, COMPUTE, SHARD)


@pytest.mark.parametrize(
    ("compute", "shard"),
    [
        (replace(COMPUTE, quantize=Quantize.int8), SHARD),
        (replace(COMPUTE, activations=ActivationType.int8), SHARD),
        (replace(COMPUTE, kv_cache_dtype=KvCacheDtype.int8), SHARD),
        (COMPUTE, replace(SHARD, watermark_gamma=0.25)),
    ],
)
def test_flags_that_decide_tokens_change_the_digest(compute, shard) -> None:
    assert engine_digest(DEMO, INFO, compute, shard) != engine_digest(DEMO, INFO, COMPUTE, SHARD)


def test_epochs_graphs_and_reasons_change_nothing() -> None:
    model = replace(INFO, epoch=7, kernels=f"{INFO.kernels}; not amx, since the machine has none")
    shard = replace(SHARD, cuda_graphs="1,2", cuda_memory_fraction=0.5)
    assert engine_digest(DEMO, model, COMPUTE, shard) == engine_digest(DEMO, INFO, COMPUTE, SHARD)


def test_random_weights_need_no_files_and_have_a_digest_of_their_own(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    dummy = engine_digest(tmp_path, INFO, COMPUTE, SHARD, LoadFormat.dummy)
    assert dummy == engine_digest(tmp_path, INFO, COMPUTE, SHARD, LoadFormat.dummy)
    assert dummy != engine_digest(DEMO, INFO, COMPUTE, SHARD)
    with pytest.raises(WeightsError):
        engine_digest(tmp_path, INFO, COMPUTE, SHARD)
