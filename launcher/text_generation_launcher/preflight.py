"""Tells, before any child starts, what files, flags and machine say against serving the model. Reads config.json and
headers of weights files, and no weights.
"""

import ctypes
import logging
import math
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from text_generation_common.adapters.files import any_rooms, modules_of, read_adapter, rooms_of
from text_generation_common.adapters.listed import check_base, listed
from text_generation_common.cpu_features import NEEDS, lacking, processor_flags
from text_generation_common.errors import ArgumentValidation, MemoryLimitError, ModelError, ShardError, WeightsError
from text_generation_common.file_names import is_leftover, pickle_names
from text_generation_common.flags.cluster import Way
from text_generation_common.flags.kinds import Dtype, KvCacheDtype, LoadFormat, Standby
from text_generation_common.memory import address_limit, choose_slots, cpu_bytes, free_bytes
from text_generation_common.model_files import served_name
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.config import config_fields, text_fields
from text_generation_common.models.fitting import (
    NUMBER_BYTES,
    Heads,
    check_activations,
    check_length,
    check_quantize,
    choose_dtype,
    one_shard_only,
    refuse_dummy,
    slot_bytes,
)
from text_generation_common.models.quantized_layers import AnyLayers, no_tensor, quantized_layers
from text_generation_common.models.reading import stored_dtype
from text_generation_common.models.served import check_type, read_served
from text_generation_common.models.tensors import (
    LinearSize,
    made_codes,
    no_codes,
    weight_bytes,
    with_checked_tensors,
)
from text_generation_common.models.values import Fields
from text_generation_common.quantized import served
from text_generation_common.quantized.agreement import Use, use_of
from text_generation_common.quantized.sizes import ON_LOAD_BYTES
from text_generation_common.weights.headers import WeightHeaders, file_names, verify, weight_files
from text_generation_common.weights.tokenizer_files import check_tokenizer
from text_generation_launcher import model
from text_generation_launcher.config import LaunchPlan

logger = logging.getLogger(__name__)

# Device files of NVIDIA's and AMD's drivers, and of Windows' Linux. Without all of them there is no GPU.
DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")
GIB = 2**30
SMALLER = ", --quantize int8"
# The layers of a text model as the types that transformers computes name them, and their number in config.json.
LAYER = re.compile(r"(?:(?:model|transformer|gpt_neox|decoder|model\.decoder)\.)?(?:layers|h|blocks)\.(\d{1,5})\.")
PR_GET_CHILD_SUBREAPER = 37
NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Lower bounds of what a shard on CPUs takes besides weights: of address space, mostly libraries, and of memory. Less is
# refused.
SHARD_ADDRESSES, SHARD_BYTES = GIB, 100 * 2**20
# What a shard with a small cache was seen to take besides weights (2.17 GiB and 520 MiB). Less gets a warning.
LIKELY_ADDRESSES, LIKELY_BYTES = 2304 * 2**20, 512 * 2**20


@dataclass(frozen=True, slots=True)
class Machine:
    """What the checks must know of this machine."""

    has_gpu: bool  # False if shards will surely run on CPUs
    free_bytes: int  # free memory of the machine
    addresses: int | None = None  # bytes of address space that a process may have; None: no limit
    cpu_flags: frozenset[str] | None = None  # features of the processor; None: not known
    adopts: bool = True  # whether a process can become the parent of others' children, and learn of their end

    @classmethod
    def this(cls, environ: Mapping[str, str]) -> "Machine":
        hidden = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        return cls(
            not hidden and any(os.path.exists(file) for file in DEVICE_FILES),
            free_bytes(),
            address_limit(),
            frozenset(processor_flags()),
            _adopts(),
        )

    def has_templates(self, asked: Standby | None) -> bool:
        """Whether templates fork the shards. `asked`: the flag's value, None if it is not given."""
        return asked is Standby.on or (asked is None and self.adopts and not self.has_gpu)

    def has_router_template(self, asked: Standby | None) -> bool:
        """The same for routers, fronts and engines, which use no GPU."""
        return asked is not Standby.off and self.adopts


def _adopts() -> bool:
    """Not on other systems, with kernels before Linux 5.3, and in some sandboxes."""
    if sys.platform != "linux":
        return False
    with suppress(OSError):
        os.close(os.pidfd_open(os.getpid()))
        return bool(ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(ctypes.c_int()), 0, 0, 0) == 0)
    return False


def check_before_start(plan: LaunchPlan, environ: Mapping[str, str]) -> Machine:
    """ArgumentValidation if what is on this machine already tells that the model cannot be served as planned."""
    machine = Machine.this(environ)
    check_standby(plan, machine)
    if plan.cluster.has_model_here and (folder := model.folder_of(plan)) is not None:
        check_model(plan, folder, machine, is_whole=model.is_local(plan))
    return machine


def check_standby(plan: LaunchPlan, machine: Machine) -> None:
    if plan.standby is not Standby.on:
        return
    if machine.has_gpu and plan.cluster.way is not Way.FRONTS:
        raise ArgumentValidation("--standby on is for CPUs: a GPU's memory cannot be forked", "leave it out")
    if not machine.adopts:
        raise ArgumentValidation("--standby on needs Linux 5.3 or later, without a sandbox", "leave it out")


def check_model(plan: LaunchPlan, folder: Path, machine: Machine, is_whole: bool = True) -> None:
    """ArgumentValidation if the model in `folder` cannot be served as planned. What depends on a GPU is left to the
    shards. `is_whole`: whether no file will be downloaded any more."""
    try:
        _check_processor(plan, machine)
        config = read_served(folder, plan.shard.rope_scaling, plan.shard.rope_factor)
        layers = quantized_layers(folder, no_tensor)
        if config is None:
            _check_other(plan, folder, layers, machine)
        else:
            _check_flags(plan, config, layers, machine)
        if is_whole:
            config, layers = _checked_files(plan, folder, config, layers, machine)
        of_adapters = _numbers_of_adapters(plan, config)
        if config is not None and not machine.has_gpu:
            _check_memory(plan, config, layers, machine, of_adapters)
    except ShardError as error:
        raise ArgumentValidation(str(error)) from None


def _numbers_of_adapters(plan: LaunchPlan, config: ModelConfig | None) -> int:
    """The numbers in the slots of adapters, each of which has room for the largest one. ModelError for an adapter that
    does not fit the model."""
    flags = plan.adapters
    adapters = listed(flags.lora_adapters)
    if adapters or flags.lora_dirs:
        check_base(config is not None)
    files = [read_adapter(Path(adapter.path), flags.max_lora_rank) for adapter in adapters]
    _mention_bases(plan, {adapter.name: each.base for adapter, each in zip(adapters, files, strict=True)})
    if config is None:
        return 0
    any_adapter = any_rooms(config, flags.max_lora_rank) if flags.lora_dirs else {}
    rooms = rooms_of([modules_of(each, config) for each in files], any_adapter)
    count = flags.max_loras if flags.lora_dirs else min(flags.max_loras, len(adapters))
    return count * sum(room.numbers for room in rooms.values())


def _mention_bases(plan: LaunchPlan, bases: Mapping[str, str]) -> None:
    """Warns of adapters that say that they were trained for another model. Folders may be called anything, so the ends
    of names are compared."""
    own = {_end(name) for name in (plan.names.served_model_name, served_name(None, plan.model_id)) if name}
    others = [name for name, base in bases.items() if base and _end(base) not in own]
    if others:
        base, more = ascii(bases[others[0]])[1:-1][:200], f", and {len(others) - 1} more," * (len(others) > 1)
        logger.warning(
            "--lora-adapters %s%s may not fit the model, which is not called as its base: trained for %s",
            others[0],
            more,
            base,
        )


def _end(name: str) -> str:
    return Path(name).name.lower()


def _check_processor(plan: LaunchPlan, machine: Machine) -> None:
    target = plan.shard.cpu_target
    if target is None or machine.has_gpu or machine.cpu_flags is None:
        return
    if missing := lacking(target, set(machine.cpu_flags)):
        usable = ", ".join(other for other in NEEDS if lacking(other, set(machine.cpu_flags)) is None)
        raise ModelError(
            f"--cpu-target {target} cannot be used, since {missing}: leave it out, or choose one of {usable}"
        )


def _check_addresses(weights: int, num_shard: int, limit: int | None) -> None:
    needed = SHARD_ADDRESSES + weights // num_shard
    if limit is not None and needed > limit:
        raise MemoryLimitError(
            f"a shard needs {needed >> 20} MiB of address space at least, and `ulimit -v` allows"
            f" {limit >> 20} MiB: raise this limit"
        )
    likely = LIKELY_ADDRESSES + weights // num_shard
    if limit is not None and likely > limit:
        logger.warning("`ulimit -v` may be too low: it allows %d MiB, and shards took %d", limit >> 20, likely >> 20)


def _check_other(plan: LaunchPlan, folder: Path, layers: AnyLayers | None, machine: Machine) -> None:
    """Checks a model of a type that transformers computes."""
    model_type = check_type(folder)
    if reason := served.refusal(folder, text_fields(config_fields(folder)[0]).raw, is_ours=False):
        raise ModelError(reason)
    method = None if layers is None else layers.description.method
    use = use_of(plan.compute.quantize, method)
    if not machine.has_gpu:
        check_activations(plan.compute.activations, use, method, on_cpu=True)
    if plan.num_shard > 1:
        raise ModelError(one_shard_only(model_type, plan.num_shard))


def _check_flags(plan: LaunchPlan, config: ModelConfig, layers: AnyLayers | None, machine: Machine) -> None:
    if reason := Heads(config.num_heads, config.num_kv_heads).refusal(plan.num_shard):
        raise ModelError(reason)
    tokens, longest = plan.tokens, config.max_positions
    if tokens.max_total_tokens is not None:
        check_length(tokens.max_total_tokens, longest)
    elif tokens.max_input_tokens is not None and tokens.max_input_tokens >= longest:
        raise ModelError(
            f"`max_input_tokens`({tokens.max_input_tokens}) must be < {longest}, the longest sequence this model was"
            " made for: choose a smaller --max-input-tokens, or stretch the positions with --rope-scaling and"
            " --rope-factor"
        )
    method = None if layers is None else layers.description.method
    refuse_dummy(layers, plan.load_format)
    use = check_quantize(plan.compute.quantize, method, on_cpu=not machine.has_gpu)
    if not machine.has_gpu:
        check_activations(plan.compute.activations, use, method, on_cpu=True)
        choose_dtype(plan.compute.dtype, config.dtype, on_cpu=True)


def _checked_files(
    plan: LaunchPlan, folder: Path, config: ModelConfig | None, layers: AnyLayers | None, machine: Machine
) -> tuple[ModelConfig | None, AnyLayers | None]:
    """Checks the files, and returns config and layers with the tensors in them. Weights in PyTorch's own format are
    converted by a child, and checked then."""
    check_tokenizer(folder)
    if plan.load_format is LoadFormat.dummy:
        return config, layers
    try:
        weight_files(folder)
    except WeightsError:
        if pickle_names(file_names(folder), None):
            return config, layers
        raise
    headers = verify(folder)
    for name in sorted(filter(is_leftover, file_names(folder))):
        logger.warning("%s of %s is ignored: adapters are named by --lora-adapters", name, folder)
    if config is not None:
        layers = None if layers is None else replace(layers, find=headers.describe)
        in_codes = no_codes if layers is None else layers.tensors
        return with_checked_tensors(config, headers.names, headers.describe, in_codes), layers
    if not machine.has_gpu:
        fields = text_fields(config_fields(folder)[0])
        dtype = choose_dtype(plan.compute.dtype, stored_dtype(fields), on_cpu=True)
        numbers = _numbers_of_layers(fields, headers)
        method = None if layers is None else layers.description.method
        is_stored = check_quantize(plan.compute.quantize, method, on_cpu=True) is Use.as_stored
        kind = method or (dtype if is_stored else str(plan.compute.quantize))
        weights = numbers * (NUMBER_BYTES[dtype] if kind is dtype else 1)
        _check_weights(plan, weights, kind, machine, SMALLER if kind is dtype else "")
    return None, None


def _numbers_of_layers(fields: Fields, headers: WeightHeaders) -> int:
    """The numbers in a model that transformers computes, or less: those of the layers that config.json counts. Others
    may stay unread, as those of images and of layers that only training needs."""
    count = next((fields.raw[name] for name in NUM_LAYERS if isinstance(fields.raw.get(name), int)), 0)
    found = ((LAYER.match(name), tensor) for name, tensor in headers.stored.items())
    return sum(math.prod(tensor.shape) for layer, tensor in found if layer is not None and int(layer[1]) < count)


def _check_memory(
    plan: LaunchPlan, config: ModelConfig, layers: AnyLayers | None, machine: Machine, of_adapters: int = 0
) -> None:
    """MemoryLimitError if the machine's memory cannot suffice. A lower bound of what shards will need is compared.
    `of_adapters`: the numbers in adapters."""
    dtype = choose_dtype(plan.compute.dtype, config.dtype, on_cpu=True)
    if layers is not None:
        kind, weights = layers.description.method, weight_bytes(config, NUMBER_BYTES[dtype], layers.code_bytes)
    else:
        made = ON_LOAD_BYTES.get(use_of(plan.compute.quantize, None))
        in_codes = made_codes(config) if made else {}

        def codes(layer: str, size: LinearSize) -> int | None:
            outputs = size.outputs * max(1, size.experts)
            return made(outputs, size.inputs) if made and layer in in_codes else None

        kind = str(plan.compute.quantize) if in_codes else dtype
        weights = weight_bytes(config, NUMBER_BYTES[dtype], codes)
    adapters = of_adapters * NUMBER_BYTES[dtype]
    _check_weights(plan, weights, kind, machine, SMALLER if kind == dtype else "", adapters=adapters)
    weights += adapters
    numbers: Dtype | KvCacheDtype = plan.compute.kv_cache_dtype or dtype
    per_slot = slot_bytes(config, plan.num_shard, numbers)
    available = cpu_bytes(machine.free_bytes - weights, plan.num_shard)
    tokens = plan.tokens
    needed = tokens.max_total_tokens or min(config.max_positions, max(1, available // per_slot))
    wanted = tokens.max_batch_total_tokens
    requests = plan.requests.max_concurrent_requests
    choose_slots(per_slot, available, requests * needed, wanted, at_least=min(needed, wanted or needed))


def _check_weights(
    plan: LaunchPlan, weights: int, kind: str, machine: Machine, smaller: str, adapters: int = 0
) -> None:
    """MemoryLimitError if the weights and the slots of adapters, numbers of bytes, do not fit. `kind`: how weights are
    kept. `smaller`: a flag that makes them smaller."""
    _check_addresses(weights + adapters, plan.num_shard, machine.addresses)
    if weights + SHARD_BYTES * plan.num_shard > machine.free_bytes:
        raise MemoryLimitError(
            f"the weights need {weights / GIB:.1f} GiB in {kind}, each shard needs"
            f" {SHARD_BYTES / GIB:.1f} GiB more, and {machine.free_bytes / GIB:.1f} GiB of memory are free: choose a"
            f" smaller model{smaller}, or a machine with more memory"
        )
    if weights + adapters + SHARD_BYTES * plan.num_shard > machine.free_bytes:
        raise MemoryLimitError(
            f"the slots of adapters need {adapters / GIB:.1f} GiB beside the {weights / GIB:.1f} GiB of weights, and"
            f" {machine.free_bytes / GIB:.1f} GiB of memory are free: choose a smaller --max-loras"
            f"{' or --max-lora-rank' if plan.adapters.lora_dirs else ''}"
        )
    likely = weights + adapters + LIKELY_BYTES * plan.num_shard
    if likely > machine.free_bytes:
        free = machine.free_bytes / GIB
        logger.warning("Memory may not suffice: %.1f GiB are free, and such shards took %.1f GiB", free, likely / GIB)
