"""What this machine says against a start: its processor, memory and limits."""

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from text_generation_common.cpu_features import NEEDS
from text_generation_common.errors import ArgumentValidation
from text_generation_common.flags.declaration import with_flags
from text_generation_common.flags.kinds import ActivationType, CpuTarget, Dtype, KvCacheDtype, Quantize, Standby
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.preflight import (
    LIKELY_ADDRESSES,
    LIKELY_BYTES,
    SHARD_ADDRESSES,
    SHARD_BYTES,
    Machine,
    check_model,
    check_standby,
)
from text_generation_launcher.resolve import resolve
from text_generation_launcher.tests.bad_starts import CONFIG, GPTQ, MOE, WEIGHTS


def told_of(machine: Machine, folder: Path, **flags: object) -> str:
    plan = resolve(with_flags(LauncherConfig(), model_id=str(folder), **flags), {})
    with pytest.raises(ArgumentValidation) as refusal:
        check_model(plan, folder, machine)
    return str(refusal.value)


GIB = 2**30


def test_a_target_that_this_processor_lacks_is_told_with_those_that_it_has(folder: Path) -> None:
    flags = frozenset(NEEDS["avx2"])
    told = told_of(Machine(False, GIB, cpu_flags=flags), folder, cpu_target=CpuTarget.amx)
    assert told.startswith("--cpu-target amx cannot be used, since this processor has no amx_bf16, ")
    assert "choose one of avx2, portable" in told
    for target in (None, CpuTarget.avx2, CpuTarget.portable):
        plan = resolve(with_flags(LauncherConfig(), model_id=str(folder), cpu_target=target), {})
        check_model(plan, folder, Machine(False, 4 * GIB, cpu_flags=flags))


def test_limits_in_which_no_shard_can_fit_are_told_and_others_are_tried(folder: Path) -> None:
    assert "`ulimit -v` allows 512 MiB" in told_of(Machine(False, 4 * GIB, addresses=GIB // 2), folder)
    assert "0.0 GiB of memory are free" in told_of(Machine(False, 50 * 2**20), folder)
    plan = resolve(with_flags(LauncherConfig(), model_id=str(folder)), {})
    check_model(plan, folder, Machine(False, GIB, addresses=2 * GIB))
    check_model(plan, folder, Machine(True, 0, addresses=0, cpu_flags=frozenset()))


@pytest.mark.parametrize(
    ("machine", "refused"),
    [
        (Machine(False, GIB), ""),
        (Machine(True, GIB), "--standby on is for CPUs"),
        (Machine(False, GIB, adopts=False), "--standby on needs Linux 5.3"),
    ],
)
def test_templates_fork_the_shards_where_they_can_and_are_refused_by_name_elsewhere(
    folder: Path, machine: Machine, refused: str
) -> None:
    for standby in (None, Standby.off, Standby.on):
        plan = resolve(with_flags(LauncherConfig(), model_id=str(folder), standby=standby), {})
        with pytest.raises(ArgumentValidation, match=refused) if refused and standby is Standby.on else nullcontext():
            check_standby(plan, machine)
    assert machine.has_templates(None) is not bool(refused)
    assert not machine.has_templates(Standby.off) and not machine.has_router_template(Standby.off)
    assert machine.has_router_template(None) is machine.adopts


def test_a_server_without_engines_has_the_template_of_fronts_beside_gpus(folder: Path) -> None:
    flags = {"engines": ("10.0.0.1:7000",), "insecure_cluster": True, "standby": Standby.on}
    plan = resolve(with_flags(LauncherConfig(), model_id=str(folder), **flags), {})
    check_standby(plan, machine := Machine(True, GIB))
    assert machine.has_router_template(Standby.on)
    with pytest.raises(ArgumentValidation, match="needs Linux"):
        check_standby(plan, Machine(True, GIB, adopts=False))


def test_adapters_that_name_another_base_are_told_in_one_warning(
    folder: Path, write_weights: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    width, module = json.loads((folder / CONFIG).read_text())["hidden_size"], "model.layers.0.self_attn.q_proj"
    bases = {"a": "org/Model", "b": None, "c": "org/other\n", "d": "/home/me/third"}
    for name, base in bases.items():
        adapter = folder.parent / name
        adapter.mkdir()
        fields = {"peft_type": "LORA", "r": 2, "base_model_name_or_path": base}
        (adapter / "adapter_config.json").write_text(json.dumps(fields))
        pair = {"lora_A": (2, width), "lora_B": (width, 2)}
        shapes = {f"base_model.model.{module}.{kind}.weight": shape for kind, shape in pair.items()}
        write_weights(adapter / "adapter_model.safetensors", shapes)

    def warnings(*names: str, **flags: object) -> list[str]:
        caplog.clear()
        adapters = ",".join(f"{name}={folder.parent / name}" for name in names)
        plan = resolve(with_flags(LauncherConfig(), model_id=str(folder), lora_adapters=adapters, **flags), {})
        check_model(plan, folder, Machine(False, 4 * GIB))
        return [record.getMessage() for record in caplog.records if "trained for" in record.getMessage()]

    assert warnings("a", "b") == [] == warnings("c", served_model_name="me/OTHER\n")
    assert warnings(*bases) == [
        "--lora-adapters c, and 1 more, may not fit the model, which is not called as its base: trained for"
        r" org/other\n"
    ]


MARGIN = 2**20


@pytest.mark.parametrize("num_shard", [1, 2])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"quantize": Quantize.int8},
        {"dtype": Dtype.float32},
        {"max_total_tokens": 64},
        {"max_batch_total_tokens": 256, "max_total_tokens": 64, "max_batch_prefill_tokens": 64},
    ],
)
@pytest.mark.parametrize("limit", ["memory", "addresses"])
def test_a_limit_a_little_above_the_need_is_served_and_one_a_little_below_what_shards_took_is_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, limit: str, flags: dict[str, object], num_shard: int
) -> None:
    plan = resolve(with_flags(LauncherConfig(), model_id=str(folder), num_shard=num_shard, **flags), {})

    def warnings(number: int) -> list[str]:
        caplog.clear()
        machine = Machine(False, number) if limit == "memory" else Machine(False, 64 * GIB, addresses=number)
        check_model(plan, folder, machine)
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    least, likely = (SHARD_BYTES, LIKELY_BYTES) if limit == "memory" else (SHARD_ADDRESSES, LIKELY_ADDRESSES)
    shards = num_shard if limit == "memory" else 1
    [warning] = warnings(shards * least + MARGIN)
    assert ("Memory may not suffice" if limit == "memory" else "`ulimit -v` may be too low") in warning
    assert len(warnings(shards * likely - MARGIN)) == 1 and warnings(shards * likely + MARGIN) == []
    with pytest.raises(ArgumentValidation):
        warnings(shards * least - MARGIN)


LARGE = {"hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 14336, "num_hidden_layers": 32}


def test_codes_are_counted_as_they_are_kept(folder: Path) -> None:
    """In 4 bits with a scale of 4 bytes for 128 inputs: 4.25 bits for each weight, instead of 16."""

    def gib(quantize: Quantize | None = None, **settings: object) -> float:
        config = json.loads((folder / CONFIG).read_text()) | LARGE
        (folder / CONFIG).write_text(json.dumps(config | settings))
        plan = resolve(with_flags(LauncherConfig(), model_id=str(folder), quantize=quantize), {})
        with pytest.raises(ArgumentValidation) as refusal:
            check_model(plan, folder, Machine(False, GIB), is_whole=False)
        found = re.match(r"the weights need ([\d.]+) GiB in (bfloat16|gptq|int8), .*more memory$", str(refusal.value))
        assert found and ("--quantize int8" in found[0]) == (found[2] == "bfloat16")
        return float(found[1])

    dense = gib(dtype="bfloat16")
    assert dense > 12
    quantized = gib(quantization_config=GPTQ)
    assert quantized == pytest.approx(dense * 4.25 / 16, abs=0.1)
    second_expert = 32 * 3 * 4096 * 14336 * 4.25 / 8 / GIB
    assert gib(Quantize.gptq, **MOE) == pytest.approx(quantized + second_expert, abs=0.1)


@pytest.mark.parametrize("model_type", ["mixtral", "granitemoe"])
def test_experts_are_counted_as_the_codes_that_they_become(folder: Path, model_type: str) -> None:
    """Also where they lie in one tensor."""

    def refusal(**flags: object) -> float:
        config = json.loads((folder / CONFIG).read_text()) | LARGE | MOE
        (folder / CONFIG).write_text(json.dumps(config | {"model_type": model_type}))
        plan = resolve(with_flags(LauncherConfig(), model_id=str(folder), **flags), {})
        with pytest.raises(ArgumentValidation, match="the weights need") as told:
            check_model(plan, folder, Machine(False, GIB), is_whole=False)
        return float(str(told.value).split()[3])

    dense, codes = (refusal(dtype=Dtype.bfloat16, quantize=quantize) for quantize in (None, Quantize.int8))
    assert codes == pytest.approx(dense / 2, rel=0.03)


@pytest.mark.parametrize(("place", "field"), [("h.", "n_layer"), ("model.layers.", "num_hidden_layers")])
def test_the_layers_of_a_model_that_transformers_computes_must_fit_too(
    folder: Path, write_weights: Callable[..., None], place: str, field: str
) -> None:
    (folder / CONFIG).write_text(json.dumps({"model_type": "seed_oss", field: 2, "dtype": "bfloat16"}))
    names = [f"{place}0.w", f"{place}1.w", f"{place}2.w", "lm_head.weight", "vision_tower.encoder.layers.0.w"]
    write_weights(folder / WEIGHTS, {name: (1024, 1024) for name in names})
    enough = SHARD_BYTES + 2 * 2**21
    assert "the weights need 0.0 GiB in bfloat16" in told_of(Machine(False, enough - 1), folder)
    assert "the weights need 0.0 GiB in float32" in told_of(Machine(False, enough), folder, dtype=Dtype.float32)
    assert "`ulimit -v` allows 1 MiB" in told_of(Machine(False, enough, addresses=2**20), folder)
    plan = resolve(with_flags(LauncherConfig(), model_id=str(folder)), {})
    for machine in (Machine(False, enough), Machine(True, 0)):
        check_model(plan, folder, machine)


def test_what_depends_on_a_gpu_is_left_to_the_shards(folder: Path) -> None:
    plan = resolve(with_flags(LauncherConfig(), model_id=str(folder)), {})
    gpu = Machine(has_gpu=True, free_bytes=0)
    for changes in ({"quantize": Quantize.int8, "dtype": None}, {"kv_cache_dtype": KvCacheDtype.int8}):
        check_model(with_flags(plan, **changes), folder, gpu)


def test_activations_in_8_bits_of_a_model_in_numbers_are_refused_before_a_start(folder: Path) -> None:
    config = LauncherConfig()
    plan = resolve(with_flags(config, model_id=str(folder), activations=ActivationType.int8), {})
    with pytest.raises(
        ArgumentValidation, match=r"^--activations int8 .* are not quantized: add --quantize int8 or int4"
    ):
        check_model(plan, folder, Machine(False, 64 * GIB))
    for changes, has_gpu in (({"quantize": Quantize.int8}, False), ({}, True)):
        check_model(with_flags(plan, **changes), folder, Machine(has_gpu, 64 * GIB))


@pytest.mark.parametrize(("visible", "hidden"), [("", True), ("-1", True)])
def test_a_gpu_that_is_hidden_is_none(visible: str, hidden: bool) -> None:
    assert Machine.this({"CUDA_VISIBLE_DEVICES": visible}).has_gpu is not hidden
