"""Log lines and errors about the model's files at the start of a shard."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Never, cast

import pytest
import torch
from family_checkpoints import make_family
from safetensors.torch import load_file, save_file
from shard_tools import CPU, fresh_client, make_checkpoint, make_platform, make_runner, random_ids
from tokenizers import Tokenizer, models
from torch.utils._python_dispatch import TorchDispatchMode
from written_codes import quantize

from text_generation_common.cpu_features import NEEDS
from text_generation_common.errors import ModelError, WeightsError
from text_generation_common.flags.kinds import ActivationType, Dtype, LoadFormat, Quantize
from text_generation_common.flags.model import ComputeFlags
from text_generation_common.models.config import read_config
from text_generation_common.models.tensors import shapes
from text_generation_server.config import ShardConfig
from text_generation_server.device.vector_math import FUNCTIONS
from text_generation_server.distributed import JOIN_S, Group, unjoined
from text_generation_server.errors import OptionError
from text_generation_server.kernels import Backend, reference, select_backend
from text_generation_server.kernels.cpu import load_kernels
from text_generation_server.kernels.cpu.backend import CpuKernels
from text_generation_server.kernels.interface import Kernels
from text_generation_server.load import JOIN_LOADED_S, MAX_MENTIONED, Shard, load_model, load_shard, take_over
from text_generation_server.models import get_model
from text_generation_server.models.loading import DummyFiles
from text_generation_server.runner import ModelRunner
from text_generation_server.weights.files import HubAccess
from text_generation_server.weights.prepare import prepare_without_weights
from text_generation_server.worker import Worker

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def load(
    folder: Path,
    max_total_tokens: int | None = 256,
    select: Callable[[torch.device], Backend] | None = select_backend,
    **options: Any,
) -> Shard:
    return load_shard(settings(folder, max_total_tokens, **options), Worker(1), select)


def settings(folder: Path, max_total_tokens: int | None = 256, **options: Any) -> ShardConfig:
    config = ShardConfig(
        model_path=folder, uds_path=str(folder / "s"), rank=0, world_size=1, epoch=1, max_total_tokens=max_total_tokens,
        compute=ComputeFlags(dtype=Dtype.float32),
    )  # fmt: skip
    return replace(config, **options)


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


@pytest.mark.parametrize("quantize", [None, Quantize.int8])
def test_activations_in_8_bits_need_weights_that_are_quantized(tmp_path: Path, quantize: Quantize | None) -> None:
    make(tmp_path)
    compute = ComputeFlags(dtype=Dtype.float32, activations=ActivationType.int8, quantize=quantize)
    if quantize is None:
        with pytest.raises(ModelError, match=r"^--activations int8 .* this model's are not quantized: add --quantize"):
            load(tmp_path, 64, None, compute=compute)
    elif load_kernels() is None:
        with pytest.raises(OptionError, match=r"^--activations int8 needs the compiled kernels"):
            load(tmp_path, 64, None, compute=compute)
    else:
        kernels = load(tmp_path, 64, None, compute=compute).runner._platform.kernels
        assert isinstance(kernels, CpuKernels) and kernels.has_int_products


def test_activations_in_8_bits_need_experts_that_are_quantized(tmp_path: Path) -> None:
    """Attention is quantized here, experts are not."""
    if load_kernels() is None:
        pytest.skip("needs a C compiler (cc) when the package is installed")
    make_family(tmp_path / "dense", "mixtral")
    quantize(tmp_path / "dense", "int8", packed := tmp_path / "packed", tmp_path / "exact")
    codes, numbers = (load_file(folder / "model.safetensors") for folder in (packed, tmp_path / "dense"))
    of_experts = {name: numbers[name] for name in numbers if ".experts." in name}
    save_file(
        {name: codes[name] for name in codes if ".experts." not in name} | of_experts, packed / "model.safetensors"
    )
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["re:.*experts.*", "lm_head"]
    (packed / "config.json").write_text(json.dumps(config))
    write_tokenizer(packed)
    load(packed, 64)
    with pytest.raises(ModelError, match=r"^--activations int8 .* the experts of this mixtral are not quantized"):
        load(packed, 64, None, compute=ComputeFlags(dtype=Dtype.float32, activations=ActivationType.int8))


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


def write_tokenizer(folder: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))


def make(folder: Path, **changes: Any) -> None:
    make_checkpoint(folder, max_position_embeddings=128)
    write_tokenizer(folder)
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


SERVES = """
import sys
import torch
import text_generation_server.server
from text_generation_server.cli import _folder, _hub_access
from text_generation_server.kernels.cpu.programs import Recorder
with Recorder() as recorder:
    torch.empty(1)
assert recorder.sizes == [4], recorder.sizes
_folder(".", None, _hub_access({}))
print(*(name for name in ("transformers", "torch._dynamo", "sympy", "huggingface_hub") if name in sys.modules))
"""


def test_serving_a_directory_imports_neither_transformers_nor_torchs_compiler_nor_the_hubs_client() -> None:
    """Each takes a quarter of a second or more to import, and serving needs none: we read config.json and
    tokenizer.json ourselves, and steps are recorded without torch's compiler."""
    answer = subprocess.run([sys.executable, "-c", SERVES], timeout=120, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == []


# Random weights have the names, shapes and types of a checkpoint's weights.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 32},
}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_names_and_shapes_are_those_of_a_checkpoint(tmp_path: Path, variant: str) -> None:
    make_checkpoint(tmp_path, **VARIANTS[variant])
    tensors = load_file(tmp_path / "model.safetensors")
    assert shapes(read_config(tmp_path)) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def write_config(path: Path) -> None:
    config = {
        "model_type": "llama", "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))


def test_a_tensor_and_its_slices_are_the_same_every_time_and_no_two_alike(tmp_path: Path) -> None:
    write_config(tmp_path)
    first, again = (DummyFiles(read_config(tmp_path), CPU, torch.bfloat16) for _ in range(2))
    up, gate = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "gate"))
    assert torch.equal(first.get(up), again.get(up)) and first.get(up).dtype == torch.bfloat16
    assert not torch.equal(first.get(up), first.get(gate))
    assert first.get_slice(up, 1, 8, 24).shape == (48, 16)
    assert torch.equal(first.get_slice(up, 0, 4, 8), again.get_slice(up, 0, 4, 8))
    assert first.get("model.norm.weight").eq(1).all()


def test_a_model_is_made_from_config_json_only(tmp_path: Path) -> None:
    write_config(tmp_path)
    config = read_config(tmp_path)
    files = DummyFiles(config, CPU, torch.float32)
    get_model(files, config, make_platform(), torch.float32, 64, lambda: None)


def test_preparing_without_weights_asks_for_config_and_tokenizer_only(tmp_path: Path) -> None:
    write_config(tmp_path)
    with pytest.raises(WeightsError, match=r"has no tokenizer\.json"):
        prepare_without_weights(str(tmp_path), HubAccess())
    (tmp_path / "tokenizer.json").write_text("{}")
    assert prepare_without_weights(str(tmp_path), HubAccess()) == tmp_path
    with pytest.raises(WeightsError, match=r"owner/name is not a directory"):
        prepare_without_weights("owner/name", HubAccess())


# On every target that this processor can run: where bits may depend on the number of rows, as csrc/README.md says.
# Numbers of rows of a decode step, in groups within which a row has the same bits.
ANY_NUMBER = [[1, 2, 4, 5, 12, 13, 33]]
WITH_MATRIX_UNIT = [[1, 2, 4], [5, 12, 13, 33]]


def first_row(runner: ModelRunner, rows: int) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of a request that decodes among `rows` requests, its own included."""
    client = fresh_client(runner)
    client.step([], [client.first_chunk(i, random_ids(70 - i, i)) for i in range(rows)])
    for _ in range(3):
        client.step(list(range(rows)))
    return client.tokens[0], client.logprobs[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", NEEDS)
def test_a_row_has_the_same_bits_among_as_many_rows_as_the_page_says(
    tmp_path: Path, target: str, dtype: torch.dtype
) -> None:
    kernels = load_kernels(target)
    if kernels is None:
        pytest.skip(f"needs a C compiler when the package is installed, and of the processor: {NEEDS[target]}")
    make_checkpoint(tmp_path)
    runner = make_runner(tmp_path, dtype, kernels=kernels)
    runner.warmup(2048, None, 40, None)
    two_kinds = target == "amx" and dtype == torch.bfloat16
    for numbers in WITH_MATRIX_UNIT if two_kinds else ANY_NUMBER:
        found = [first_row(runner, rows) for rows in numbers]
        assert found == found[:1] * len(numbers)


def test_a_shard_that_has_loaded_waits_for_ranks_whose_templates_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile it counts neither as late nor as hung: the launcher watches the templates."""
    make(tmp_path)
    worker, group, joins = Worker(1), unjoined(0, 1), []

    def join(*_: object, join_s: float) -> Group:
        joins.append((worker.phase, join_s))
        return group

    loaded = load_model(settings(tmp_path, 128), worker.advance_progress, lambda device: group)
    monkeypatch.setattr("text_generation_server.load.join_group", join)
    take_over(settings(tmp_path, 128), loaded, worker)
    assert joins == [("join", JOIN_LOADED_S)] and worker.phase == "load"
    assert JOIN_LOADED_S > 60 * JOIN_S


def test_a_shard_takes_its_share_of_the_cores_whatever_it_was_when_the_template_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    monkeypatch.setattr("text_generation_server.load.usable_cores", lambda: 4)
    limits, before, worker, group = list[int](), torch.get_num_threads(), Worker(1), unjoined(0, 1)
    backend = replace(select_backend(CPU), limit_threads=limits.append)
    try:
        torch.set_num_threads(3)
        config = settings(tmp_path, 128, machine_shards=2)
        loaded = load_model(config, worker.advance_progress, lambda device: group, lambda device: backend)
        monkeypatch.setattr("text_generation_server.load.join_group", lambda *_, join_s: group)
        for shards in (5, 1):
            take_over(replace(config, machine_shards=shards), loaded, worker)
            assert limits[-1] == torch.get_num_threads()
        assert limits == [2, 1, 3]
    finally:
        torch.set_num_threads(before)


class FirstCalls(TorchDispatchMode):
    """Records how many numbers the first call of each operation on floats computes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.sizes.setdefault(str(func.overloadpacket).removeprefix("aten."), result.numel())
        return result


def test_the_first_call_of_each_function_of_vectors_is_made_by_one_thread(tmp_path: Path) -> None:
    """MKL chooses the code of a function then, and may choose wrong for some of several threads."""
    make(tmp_path)
    with FirstCalls() as calls:
        load(tmp_path, 128)
    names = {getattr(function, "__name__", "").removeprefix("special_") for function in FUNCTIONS}
    assert {calls.sizes[name] for name in calls.sizes.keys() & names} == {1}
    assert {"cos", "sin", "exp", "sqrt", "erf", "tanh"} <= calls.sizes.keys()
