"""What the launcher reckons before a shard starts is what the shard has."""

from dataclasses import replace

import pytest
import torch

from text_generation_common.errors import ModelError
from text_generation_common.flags.kinds import Dtype, KvCacheDtype
from text_generation_common.model_files import demo_directory
from text_generation_common.models.config import read_config
from text_generation_common.models.fitting import check_length, choose_dtype, slot_bytes
from text_generation_server.load import DTYPES, KV_TYPES
from text_generation_server.models.kv_cache import KvShape, bytes_per_slot
from text_generation_server.models.parts import split_model


@pytest.mark.parametrize("numbers", [*Dtype, KvCacheDtype.int8, KvCacheDtype.fp8_e4m3fn])
@pytest.mark.parametrize("num_shard", [1, 2, 8])
def test_the_bytes_of_a_token_are_those_of_the_cache(num_shard: int, numbers: Dtype | KvCacheDtype) -> None:
    config = replace(read_config(demo_directory()), num_heads=8, num_kv_heads=4)
    split = split_model(config, 0, num_shard, config.vocab_size)
    stored = DTYPES[numbers] if isinstance(numbers, Dtype) else KV_TYPES[numbers]
    shapes = [KvShape(2 * len(split.kv_heads), config.head_size)] * config.num_layers
    assert slot_bytes(config, num_shard, numbers) == bytes_per_slot(shapes, stored)


def test_float16_is_computed_on_gpus_alone() -> None:
    assert choose_dtype(None, Dtype.float16, on_cpu=True) is Dtype.bfloat16
    assert choose_dtype(Dtype.float16, Dtype.float32, on_cpu=False) is Dtype.float16
    with pytest.raises(ModelError, match="--dtype float16 is not supported on CPUs"):
        choose_dtype(Dtype.float16, Dtype.float32, on_cpu=True)


def test_a_text_may_be_as_long_as_the_model_was_made_for() -> None:
    check_length(2048, 2048)
    with pytest.raises(ModelError, match=r"`max_total_tokens` must be <= 2048, .* Given: 2049"):
        check_length(2049, 2048)


def test_every_type_of_numbers_has_torch_s() -> None:
    assert {str(dtype).removeprefix("torch.") for dtype in DTYPES.values()} == {dtype.value for dtype in Dtype}
    assert all(DTYPES[dtype] is getattr(torch, dtype.value) for dtype in Dtype)
