"""Starts that cannot succeed, as a table: each is told in three lines at most, the cause first, and starts no child."""

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from text_generation_common.cpu_features import NEEDS
from text_generation_common.errors import ArgumentValidation
from text_generation_common.flags.declaration import with_flags
from text_generation_common.flags.kinds import CpuTarget, Dtype, KvCacheDtype, Quantize
from text_generation_launcher import cli
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.preflight import SHARD_BYTES, Machine, check_model
from text_generation_launcher.resolve import resolve

USAGE = 2
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
LISTED = "`text-generation-launcher --help` lists all flags"


@dataclass(frozen=True)
class Bad:
    """A start that is refused. `flags` go behind `--model-id FOLDER` if there is a change of the model's folder."""

    flags: str
    error: str  # part of the first line
    hint: str  # part of the second line
    change: Callable[[Path], None] | None = None
    status: int = 1
    environ: dict[str, str] = field(default_factory=dict)


def usage(flags: str, error: str, hint: str = LISTED, **environ: str) -> Bad:
    return Bad(flags, error, hint, None, USAGE, environ)


def zero(flag: str) -> Bad:
    name = flag.removeprefix("--").replace("-", "_")
    return usage(f"{flag} 0", f"`{name}` must be > 0", "give another number, or leave the flag out")


def configured(error: str, hint: str = "", flags: str = "", **changes: object) -> Bad:
    """config.json with other fields; None takes a field out."""

    def change(folder: Path) -> None:
        content = json.loads((folder / CONFIG).read_text()) | changes
        kept = {name: value for name, value in content.items() if value is not None}
        (folder / CONFIG).write_text(json.dumps(kept))

    return Bad(flags, error, hint, change)


def with_file(name: str, content: bytes | None, error: str, hint: str) -> Bad:
    """A folder with another content of one file, or without it."""

    def change(folder: Path) -> None:
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)

    return Bad("", error, hint, change)


def nothing(folder: Path) -> None:
    pass


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def only_gguf(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "m.Q4_K_M.gguf").write_bytes(b"GGUF")


def gguf_beside(folder: Path) -> None:
    folder.with_name("m.gguf").write_bytes(b"GGUF")


def piped(folder: Path) -> None:
    (folder / CONFIG).unlink()
    os.mkfifo(folder / CONFIG)


def truncated(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-5])


def missing_part(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")


def index_without_file(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}}))


def index_without_tensor(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"no.such.weight": WEIGHTS}}))


HUGE = {"hidden_size": 2**16, "intermediate_size": 2**18, "num_hidden_layers": 200, "num_attention_heads": 64}
LONG = {"max_position_embeddings": 2**24, "num_hidden_layers": 4000}
MOE = {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
QUANTIZED = {"quant_method": "gptq", "bits": 4}
SERVED = "of one of these types: aya_vision, bloom, "
SMALLER = "choose a smaller --max-total-tokens, or stretch the positions with"

BAD: dict[str, Bad] = {
    # Wrong usage
    "name of no machine": usage(
        "--hostname foo.invalid", "neither an IP address nor a name of this machine", "give an"
    ),
    "empty model": usage("--model-id=", "--model-id is empty", "give it a value, or leave it out"),
    "empty model in the environment": usage(
        "", "MODEL_ID in the environment is empty", "give it a value, or leave it out", MODEL_ID=""
    ),
    "list of an empty key": usage("--api-key=good --api-key=", "--api-key is empty"),
    **{
        f"{variable} of {text!r}": usage("", f"{variable} in the environment is empty", **{variable: text})
        for variable in ("API_KEY", "ADMIN_API_KEY", "API_KEY_FILE", "CORS_ALLOW_ORIGIN", "TLS_DIR")
        for text in ("", "  ")
    },
    "misspelt flag": usage("--modl-id x", "No such option: --modl-id", f"did you mean --model-id? {LISTED}"),
    "model without its flag": usage("./model", "unexpected extra argument", "each value needs its flag, such as --mod"),
    "value of a switch": usage("--closed-routes true", "unexpected extra argument", "each value needs its flag"),
    "no value": usage("--max-total-tokens", "'--max-total-tokens' requires an argument"),
    "port out of range": usage("--port 70000", "'--port'"),
    "port in words": usage("--port http", "'--port'"),
    "unknown dtype": usage("--dtype int8", "'int8' is not one of 'float32', 'bfloat16', 'float16'"),
    "unknown quantization": usage("--quantize q4", "'q4' is not one of 'awq'"),
    "unknown admission": usage("--admission greedy", "'greedy' is not one of 'reserve'"),
    "neither true nor false": usage("--sharded maybe", "'maybe' is not one of 'true', 'false'"),
    "negative": usage("--max-best-of -1", "'--max-best-of'"),
    "switch in the environment": usage(
        "", "JSON_OUTPUT in the environment is 'yes'", "set it to true or false", JSON_OUTPUT="yes"
    ),
    "no tokens": zero("--max-total-tokens"),
    "no prompt": zero("--max-input-tokens"),
    "no prompt, old name": zero("--max-input-length"),
    "no batch": zero("--max-batch-total-tokens"),
    "no step": zero("--max-batch-prefill-tokens"),
    "no rows": zero("--max-batch-size"),
    "no requests": zero("--max-concurrent-requests"),
    "no workers": zero("--validation-workers"),
    "no body": zero("--payload-limit"),
    "no memory": zero("--cuda-memory-fraction"),
    "no shard": usage("--num-shard 0", "`num_shard` cannot be < 1", "choose --num-shard 1, or leave it out"),
    "no number": usage("--rope-factor nan", "`rope_factor` must be a finite number", "give another"),
    # Flags whose feature is missing, or that contradict each other
    "speculation": Bad("--speculate 2", "--speculate is not supported yet", "start without it"),
    "remote code": Bad("--trust-remote-code", "--trust-remote-code is not supported yet", "start without it"),
    "gptq": Bad("--quantize gptq", "--quantize gptq is not supported yet", "use int8, or start without"),
    "fp8_e5m2": Bad("--kv-cache-dtype fp8_e5m2", "fp8_e5m2 is not supported yet", "use fp8_e4m3fn or int8"),
    "input as long as all": Bad(
        "--max-input-tokens 8 --max-total-tokens 8",
        "`max_input_tokens`(8) must be < `max_total_tokens`(8)",
        "choose a smaller --max-input-tokens",
    ),
    "both names": Bad(
        "--max-input-tokens 8 --max-input-length 8", "Both `max_input_tokens` (8)", "leave --max-input-len"
    ),
    "step larger than batch": Bad(
        "--max-batch-total-tokens 8 --max-batch-prefill-tokens 9",
        "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`",
        "choose a smaller --max-batch-prefill-tokens",
    ),
    "text larger than batch": Bad(
        "--max-batch-total-tokens 8 --max-total-tokens 9",
        "`max_total_tokens` must be <= `max_batch_total_tokens`",
        "choose a smaller --max-total-tokens",
    ),
    "sharded with one": Bad(
        "--sharded true --num-shard 1", "`sharded` is true but `num_shard` <= 1", "raise --num-shard"
    ),
    "sharded without GPUs": Bad("--sharded true", "only found 0 CUDA devices", "leave --sharded out"),
    "graphs in words": Bad("--cuda-graphs 1,x", "--cuda-graphs 1,x is not a list of batch sizes", "write it as 1,2,4"),
    "key in two words": Bad("--api-key=a\tb", "--api-key is empty or contains a space", "choose a key without spaces"),
    "closed without a key": Bad("--closed-routes", "--closed-routes needs a key", "pass --api-key"),
    "no template": Bad("--tokenizer-config-path /no/file", "/no/file is not a file", "check the path"),
    "no keys": Bad("--api-key-file /no/file", "/no/file is not a file", "check the path"),
    "no override": Bad("--weights-cache-override /no/folder", "/no/folder is not a directory", "check the path"),
    # Where the model is
    "no such folder": Bad("--model-id /no/model", "model directory /no/model does not exist", "check --model-id"),
    "path like an id": Bad("--model-id a/b/c", "model directory a/b/c does not exist", "check --model-id"),
    "GGUF file": Bad(
        "--model-id {}/../m.gguf", "m.gguf is a GGUF file: only safet", "use the original rep", gguf_beside
    ),
    "GGUF folder": Bad("", "has a GGUF file, m.Q4_K_M.gguf, and no other", "use the original repository", only_gguf),
    "file": Bad("--model-id {}/model.safetensors", "is a file: --model-id is", "pass the file's directory", nothing),
    "empty folder": Bad("", "has no config.json", "is it the directory of a model?", empty),
    # config.json
    "no config.json": with_file(CONFIG, None, "has no config.json", "is it the directory of a model?"),
    "broken config.json": with_file(CONFIG, b"{", "config.json is not valid JSON", "repair it, or download it again"),
    "list as config.json": with_file(CONFIG, b"[]", "does not hold a JSON object", "repair it, or download it again"),
    "pipe as config.json": Bad("", "config.json cannot be read (not a regular file)", "repair it", piped),
    "broken generation_config.json": with_file(
        "generation_config.json", b"[", "generation_config.json is not valid JSON", "repair it"
    ),
    "misspelt type": configured('model type "lama" is not supported', "did you mean llama? Choose", model_type="lama"),
    "unknown type": configured('model type "t5" is not supported', f"choose a model {SERVED}", model_type="t5"),
    "no type": configured("config.json has no field model_type", model_type=None),
    "own code": configured("(auto_map), and such code is never run", model_type="mine", auto_map={"AutoConfig": "a.B"}),
    "other task": configured(
        "a model for another task than generating text",
        "choose a causal language model",
        architectures=["LForMaskedLM"],
    ),
    "gptq weights": configured(
        "quantized as gptq, which is not supported", "choose the same model with unq", quantization_config=QUANTIZED
    ),
    "missing field": configured("config.json has no field hidden_size", hidden_size=None),
    "field of another type": configured("hidden_size is a list, and must be a whole number", hidden_size=[16]),
    "unknown activation": configured('hidden_act is the string "siluu", and must be one of', hidden_act="siluu"),
    "odd head": configured("the head size is 5, and must be an even number", head_dim=5),
    "unknown field": configured("n_head is 3, which is not supported", "remove it", n_head=3),
    # Types that the shard would refuse.
    **{
        f"a {model_type}": configured(f'model type "{model_type}" is not supported: {reason}', model_type=model_type)
        for model_type, reason in {
            "stablelm": "transformers does not declare",
            "llama4": "it is more than a text model",
            "qwen3_next": "its layers keep a state for each text",
            "qwen3_5": "it is more than a text model",
            "mamba": "its layers keep a state for each text",
            "granitemoehybrid": "its layers keep a state for each text",
        }.items()
    },
    "layers with a state": configured(
        'model type "granitemoehybrid" is not supported: its layers are of the kind mamba',
        model_type="granitemoehybrid",
        layer_types=["mamba", "attention"],
    ),
    # config.json with flags
    "heads by three": configured(
        "--num-shard 3 cannot divide the 4 attention heads", "choose one of 1, 2, 4", "--num-shard 3"
    ),
    "shards of transformers": configured(
        "--num-shard 2 is not supported for model type seed_oss",
        "choose --num-shard 1",
        "--num-shard 2",
        model_type="seed_oss",
    ),
    "longer than made for": configured("`max_total_tokens` must be <= 2048", SMALLER, "--max-total-tokens 4096"),
    "input longer than made for": configured(
        "`max_input_tokens`(2048) must be < 2048", "choose a smaller --max-input-tokens", "--max-input-tokens 2048"
    ),
    "shrinking rope": configured("--rope-factor 0.5 is not supported: it must be from 1", "", "--rope-factor 0.5"),
    "float16 on CPUs": configured("float16 is not supported on CPUs", "choose bfloat16", "--dtype float16"),
    "int8 of float32": configured(
        "--quantize int8 computes in bfloat16", "choose --dtype bfloat16", "--quantize int8 --dtype float32"
    ),
    "int8 of a float32 model": configured(
        "--quantize int8 computes in bfloat16", "choose --dtype bfloat16", "--quantize int8", dtype="float32"
    ),
    "int8 of experts": configured("not supported for the experts", "start without it", "--quantize int8", **MOE),
    # Weights
    "truncated weights": Bad("", "model.safetensors is broken: ", "delete it and download the model again", truncated),
    "weights of zeros": with_file(WEIGHTS, bytes(4), "is broken: no safetensors header in its 4 bytes", "delete it"),
    "weights of noise": with_file(WEIGHTS, b"\xff" * 999, "no safetensors header in its 999 bytes", "delete it"),
    "no weights": with_file(WEIGHTS, None, "has no .safetensors weights", "is it the directory of a model?"),
    "missing part": Bad("", "model-00002-of-00002.safetensors is missing", "download the model again", missing_part),
    "file of the index": Bad(
        "", "model-00002-of-00002.safetensors is missing", "download the model", index_without_file
    ),
    "tensor of the index": Bad("", "has no tensor no.such.weight, which", "delete it and down", index_without_tensor),
    "index without a map": with_file(INDEX, b"{}", "has no weight_map", "delete it and download the model again"),
    "other widths": configured(
        "has the shape [32, 16] in the weights files", "do the weights belong", intermediate_size=64
    ),
    "too few layers": configured("have no tensor model.layers.2.", "do they belong", num_hidden_layers=3),
    "too many layers": configured("have a tensor model.layers.1.", "", num_hidden_layers=1),
    # The tokenizer
    "no tokenizer": with_file("tokenizer.json", None, "has no tokenizer.json", "use a model that has tokenizer.json"),
    "cut tokenizer": with_file("tokenizer.json", b'{"a": {', "tokenizer.json is empty or cut off", "repair it"),
    "empty tokenizer": with_file("tokenizer.json", b"", "tokenizer.json is empty or cut off", "repair it"),
    # Memory
    "larger than memory": configured(
        "the weights need ", "choose a smaller model, --quantize int8", "--load-format dummy", **HUGE
    ),
    "experts larger than memory": configured(
        "the weights need ",
        "choose a smaller model, or a machine with more memory",
        "--load-format dummy",
        **(HUGE | MOE),
    ),
    "int8 larger than memory": configured(
        "GiB in int8, each shard needs ",
        "choose a smaller model, or a machine",
        "--load-format dummy --quantize int8",
        **HUGE,
    ),
    "batch larger than memory": configured(
        "--max-batch-total-tokens 900000000000 needs ", "choose at most ", "--max-batch-total-tokens 900000000000"
    ),
    "text larger than memory": configured(
        "`max_total_tokens=16000000` needs ",
        "choose a smaller --max-total-tokens",
        "--load-format dummy --max-total-tokens 16000000",
        **LONG,
    ),
}


@pytest.fixture
def folder(tmp_path: Path, make_model: Callable[..., None]) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    make_model(model)
    return model


@pytest.mark.parametrize("name", BAD)
def test_a_bad_start_is_told_in_three_lines_the_cause_first(
    name: str,
    folder: Path,
    is_listed: Callable[[str], bool],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = BAD[name]
    flags = bad.flags.format(folder).split(" ") if bad.flags else []
    if bad.change is not None:
        bad.change(folder)
        flags = flags if "--model-id" in flags else ["--model-id", str(folder), *flags]
    elif bad.status != USAGE and "--model-id" not in flags:
        flags = ["--model-id", str(folder), *flags]
    status, lines = refused(flags, bad.environ, capsys, monkeypatch)
    assert status == bad.status, lines
    told = [line for line in lines if " INFO " not in line]
    assert told[0].startswith("error: ") and bad.error in told[0], told
    assert not bad.hint or (told[1].startswith("hint: ") and bad.hint in told[1]), told
    assert len(lines) <= 3 and not any(word in told[0] for word in ("Traceback", "Argument", "Validation", "Error"))
    assert is_listed(told[0].removeprefix("error: ")), f"docs/troubleshooting.md has no line for: {told[0]}"


def refused(
    flags: list[str], environ: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[str]]:
    """Exit status and lines of the launcher with these flags, in this process. It finds no programs for children, and
    sees no GPU."""
    for variable in list(os.environ):
        monkeypatch.delenv(variable)
    monkeypatch.setattr("sys.argv", ["text-generation-launcher", *flags])
    for variable, value in ({"PATH": "/nonexistent", "CUDA_VISIBLE_DEVICES": ""} | environ).items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as ended:
        cli.main(flags, [])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), (out + err).splitlines()


def test_a_good_model_passes_and_only_its_programs_are_missed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for flags in ([], ["--num-shard", "2"], ["--quantize", "int8"], ["--max-total-tokens", "2048"]):
        status, lines = refused(["--model-id", str(folder), *flags], {}, capsys, monkeypatch)
        assert (status, lines[0]) == (1, "error: text-generation-server not found in PATH"), lines


def test_an_empty_token_of_the_hub_is_none(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HF_TOKEN", "REVISION", "TRUSTED_PROXY", "SERVED_MODEL_NAME"):
        _, lines = refused(["--model-id", str(folder)], {variable: ""}, capsys, monkeypatch)
        assert lines[0] == "error: text-generation-server not found in PATH", lines


def test_an_adapter_beside_the_weights_that_it_was_merged_into_is_ignored_with_a_warning(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"no header")
    _, lines = refused(["--model-id", str(folder)], {}, capsys, monkeypatch)
    [warning] = [line for line in lines if "adapter_model.safetensors of " in line]
    assert " WARNING " in warning and "is ignored: adapters are not supported" in warning
    assert "error: text-generation-server not found in PATH" in lines


def test_a_used_port_is_told_in_two_lines(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("text-generation-server", "text-generation-router"):
        (programs / name).write_text("#!/bin/false\n")
        (programs / name).chmod(0o755)
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = used.getsockname()[1]
        flags = ["--model-id", str(folder), "--hostname", "127.0.0.1", "--port", str(port)]
        flags += ["--shard-uds-path", str(tmp_path / "s")]
        status, lines = refused(flags, {"PATH": str(programs)}, capsys, monkeypatch)
    assert (status, lines) == (1, [f"error: port {port} is in use on 127.0.0.1", "hint: choose another --port"])


def test_json_output_tells_the_error_in_json_with_its_class(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*flags: str) -> dict[str, str]:
        _, lines = refused(["--json-output", *flags], {}, capsys, monkeypatch)
        return json.loads(lines[-1])

    heads = told("--model-id", str(folder), "--num-shard", "3")
    assert (heads["level"], heads["kind"], heads["hint"]) == ("ERROR", "ArgumentValidation", "choose one of 1, 2, 4")
    assert heads["message"].startswith("--num-shard 3 cannot divide") and heads["target"] == "text_generation_launcher"
    assert told("--port", "x")["kind"] == "UsageError"


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


@pytest.mark.parametrize(("visible", "hidden"), [("", True), ("-1", True)])
def test_a_gpu_that_is_hidden_is_none(visible: str, hidden: bool) -> None:
    assert Machine.this({"CUDA_VISIBLE_DEVICES": visible}).has_gpu is not hidden
