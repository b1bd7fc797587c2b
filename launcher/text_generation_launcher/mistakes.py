"""Mistakes of users of other servers, and of hubs, recognized by their form: what to write in their place."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from text_generation_common.errors import ArgumentValidation
from text_generation_common.gguf.hub_choice import HUB_FOLDER
from text_generation_common.model_files import ModelFileError, read_json_object

ADAPTER_CONFIG = "adapter_config.json"
_HUB = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)", re.ASCII)
_OLLAMA = re.compile(r"(?:[\w.-]+/)*[\w.-]+:[\w.-]+", re.ASCII)
_EXAMPLE = "such as --model-id Qwen/Qwen3-0.6B"
MAX_NAME = 96  # characters of a hub id that a file of the user's names; longer ones are not shown

# What to write in the place of flags of vLLM, SGLang, llama.cpp and Ollama.
_OURS: Mapping[str, str] = {
    "--model-id": "--model --model-path -m --hf-repo -hf -hfr",
    "the path of the GGUF file, or owner/name:Q4_K_M, as --model-id": "--hf-file -hff --modelfile",
    "--num-shard": "--tensor-parallel-size -tp --tp-size --tp",
    "--replicas": "--data-parallel-size -dp --dp-size --dp",
    "--max-total-tokens": "--max-model-len --context-length --ctx-size -c --max-seq-len --num-ctx",
    "--max-batch-size": "--max-num-seqs --max-running-requests --parallel -np",
    "--max-batch-prefill-tokens": "--max-num-batched-tokens --chunked-prefill-size --ubatch-size -ub --batch-size -b",
    "--cuda-memory-fraction": "--gpu-memory-utilization --mem-fraction-static",
    "--hostname": "--host",
    "--quantize": "--quantization",
    "--huggingface-hub-cache": "--download-dir",
    "--tokenizer-config-path": "--chat-template --chat-template-file",
    "--tool-call-format": "--tool-call-parser",
    "--reasoning-format": "--reasoning-parser",
    "--api-workers": "--api-server-count --tokenizer-worker-num --threads-http",
    "--cors-allow-origin": "--allowed-origins",
    "--kv-cache-dtype": "--cache-type-k --cache-type-v -ctk -ctv",
    "--served-model-name": "--alias -a",
    "--lora-adapters": "--enable-lora --lora-modules --lora-paths --lora",
    "--max-loras": "--max-loras-per-batch",
    "--no-prefix-caching": "--no-enable-prefix-caching --disable-radix-cache",
    "--cuda-graphs 0": "--enforce-eager --disable-cuda-graph",
    "LOG_LEVEL in the environment": "--log-level --uvicorn-log-level --disable-log-requests --log-disable --verbose -v",
    "OMP_NUM_THREADS in the environment": "--threads -t",
    "HF_TOKEN in the environment": "--hf-token -hft",
}
# Why no flag is needed, or there is none.
_NONE: Mapping[str, str] = {
    "a GPU computes all layers, if there is one": "-ngl --n-gpu-layers --gpu-layers --num-gpu",
    "it is on by default": "--enable-prefix-caching --enable-chunked-prefill --flash-attn -fa --jinja -cb"
    " --cont-batching --enable-auto-tool-choice --metrics --enable-metrics --slots",
    "each request says it": "--temp --temperature --top-p --top-k --n-predict -n --seed -s"
    " --override-generation-config",
    "a server keeps its model until its end": "--keepalive --keep-alive --swap-space --mlock --no-mmap",
    "a slot holds one token": "--block-size --page-size",
    "the tokenizer is the model's own": "--tokenizer --tokenizer-path --tokenizer-mode --skip-tokenizer-init",
    "a server starts without the name of a command": "serve run pull launch",
}
_MISSING: Mapping[str, str] = {
    "layers are not spread over machines: --num-shard divides each of them": "--pipeline-parallel-size -pp --pp-size",
    "HTTP is served without TLS: put a proxy before it": "--ssl-keyfile --ssl-certfile --ssl-key-file --ssl-cert-file",
    "drafts are not supported": "--speculative-config --speculative-algorithm --draft-model --model-draft -md",
    "only models that generate text are served": "--embedding --embeddings --is-embedding --task --reranking",
}


def _table(rows: Mapping[str, str], form: str) -> dict[str, str]:
    return {word: form.format(told) for told, words in rows.items() for word in words.split()}


FOREIGN: Mapping[str, str] = {
    **_table(_OURS, "use {}"),
    **_table(_NONE, "leave it out: {}"),
    **_table(_MISSING, "leave it out: {}"),
}


def refuse_form(model_id: str) -> None:
    """ArgumentValidation for a --model-id that is not a folder, and has the form of something else than a hub id."""
    if found := _HUB.match(model_id):
        raise ArgumentValidation(f"--model-id {model_id} is an address of the hub", f"pass --model-id {found[1]}")
    if "://" in model_id:
        raise ArgumentValidation(f"--model-id {model_id} is an address", f"pass a hub id or a folder, {_EXAMPLE}")
    if _OLLAMA.fullmatch(model_id):
        raise ArgumentValidation(
            f"--model-id {model_id} has the form of Ollama's names",
            f"pass the path that `ollama show --modelfile {model_id.rpartition('/')[2]}` names after FROM, or a hub id,"
            " such as --model-id owner/name:Q4_K_M",
        )


def refuse_folder(folder: Path) -> None:
    """ArgumentValidation for a folder without config.json that holds an adapter, or a repository of the hub's cache."""
    if (folder / "config.json").exists():
        return
    if (folder / ADAPTER_CONFIG).exists():
        raise ArgumentValidation(
            f"{folder} is a LoRA adapter{_base_of(folder)}, not a model",
            f"pass its model as --model-id, and --lora-adapters {folder.name}={folder}",
        )
    path = folder.absolute()
    if path.name.startswith(HUB_FOLDER):
        hub_id = path.name.removeprefix(HUB_FOLDER).replace("--", "/")
        raise ArgumentValidation(
            f"{folder} is a folder of the hub's cache, which holds revisions of a model",
            f"pass --model-id {hub_id} --huggingface-hub-cache {path.parent}",
        )


def _base_of(folder: Path) -> str:
    with suppress(ModelFileError):
        name = read_json_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        if isinstance(name, str) and name.isprintable() and 0 < len(name) <= MAX_NAME:
            return f" for {name}"
    return ""
