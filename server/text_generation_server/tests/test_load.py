"""Log lines and errors about the model's files at the start of a shard."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Never, cast

import pytest
import torch
from shard_tools import make_checkpoint
from tokenizers import Tokenizer, models

from text_generation_common.errors import ModelError
from text_generation_common.flags.kinds import Dtype, LoadFormat
from text_generation_common.flags.model import ComputeFlags
from text_generation_server.config import ShardConfig
from text_generation_server.kernels import Backend, reference, select_backend
from text_generation_server.kernels.cpu.backend import CpuKernels
from text_generation_server.kernels.interface import Kernels
from text_generation_server.load import MAX_MENTIONED, Shard, load_shard
from text_generation_server.worker import Worker

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def load(
    folder: Path,
    max_total_tokens: int | None = 256,
    select: Callable[[torch.device], Backend] = select_backend,
    **options: Any,
) -> Shard:
    config = ShardConfig(
        model_path=folder, uds_path=str(folder / "s"), rank=0, world_size=1, epoch=1, max_total_tokens=max_total_tokens,
        compute=ComputeFlags(dtype=Dtype.float32),
    )  # fmt: skip
    config = replace(config, **options)
    return load_shard(config, Worker(1), select)


class Selected(Exception):
    """Ends a load when the device's kernels are selected, which is before the device is used."""


PRODUCTS = torch.backends.cuda.matmul
REDUCTIONS = ["allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"]


@pytest.fixture
def reduced_precision() -> Iterator[None]:
    """Allows sums of half precision, as torch does at its start. monkeypatch cannot undo changes of this module."""
    before = [getattr(PRODUCTS, name) for name in REDUCTIONS]
    for name in REDUCTIONS:
        setattr(PRODUCTS, name, True)
    yield
    for name, value in zip(REDUCTIONS, before, strict=True):
        setattr(PRODUCTS, name, value)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_products_of_half_precision_are_summed_in_float32_on_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reduced_precision: None, device: str
) -> None:
    make(tmp_path)
    monkeypatch.setattr("text_generation_server.load._choose_device", lambda config: torch.device(device))

    def select(chosen: torch.device) -> Never:
        raise Selected

    with pytest.raises(Selected):
        load(tmp_path, 128, select)
    assert [bool(getattr(PRODUCTS, name)) for name in REDUCTIONS] == [device == "cpu"] * 2


def make(folder: Path, **changes: Any) -> None:
    make_checkpoint(folder, max_position_embeddings=128)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_dynamic_rope_beyond_the_trained_length_is_logged_with_both_lengths(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, rope_parameters=DYNAMIC)
    load(tmp_path, 512)
    (told,) = warnings(caplog)
    assert "max_total_tokens 512" in told and "trained 128 tokens" in told and "--max-total-tokens 128" in told
    caplog.clear()
    load(tmp_path, 128)
    assert warnings(caplog) == []


def test_each_unknown_field_is_named_once_and_many_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, **{f"note_{i}": i + 1 for i in range(MAX_MENTIONED + 2)})
    load(tmp_path, 128)
    told = warnings(caplog)
    assert [f"note_{i}" in text for i, text in enumerate(told)] == [True] * MAX_MENTIONED + [False]
    assert told[-1] == "config.json has 2 more such fields"


@pytest.mark.parametrize("content", [b"{", b"\xff", b'{"model": 1}'])
def test_a_broken_tokenizer_is_reported_in_one_line(tmp_path: Path, content: bytes) -> None:
    make(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read as a tokenizer") as refused:
        load(tmp_path, 128)
    assert len(str(refused.value).splitlines()) == 1


def test_a_model_of_another_type_is_named_in_the_log_and_has_one_shard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path)
    load(tmp_path, 128, with_families=False)
    (told,) = warnings(caplog)
    assert told.startswith("model type llama is not one of the server's own")
    for change, reason in (({"world_size": 2}, "--num-shard 2"), ({"load_format": LoadFormat.dummy}, "--load-format")):
        with pytest.raises(ModelError, match=f"{reason}.* is not supported for model type llama"):
            load(tmp_path, 128, with_families=False, **change)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_shard_says_in_which_blocks_attention_computes_queries(tmp_path: Path, compiled: bool) -> None:
    make(tmp_path)
    backend = select_backend(torch.device("cpu")) if compiled else Backend("torch", cast(Kernels, reference))
    shard = load(tmp_path, 128, lambda device: backend)
    config = json.loads((tmp_path / "config.json").read_text())
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    if isinstance(backend.kernels, CpuKernels):
        assert shard.block_queries in (16, 32) and shard.queries_per_token == group > 1
    else:
        assert (shard.block_queries, shard.queries_per_token) == (1, 1)
