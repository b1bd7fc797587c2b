"""The demo model as a GGUF file, served from a fake hub to a front that has the header of the file only: it still adds
numbers, also after a shard was killed, and two replicas of it give the texts of one."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import processes
import psutil
import pytest
import torch
from asks import WORDS, plain
from calls import metric
from demo_model.corpus import sum_question
from engine_port import EngineProcess
from fake_hub import FakeHub, Model, running_hub
from faults import SLOWER, streams_though_a_shard_is_killed
from gguf_writer import write_gguf
from safetensors.torch import load_file
from scale import SHORT
from server_process import START_LIMIT_S, ServerProcess, wait_until
from streams import StreamAnswer, answers_meanwhile, compare
from test_demo_model import assert_most_are_right
from test_quantized_demo import assert_a_prompt_is_cached
from torch import Tensor

from text_generation_common.gguf.container import ARRAY, TEXT, read_header
from text_generation_common.model_files import demo_directory

WHOLE, REAL, FLAG = 4, 6, 7  # kinds of values in GGUF files
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
NEW_TOKENS = 60
ASKS = [plain(" ".join(WORDS[i:] + WORDS[:i])[:40], i if i % 2 else None, NEW_TOKENS) for i in range(4)]


def keys_of_the_demo_model() -> dict[str, Any]:
    config, tokenizer, settings = (
        json.loads((demo_directory() / name).read_text())
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
    )
    vocabulary = tokenizer["model"]["vocab"]
    control = {token["id"] for token in tokenizer["added_tokens"]}
    return {
        "general.architecture": (TEXT, "llama"),
        "llama.embedding_length": (WHOLE, config["hidden_size"]),
        "llama.context_length": (WHOLE, config["max_position_embeddings"]),
        "llama.block_count": (WHOLE, config["num_hidden_layers"]),
        "llama.feed_forward_length": (WHOLE, config["intermediate_size"]),
        "llama.attention.head_count": (WHOLE, config["num_attention_heads"]),
        "llama.attention.head_count_kv": (WHOLE, config["num_key_value_heads"]),
        "llama.attention.layer_norm_rms_epsilon": (REAL, config["rms_norm_eps"]),
        "llama.rope.dimension_count": (WHOLE, config["head_dim"]),
        "llama.rope.freq_base": (REAL, config["rope_parameters"]["rope_theta"]),
        "tokenizer.ggml.model": (TEXT, "gpt2"),
        "tokenizer.ggml.pre": (TEXT, "starcoder"),  # single digits, then words as GPT-2 cuts them
        "tokenizer.ggml.tokens": (ARRAY, (TEXT, sorted(vocabulary, key=vocabulary.__getitem__))),
        "tokenizer.ggml.token_type": (ARRAY, (WHOLE, [3 if id in control else 1 for id in range(len(vocabulary))])),
        "tokenizer.ggml.merges": (ARRAY, (TEXT, [" ".join(merge) for merge in tokenizer["model"]["merges"]])),
        "tokenizer.ggml.bos_token_id": (WHOLE, config["bos_token_id"]),
        "tokenizer.ggml.eos_token_id": (WHOLE, config["eos_token_id"]),
        "tokenizer.ggml.add_bos_token": (FLAG, True),
        "tokenizer.chat_template": (TEXT, settings["chat_template"]),
    }


def write_demo(path: Path, eight_bits: bool = True) -> None:
    """The demo model as a converter writes it. `eight_bits`: the weights of the MLPs are Q8_0."""
    tensors: dict[str, Any] = {}
    for name, tensor in load_file(demo_directory() / "model.safetensors").items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        if name.endswith(("attn_q.weight", "attn_k.weight")):  # rows that are turned together become neighbours
            tensor = tensor.view(-1, 2, 16, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        is_coded = eight_bits and tensor.dim() > 1 and ".ffn_" in name
        tensors[name] = q8_0(tensor) if is_coded else tensor.float() if tensor.dim() == 1 else tensor
    write_gguf(path, keys_of_the_demo_model(), tensors)
    path.chmod(0o400)


def q8_0(weight: Tensor) -> tuple[str, list[int], bytes]:
    blocks = weight.float().view(*weight.shape[:-1], -1, 32)
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    codes = (blocks / scales.float()).round().clamp(-127, 127).to(torch.int8)
    return (
        "Q8_0",
        list(weight.shape),
        torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], -1).numpy().tobytes(),
    )


def on_the_hub(hub: FakeHub, file: Path, home: Path, *flags: str) -> EngineProcess:
    """An engine with the file, which is one of two in a repository."""
    hub.models["org/demo"] = Model({"main": {file.name: file.read_bytes(), "demo-Q8_0.gguf": b"another"}})
    environ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "FAILPOINTS": SLOWER}
    return EngineProcess("--model-id", "org/demo:Q4_K_M", "--insecure-cluster", "--testing", *flags, environ=environ)


def header_of(file: Path, copy: Path) -> Path:
    """Writes a file of the same size that has the header, and a hole in the place of the weights."""
    header = min(tensor.offset for tensor in read_header(file).tensors.values())
    copy.write_bytes(file.read_bytes()[:header])
    os.truncate(copy, file.stat().st_size)
    return copy


@pytest.mark.parametrize("num_shard", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_file_of_the_hub_is_served_by_two_replicas_and_a_front_with_its_header_and_no_stream_notices_a_kill(
    tmp_path: Path, num_shard: int
) -> None:
    file, home = tmp_path / "demo-Q4_K_M.gguf", tmp_path / "home"
    write_demo(file)
    flags = "--model-id", str(header_of(file, tmp_path / "header")), "--insecure-cluster", *SHORT.arguments
    with running_hub() as hub:
        first, second = (on_the_hub(hub, file, home, "--num-shard", str(num_shard)) for _ in range(2))
        with first, ServerProcess("--engines", f"{first.address},{second.address}", *flags) as front:
            assert_most_are_right(front, sum_question, 12, 10)
            alone, _ = streams_though_a_shard_is_killed(front, ASKS, num_shard - 1, first)
            assert_a_prompt_is_cached(front)
            with second:
                killed = kill_a_shard_and_an_engine_of_two(front, first, second)
        assert compare([alone[answer.ask] for answer in killed], killed).failures() == []
    assert hub.gets(file.name) == [None] and not hub.gets("demo-Q8_0.gguf")
    sizes = [path.stat().st_size for path in home.rglob("*") if path.is_file() and not path.is_symlink()]
    assert max(sizes) == file.stat().st_size and sum(sizes) < file.stat().st_size + 2**16  # no other copy


def kill_a_shard_and_an_engine_of_two(
    front: ServerProcess, first: EngineProcess, second: EngineProcess
) -> list[StreamAnswer]:
    """The answers of two replicas, of which the second one loses a shard, and then the first one its engine. Streams
    are asked for again and again until both have some: engines tell a front their loads only a few times a second."""
    replicas, found = (first, second), list[StreamAnswer]()

    def have_rows() -> bool:
        return all(metric(f"http://127.0.0.1:{each.port}", "tgi_batch_current_size") for each in replicas)

    def kill(victim: psutil.Process) -> None:
        wait_until(have_rows, START_LIMIT_S, "both replicas have streams")
        victim.kill()

    for victim in (lambda: processes.shards(second.pid)[0], lambda: processes.engine(first.pid)):
        wait_until(lambda: all(each.is_ready() for each in replicas), START_LIMIT_S, "both replicas serve")
        found += answers_meanwhile(front.url, ASKS, partial(kill, victim()), settled_s=0)
    return found
