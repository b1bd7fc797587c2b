"""Loads a model that can run steps, from a shard's settings."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from text_generation_common.adapters.listed import check_base, folders_of, listed, located
from text_generation_common.errors import ModelError
from text_generation_common.flags.kinds import ActivationType, Dtype, LoadFormat
from text_generation_common.memory import usable_cores
from text_generation_common.model_files import ModelFileError, read_model_file
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.fitting import (
    check_activations,
    check_length,
    check_quantize,
    choose_dtype,
    not_quantized,
    one_shard_only,
    refuse_dummy,
    refuse_quantized_experts,
)
from text_generation_common.models.quantized_layers import AnyLayers, no_tensor, quantized_layers
from text_generation_common.models.rope_config import Rope
from text_generation_common.models.tensors import made_codes
from text_generation_common.quantized.agreement import Use
from text_generation_common.quantized.scheme import Description
from text_generation_common.weights.tokenizer_files import unreadable
from text_generation_server.config import ShardConfig
from text_generation_server.device.graphs import (
    DEFAULT_SIZES,
    MIXED_SIZES,
    CudaRecorder,
    DecodeGraphs,
    Graphs,
    no_graphs,
)
from text_generation_server.device.kept import KeptMemory
from text_generation_server.device.transfers import moments_of, use_own_stream
from text_generation_server.device.vector_math import choose_code
from text_generation_server.distributed import JOIN_S, Group, join_group
from text_generation_server.grammars.compiler import GrammarCompiler, ModelTokens
from text_generation_server.grammars.constraints import Constraints
from text_generation_server.kernels import Backend, select_backend
from text_generation_server.kernels.cpu.backend import CpuKernels
from text_generation_server.kernels.cpu.programs import DecodePrograms
from text_generation_server.layers.rotary import is_beyond_training, stretched_theta
from text_generation_server.layers.weights import FORMATS, HEAD_FORMATS
from text_generation_server.models import get_model, read_any_config
from text_generation_server.models.adapters import AdapterBank, load_adapters
from text_generation_server.models.experts import runs_one_by_one
from text_generation_server.models.fallback.config import FallbackConfig
from text_generation_server.models.loading import DummyFiles, Files, PackedLayers
from text_generation_server.models.model import Model
from text_generation_server.models.random_codes import RandomCodes
from text_generation_server.models.stored_codes import packed_layers
from text_generation_server.platforms import Platform
from text_generation_server.runner import ModelRunner
from text_generation_server.sampling.sampler import Sampler
from text_generation_server.weights.gguf_files import open_files
from text_generation_server.worker import Worker

logger = logging.getLogger("text_generation_server")

# Threads that fill the masks of grammars, beside those that launch the steps.
MAX_MASK_THREADS, CORES_PER_MASK_THREAD = 4, 4
# Seconds that a shard that has loaded waits for other ranks, whose templates may load the whole model meanwhile. The
# launcher ends the group when one of them ends or hangs.
JOIN_LOADED_S = 24 * 3600.0
MAX_MENTIONED = 10  # most unknown fields of config.json that are logged; a file may have any number
DTYPES = {Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16, Dtype.float16: torch.float16}
KV_TYPES = {"fp8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class Shard:
    """A loaded model that can run steps, and facts about it."""

    runner: ModelRunner
    group: Group
    tokenizer: Tokenizer
    model_config: ModelConfig | FallbackConfig
    dtype: torch.dtype
    device: torch.device
    kernels: str  # name of the kernels' backend
    block_queries: int = 1  # queries of one key head that attention of a chunk computes at a time
    queries_per_token: int = 1  # query heads for each key head; 1 where blocks are of 1 query
    grammars: GrammarCompiler = field(default_factory=lambda: GrammarCompiler(None))
    adapters: AdapterBank = field(default_factory=AdapterBank)

    def close(self) -> None:
        """Leaves the group. Must be called in the worker's thread."""
        self.runner.close()
        self.group.close()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, and what it was loaded with: all of a shard that a process can hold without threads."""

    model: Model
    platform: Platform
    backend: Backend
    model_config: ModelConfig | FallbackConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype
    tokenizer: Tokenizer
    grammars: GrammarCompiler
    adapters: AdapterBank
    threads: int  # that one shard alone on this machine would compute with

    def end_threads(self) -> None:
        """Waits for work beside the weights, and ends the threads that loading has started. They start again when they
        are needed."""
        self.grammars.end_threads()
        self.backend.end_threads()


def load_shard(config: ShardConfig, worker: Worker, select: Callable[[torch.device], Backend] | None = None) -> Shard:
    """Loads the model. ShardError if the model cannot be served. `select` chooses other kernels than the flags do.

    Must be called in the worker's thread. torch keeps a pool of threads for each thread that computes, and the OpenMP
    runtime stops spinning at barriers when all pools together have more threads than there are cores: after loading in
    the main thread, steps of OpenMP's threads took 2.5 times as long. Torch's operations still run on them.
    """
    loaded = load_model(config, worker.advance_progress, partial(_join, config), select)
    return _make_shard(config, loaded, worker)


def take_over(config: ShardConfig, loaded: LoadedModel, worker: Worker) -> Shard:
    """A shard of a model that this process has from its template. Must be called in the worker's thread."""
    _limit_threads(config, loaded.backend, loaded.threads)
    with worker.during("join"):
        loaded.platform.group.join(_join(config, loaded.platform.device, JOIN_LOADED_S))
    loaded.adapters.take_over()
    return _make_shard(config, loaded, worker)


def _limit_threads(config: ShardConfig, backend: Backend, threads: int) -> None:
    """Has torch, in the thread that calls it, and the kernels compute with this shard's share of the machine, and with
    `threads` threads at most."""
    own = max(1, min(threads, usable_cores() // config.num_neighbours))
    torch.set_num_threads(own)
    backend.limit_threads(own)


def _join(config: ShardConfig, device: torch.device, join_s: float = JOIN_S) -> Group:
    rendezvous = Path(f"{config.uds_path}-{config.epoch}.rendezvous")
    return join_group(config.rank, config.world_size, device, rendezvous, join_s=join_s)


def load_model(
    config: ShardConfig,
    on_tensor: Callable[[], None],
    join: Callable[[torch.device], Group],
    select: Callable[[torch.device], Backend] | None = None,
    kept: KeptMemory | None = None,
) -> LoadedModel:
    """The part of `load_shard` that a template does. `on_tensor`: as in `get_model`. `join` gives the group, before the
    weights are read; nothing is exchanged meanwhile. `kept`: for adapters, see `AdapterBank`."""
    choose_code()
    device = _choose_device(config)
    flags = config.shard
    model_config = read_any_config(config.model_path, flags.rope_scaling, flags.rope_factor, config.with_families)
    if isinstance(model_config, FallbackConfig):
        _check_fallback(config, model_config)
    on_cpu = device.type == "cpu"
    kind = choose_dtype(config.compute.dtype, model_config.dtype, on_cpu)
    if config.compute.dtype is None and kind is not model_config.dtype:
        logger.info("the checkpoint is float16, which CPUs do not compute: serving it in %s", kind)
    dtype = DTYPES[kind]
    longest = config.max_total_tokens or model_config.max_positions
    check_length(longest, model_config.max_positions)
    if config.rank == 0:
        _mention(model_config, longest)
    kv_dtype = _choose_kv_dtype(config.compute.kv_cache_dtype, dtype, device)
    is_dummy = config.load_format is LoadFormat.dummy
    layers = quantized_layers(config.model_path, no_tensor) if is_dummy else None
    refuse_dummy(layers, config.load_format)
    files = _files(config, model_config, device, dtype, layers)
    packed: PackedLayers | None = None
    if is_dummy:
        packed = files.codes if isinstance(files, DummyFiles) else None
    elif (layers := quantized_layers(config.model_path, files.describe)) is not None:
        packed = packed_layers(layers, files)
    method = None if layers is None else layers.description.method
    use = check_quantize(config.compute.quantize, method, on_cpu)
    activations = config.compute.activations
    check_activations(activations, use, method, on_cpu)
    if use is not Use.as_stored and not on_cpu and isinstance(model_config, ModelConfig):
        refuse_quantized_experts(model_config, config.compute.quantize)
    if config.rank == 0:
        _mention_quantization(None if layers is None else layers.description, use)
    sum_products_in_float32(device)
    backend = select_backend(device, flags.cpu_target, activations) if select is None else select(device)
    threads = torch.get_num_threads()  # OMP_NUM_THREADS, or all cores
    _limit_threads(config, backend, threads)
    use_own_stream(device)
    group = join(device)
    # On GPUs, experts of codes are called one after the other, as the tokens of a step have chosen them.
    one_by_one = isinstance(model_config, ModelConfig) and layers is not None and runs_one_by_one(model_config)
    is_recorded = isinstance(model_config, ModelConfig) and (on_cpu or not one_by_one)
    bank = _adapters(config, model_config, kept if on_cpu else None)
    graphs, mixed_graphs = _graphs(config, device, group, backend) if is_recorded else (no_graphs(), no_graphs())
    platform = Platform(
        device=device,
        kernels=backend.kernels,
        group=group,
        graphs=graphs,
        mark=moments_of(device),
        mixed_graphs=mixed_graphs,
        wake=backend.wake,
        # A step without adapters keeps the program of its own, which is that of a server without adapters.
        adapter_graphs=_graphs(config, device, group, backend)[0] if bank.count and is_recorded else no_graphs(),
    )
    text, tokenizer = _read_tokenizer(config.model_path / "tokenizer.json")
    count = max(model_config.vocab_size, tokenizer.get_vocab_size())
    grammars = _grammars(config, ModelTokens(text, count, model_config.eos_token_ids))
    model = get_model(
        files,
        model_config,
        platform,
        dtype=dtype,
        max_total_tokens=longest,
        on_tensor=on_tensor,
        weight_format=FORMATS[use],
        head_format=None if config.compute.head_dtype is None else HEAD_FORMATS[config.compute.head_dtype],
        packed=packed,
        adapters=bank,
    )
    if activations is ActivationType.int8:
        _check_products(backend, model_config)
    if bank.slots and config.rank == 0:
        logger.info("%d LoRA adapters are loaded, of %d", len(bank.slots), len(bank.known))
    return LoadedModel(
        model=model,
        platform=platform,
        backend=backend,
        model_config=model_config,
        dtype=dtype,
        kv_dtype=kv_dtype,
        tokenizer=tokenizer,
        grammars=grammars,
        adapters=bank,
        threads=threads,
    )


def _make_shard(config: ShardConfig, loaded: LoadedModel, worker: Worker) -> Shard:
    platform, backend, model_config = loaded.platform, loaded.backend, loaded.model_config
    mask_threads = min(MAX_MASK_THREADS, usable_cores() // config.num_neighbours // CORES_PER_MASK_THREAD)
    runner = ModelRunner(
        model=loaded.model,
        platform=platform,
        sampler=Sampler(backend.kernels, *config.watermark, worker.advance_progress),
        on_progress=worker.advance_progress,
        kv_dtype=loaded.kv_dtype,
        memory_fraction=config.shard.cuda_memory_fraction,
        constraints=Constraints(loaded.grammars, platform.device, mask_threads),
        num_neighbours=config.num_neighbours,
        adapters=loaded.adapters,
    )
    block_queries, queries_per_token = _query_blocks(backend, model_config)
    return Shard(
        runner=runner,
        group=platform.group,
        tokenizer=loaded.tokenizer,
        model_config=model_config,
        dtype=loaded.dtype,
        device=platform.device,
        kernels=backend.name,
        block_queries=block_queries,
        queries_per_token=queries_per_token,
        grammars=loaded.grammars,
        adapters=loaded.adapters,
    )


def _adapters(config: ShardConfig, model_config: ModelConfig | FallbackConfig, kept: KeptMemory | None) -> AdapterBank:
    flags = config.adapters
    asked, folders = listed(flags.lora_adapters), folders_of(flags.lora_dirs)
    if not (asked or folders):
        return AdapterBank()
    check_base(isinstance(model_config, ModelConfig))
    assert isinstance(model_config, ModelConfig)
    # A folder that was removed since the launcher has seen it is told by `load_adapters`.
    found = [adapter if adapter.digest else located(adapter, None) for adapter in asked]
    return load_adapters(
        adapters=found,
        config=model_config,
        max_rank=flags.max_lora_rank,
        count=flags.max_loras,
        in_host=flags.max_cpu_loras,
        folders=folders,
        kept=kept,
    )


def _query_blocks(backend: Backend, config: ModelConfig | FallbackConfig) -> tuple[int, int]:
    """Queries of a block of attention, and queries of a token. Blocks matter where they are computed one after the
    other, on CPUs; each layer of the fallback's models may have other heads."""
    if isinstance(backend.kernels, CpuKernels) and isinstance(config, ModelConfig):
        return backend.kernels.block_queries, config.num_heads // config.num_kv_heads
    return 1, 1


def _grammars(config: ShardConfig, tokens: ModelTokens) -> GrammarCompiler:
    """On rank 0, which samples, a thread reads the tokenizer for grammars while the weights are loaded."""
    if config.rank or config.disable_grammar_support:
        return GrammarCompiler(None)
    compiler = GrammarCompiler(tokens)
    compiler.prepare().add_done_callback(_mention_unusable)
    return compiler


def _mention_unusable(tokenizer: Future[Any]) -> None:
    if (error := tokenizer.exception()) is not None:
        logger.info("requests for a form of the text will fail: %s", error)


def _read_tokenizer(path: Path) -> tuple[str, Tokenizer]:
    """The text of tokenizer.json, and what it says."""
    try:
        content = read_model_file(path)
        return content.decode(), Tokenizer.from_buffer(content)
    except ModelFileError as error:
        raise ModelError(str(error)) from None
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(unreadable(path, error)) from None


def _check_fallback(config: ShardConfig, model_config: FallbackConfig) -> None:
    model_type = model_config.model_type
    if config.world_size > 1:
        raise ModelError(one_shard_only(model_type, config.world_size))
    if config.compute.head_dtype is not None:
        raise ModelError(f"--head-dtype is not supported for model type {model_type}: leave it out")
    if config.load_format is LoadFormat.dummy:
        raise ModelError(f"--load-format dummy is not supported for model type {model_type}: leave it out")


def _check_products(backend: Backend, config: ModelConfig | FallbackConfig) -> None:
    """ModelError if the layers that have most of the weights are not multiplied by integers of x: these are numbers."""
    kernels = backend.kernels
    if not (isinstance(kernels, CpuKernels) and kernels.has_int_products):
        raise ModelError(not_quantized("this model's"))
    if isinstance(config, ModelConfig) and config.moe is not None and not kernels.has_int_experts:
        raise ModelError(not_quantized(f"the experts of this {config.model_type}"))


def _mention(config: ModelConfig | FallbackConfig, longest: int) -> None:
    """Logs what an operator may not expect: that transformers computes the model, unknown fields of config.json, and
    rope scaling that differs from transformers'."""
    if isinstance(config, FallbackConfig):
        logger.warning(
            "model type %s %s: transformers computes its layers, more slowly, around the server's attention and linear"
            " layers",
            config.model_type,
            f"with this {config.option} is not computed by the server's own decoder"
            if config.option
            else "is not one of the server's own",
        )
        if getattr(config.values, "auto_map", None):
            logger.warning("config.json names code of the repository (auto_map), which is not run")
        return
    for name in config.unknown_fields[:MAX_MENTIONED]:
        logger.warning("config.json has a field that is not known and has no effect: %s", name)
    if more := len(config.unknown_fields[MAX_MENTIONED:]):
        logger.warning("config.json has %d more such fields", more)
    for rope in config.ropes:
        _mention_rope(rope, longest)


def _mention_rope(rope: Rope, longest: int) -> None:
    theta = stretched_theta(rope, longest)
    if theta != rope.theta:
        logger.warning(
            "dynamic rope scaling: rope_theta is stretched once, from %g to %g, for max_total_tokens %d; transformers "
            "stretches it for each text that is longer than the trained %d tokens, so texts of other lengths get other "
            "log-probabilities here. With --max-total-tokens %d they are the same",
            rope.theta, theta, longest, rope.base_positions, rope.base_positions,
        )  # fmt: skip
    if is_beyond_training(rope, longest):
        trained = rope.scaling.original_max_positions
        logger.warning(
            "longrope scaling: all texts are computed with the long factors, because max_total_tokens %d is more than "
            "the trained %d tokens; transformers takes the short factors for shorter texts. With --max-total-tokens %d "
            "the short factors are used",
            longest, trained, trained,
        )  # fmt: skip


def _files(
    config: ShardConfig, model_config: ModelConfig | FallbackConfig, device: torch.device, dtype: torch.dtype,
    layers: AnyLayers | None,
) -> Files:  # fmt: skip
    """`layers`: those of which random codes are made."""
    if config.load_format is LoadFormat.dummy and isinstance(model_config, ModelConfig):
        logger.warning("--load-format dummy: the weights are random numbers, and so is the text")
        codes = RandomCodes(made_codes(model_config), layers.description, device) if layers is not None else None
        return DummyFiles(model_config, device, dtype, codes)
    return open_files(config.model_path)


def _mention_quantization(description: Description | None, use: Use) -> None:
    if use is Use.int4_on_load:
        logger.warning(
            "weights become 4 bits without calibration, which changes texts visibly, those of small models most: a"
            " checkpoint that was calibrated errs less at the same size"
        )
    if description is None:
        return
    logger.info("the weights are quantized as %s", description.method)
    for name in description.passed_over:
        logger.warning("the files have %s, which have no effect", name)


def _graphs(config: ShardConfig, device: torch.device, group: Group, backend: Backend) -> tuple[Graphs, DecodeGraphs]:
    """For decode steps, and for steps with prompt chunks."""
    if device.type == "cuda":
        if config.shard.cpu_target is not None and config.rank == 0:
            logger.info("--cpu-target has no effect: there is a GPU")
        sizes = DEFAULT_SIZES if config.graph_sizes is None else config.graph_sizes
        recorder = CudaRecorder()
        mixed_sizes = MIXED_SIZES if sizes else ()
        mixed = DecodeGraphs(mixed_sizes, recorder, group.all_agree, "tokens")
        return DecodeGraphs(sizes, recorder, group.all_agree), mixed
    if config.graph_sizes and config.rank == 0:
        logger.info("--cuda-graphs: without a GPU decode steps of all sizes are recorded, or with 0 none")
    if config.shard.cuda_memory_fraction != 1.0 and config.rank == 0:
        logger.info("--cuda-memory-fraction has no effect: there is no GPU")
    # Programs record only kernel calls. Collectives between ranks are not kernel calls, so groups do not use programs.
    if isinstance(backend.kernels, CpuKernels) and group.size == 1 and config.graph_sizes != ():
        return DecodePrograms(backend.kernels.library, backend.kernels.threads), no_graphs()
    return no_graphs(), no_graphs()


def _choose_device(config: ShardConfig) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if torch.cuda.device_count() < config.world_size:
        raise ModelError(
            f"--num-shard {config.world_size} needs {config.world_size} GPUs, and {torch.cuda.device_count()} are"
            " visible: check CUDA_VISIBLE_DEVICES, or choose fewer shards"
        )
    return torch.device("cuda", config.rank)


def _choose_kv_dtype(wanted: str | None, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    if wanted is None:
        return dtype
    if wanted == "fp8_e4m3fn" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ModelError("--kv-cache-dtype fp8_e4m3fn needs a GPU of compute capability 8.9 or later: choose int8")
    return KV_TYPES[wanted]


def sum_products_in_float32(device: torch.device) -> None:
    """From now on cuBLAS adds up products of half precision in float32. By default, where it splits a long sum over
    several programs, it may add up the programs' results in half precision."""
    if device.type != "cuda":
        return
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
