"""Starts that cannot succeed, as a table: flags, what is changed in the model's folder, and what is told."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from text_generation_launcher.mistakes import FOREIGN

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


def two_gguf(folder: Path) -> None:
    only_gguf(folder)
    (folder / "m.Q8_0.gguf").write_bytes(b"GGUF")


def no_gguf(folder: Path) -> None:
    folder.with_name("m.gguf").write_bytes(b"GGML")


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


def adapter(folder: Path, base: str = "org/base") -> None:
    empty(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    (folder / "adapter_model.safetensors").write_bytes(b"")


def cached(folder: Path) -> None:
    (folder.with_name("models--org--name") / "snapshots").mkdir(parents=True)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 132\n"
HUGE = {"hidden_size": 2**16, "intermediate_size": 2**18, "num_hidden_layers": 200, "num_attention_heads": 64}
DEEP = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 512, "num_hidden_layers": 800}
LONG = {"max_position_embeddings": 2**24, "head_dim": 64, "num_hidden_layers": 250}
MOE = {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
QUANTIZED = {"quant_method": "aqlm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
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
    "exl2": Bad("--quantize exl2", "--quantize exl2 is not supported yet", "use awq or compressed-tensors"),
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
        "--model-id {}/../m.gguf", "m.gguf is not a good GGUF file: it has 4", "download it again", gguf_beside
    ),
    "GGUF folder": Bad("", "m.Q4_K_M.gguf is not a good GGUF file: it has", "download it again", only_gguf),
    "two GGUF files": Bad("", "has 2 models in GGUF files, and no other", "pass one of them as --model-id", two_gguf),
    "no GGUF file": Bad("--model-id {}/../m.gguf", "m.gguf does not begin as GGUF", "download it again", no_gguf),
    "file": Bad("--model-id {}/model.safetensors", "is a file: --model-id is", "pass the file's directory", nothing),
    "empty folder": Bad("", "has no config.json", "is it the directory of a model?", empty),
    "address on the hub": Bad(
        "--model-id https://huggingface.co/org/name/tree/main", "is an address of the hub", "pass --model-id org/name"
    ),
    "short address on the hub": Bad("--model-id hf.co/org/name:1b", "is an address of the hub", "--model-id org/n"),
    "other address": Bad("--model-id s3://bucket/m", "s3://bucket/m is an address", "pass a hub id or a folder"),
    "Ollama's name": Bad("--model-id llama3:8b", "has the form of Ollama's names", "modelfile llama3:8b` names"),
    "Ollama's other name": Bad("--model-id user/llama3.2:1b-q4_0", "has the form of Ollama's names", "1b-q4_0` names"),
    "demo in capitals": Bad("--model-id Demo", "Demo is neither a folder nor a hub id", "did you mean demo?"),
    "adapter": Bad("", "is a LoRA adapter for org/base, not a model", "and --lora-adapters ", adapter),
    "adapter of a strange base": Bad(
        "", "is a LoRA adapter, not a model", "and --lora-adapters ", lambda folder: adapter(folder, "x\n" * 99)
    ),
    "cache folder": Bad(
        "--model-id {}/../models--org--name",
        "is a folder of the hub's cache",
        "pass --model-id org/name --hugg",
        cached,
    ),
    "override of the cache": Bad(
        "--weights-cache-override {}/../models--org--name", "is a folder of the hub's cache", "pass --model-id", cached
    ),
    # Files that git-lfs has not fetched
    **{
        f"pointer in the place of {name}": with_file(name, POINTER, f"{name} is a pointer of git-lfs", "run `git lfs p")
        for name in (CONFIG, WEIGHTS, INDEX, "generation_config.json", "tokenizer.json")
    },
    # Flags of other servers
    **{
        f"foreign {word}": usage(f"{word} 1", f"No such option: {word}", f"{hint}; {LISTED}")
        for hint, word in {hint: word for word, hint in reversed(FOREIGN.items())}.items()  # one of those with a hint
        if word.startswith("-")
    },
    "foreign value": usage("--tp=2", "No such option: --tp", "use --num-shard"),
    "file of llama.cpp": usage("-m model.gguf", "No such option: -m", f"use --model-id; {LISTED}"),
    "file of Ollama": usage("--modelfile m", "No such option: --modelfile", "use the path of the GGUF file, or owner/"),
    "flag of llama.cpp behind ours": usage("--port 80 -ngl 99", "No such option: -ngl", "a GPU computes all layers"),
    **{
        f"{command} of others": usage(
            f"{command} org/m", f"No such command: {command}", "without the name of a command"
        )
        for command in ("serve", "run", "pull")
    },
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
    "aqlm weights": configured(
        "quantized as aqlm, which is not supported", "quantize the model again", quantization_config=QUANTIZED
    ),
    "mxfp4 of another type": configured(
        "quantized as mxfp4, which is supported for model type gpt_oss only",
        "choose the unquantized model",
        quantization_config={"quant_method": "mxfp4"},
    ),
    "int8 of gptq for transformers": configured(
        "--quantize int8 contradicts the model's files, which are quantized as gptq",
        "start without it",
        "--quantize int8",
        model_type="seed_oss",
        quantization_config=GPTQ,
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
    "gptq of numbers": configured("reads weights that are quantized so", "start without it", "--quantize gptq"),
    "compressed-tensors of gptq": configured(
        "--quantize compressed-tensors contradicts the model's files, which are quantized as gptq",
        "start without it",
        "--quantize compressed-tensors",
        quantization_config=GPTQ,
    ),
    "int8 of gptq": configured(
        "--quantize int8 contradicts the model's files", "start without it", "--quantize int8", quantization_config=GPTQ
    ),
    "fp8 of numbers": configured(
        "--quantize fp8 makes fp8 of this model's weights on GPUs only", "choose --quantize int8", "--quantize fp8"
    ),
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
        "choose a smaller model, --quantize int8, or a machine with more memory",
        "--load-format dummy",
        **(HUGE | MOE),
    ),
    "int8 larger than memory": configured(
        "GiB in int8, each shard needs ",
        "choose a smaller model, or a machine",
        "--load-format dummy --quantize int8",
        **HUGE,
    ),
    "adapters larger than memory": configured(
        "the slots of adapters need ",
        "choose a smaller --max-loras or --max-lora-rank",
        "--load-format dummy --lora-dirs {} --admin-api-key k --max-loras 128 --max-lora-rank 512",
        **DEEP,
    ),
    **{
        f"adapter of the name {name}": Bad(
            f"--model-id {{}} --lora-adapters {name}=/no/folder {flags}".strip(),
            f"--lora-adapters names {name}, which means the model itself",
            "give it another name",
        )
        for name, flags in {"tgi": "", "dummy": "", "mine": "--served-model-name mine"}.items()
    },
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


def flags_of(bad: Bad, folder: Path) -> list[str]:
    """The command line of this start; changes the folder first."""
    flags = bad.flags.format(folder).split(" ") if bad.flags else []
    if bad.change is not None:
        bad.change(folder)
    if "--model-id" in flags or (bad.change is None and bad.status == USAGE):
        return flags
    return ["--model-id", str(folder), *flags]
