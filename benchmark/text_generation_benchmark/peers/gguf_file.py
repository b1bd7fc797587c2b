"""Writes a checkpoint and its tokenizer as one GGUF file in bfloat16: `python gguf_file.py MODEL OUT.gguf`.

Runs in llama.cpp's virtual environment, and imports only `gguf` and packages that `gguf` requires.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint16]  # the bits of bfloat16, a type that numpy does not have
Names = Mapping[str, str]  # from a checkpoint's names to those of a GGUF file

LLAMA_LAYER: Names = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HEAD_NORMS: Names = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
POST_NORMS: Names = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
EXPERTS: Names = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
BLOOM_LAYER: Names = {
    "input_layernorm": "attn_norm",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
BLOOM_OTHERS: Names = {
    "transformer.word_embeddings": "token_embd",
    "transformer.word_embeddings_layernorm": "token_embd_norm",
    "transformer.ln_f": "output_norm",
}


@dataclass(frozen=True)
class PeersNames:
    """What llama.cpp calls a model type and its tensors, and how it expects their numbers."""

    name: str
    layer: Names = field(default_factory=lambda: LLAMA_LAYER)
    layers: str = "model.layers"  # what the names of layers begin with
    others: Names = field(
        default_factory=lambda: {
            "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        }
    )  # fmt: skip
    rotates_neighbours: bool = False  # rows of queries and keys are interleaved
    norms_plus_one: bool = False  # the checkpoint has norm weights minus 1

    def gguf_name(self, name: str) -> str:
        """The tensor's name in a GGUF file. ValueError for a tensor that the architecture does not have."""
        stem, _, kind = name.rpartition(".")
        layer = re.fullmatch(rf"{re.escape(self.layers)}\.(\d+)\.(.+)", stem)
        known = self.layer.get(layer.group(2)) if layer else self.others.get(stem)
        if known is None or kind not in ("weight", "bias"):
            raise ValueError(f"{name}: not a tensor of a plain {self.name}, the only kind that is written as GGUF")
        return f"blk.{layer.group(1)}.{known}.{kind}" if layer else f"{known}.{kind}"


# By the model type of config.json.
ARCHITECTURES = {
    "llama": PeersNames("llama", rotates_neighbours=True),
    "qwen3": PeersNames("qwen3", {**LLAMA_LAYER, **HEAD_NORMS}),
    "qwen3_moe": PeersNames("qwen3moe", {**LLAMA_LAYER, **HEAD_NORMS, **EXPERTS}),
    "gemma3_text": PeersNames("gemma3", {**LLAMA_LAYER, **HEAD_NORMS, **POST_NORMS}, norms_plus_one=True),
    "bloom": PeersNames("bloom", BLOOM_LAYER, "transformer.h", BLOOM_OTHERS),
}


def interleaved(weight: Bits, heads: int) -> Bits:
    """Rows of each head (first half, second half) in the order first, second, first, second …

    transformers rotates dimension i with i + D/2, llama.cpp's Llama rotates 2i with 2i + 1.
    """
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, -1).transpose(0, 2, 1, 3).reshape(weight.shape)


def read_tensors(file: Path) -> Iterator[tuple[str, Bits]]:
    """Name and bits of every tensor of a safetensors file. ValueError unless all are bfloat16."""
    with file.open("rb") as source:
        size = int.from_bytes(source.read(8), "little")
        header: dict[str, Any] = json.loads(source.read(size))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is {entry['dtype']}: only bfloat16 checkpoints are written as GGUF")
        start = entry["data_offsets"][0]
        yield name, np.memmap(file, np.uint16, "r", 8 + size + start, tuple(entry["shape"]))


def read_stacked(file: Path) -> Iterator[tuple[str, Bits]]:
    """`read_tensors` with the experts' tensors of a layer as one tensor [experts, outputs, inputs]."""
    found = dict(read_tensors(file))
    expert = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
    stacks: dict[str, dict[int, Bits]] = {}
    for name, bits in found.items():
        if match := expert.fullmatch(name):
            stacks.setdefault(f"{match.group(1)}.{match.group(3)}", {})[int(match.group(2))] = bits
        else:
            yield name, bits
    for name, parts in stacks.items():
        yield name, np.stack([parts[i] for i in range(len(parts))])


def apart(fused: Bits, heads: int) -> Bits:
    """BLOOM's rows, which are query, key and value of head 0, then of head 1 …, as all queries, all keys, all
    values."""
    return fused.reshape(heads, 3, -1, *fused.shape[1:]).swapaxes(0, 1).reshape(fused.shape)


def add_weights(writer: Any, model: Path, config: dict[str, Any]) -> None:
    architecture = ARCHITECTURES[config["model_type"]]
    query_heads = config.get("num_attention_heads") or config["n_head"]
    rotated = {"q_proj": query_heads, "k_proj": config.get("num_key_value_heads")}
    for name, bits in read_stacked(model / "model.safetensors"):
        of = name.split(".")[-2]
        if architecture.rotates_neighbours and of in rotated:
            bits = interleaved(bits, rotated[of])
        if of == "query_key_value":
            bits = apart(bits, query_heads)
        if bits.ndim == 1 or of == "gate":  # llama.cpp keeps norms, biases and routers in float32
            numbers = (bits.astype(np.uint32) << 16).view(np.float32)
            plus = 1 if architecture.norms_plus_one and of.endswith("norm") else 0
            writer.add_tensor(architecture.gguf_name(name), numbers + np.float32(plus))
            continue
        writer.add_tensor(architecture.gguf_name(name), bits, raw_dtype=gguf.GGMLQuantizationType.BF16)


def rope_theta(config: dict[str, Any]) -> float:
    """The base of rotary embeddings, of full attention where windows have another. ValueError if they are scaled."""
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"], "rope_type": "default"}
    ropes = [rope.get("full_attention", rope), rope.get("sliding_attention", rope)]
    if any(each["rope_type"] != "default" for each in ropes) or config.get("rope_scaling"):
        raise ValueError("only a model without scaled rotary embeddings is written as GGUF")
    theta: float = ropes[0]["rope_theta"]
    return theta


def add_shape(writer: Any, config: dict[str, Any]) -> None:
    """Writes the model's sizes. ValueError for a model type that is not in ARCHITECTURES."""
    if config["model_type"] not in ARCHITECTURES:
        raise ValueError(f"{config['model_type']}: only {', '.join(ARCHITECTURES)} are written as GGUF")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_embedding_length(config["hidden_size"])
    if config["model_type"] == "bloom":
        add_bloom_shape(writer, config)
        return
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def add_bloom_shape(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(2048)  # config.json has none, and ALiBi does not need one
    writer.add_feed_forward_length(4 * config["hidden_size"])
    writer.add_block_count(config["n_layer"])
    writer.add_head_count(config["n_head"])
    writer.add_head_count_kv(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def add_tokenizer(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """A byte-level BPE that splits digits, like the demo model's. llama.cpp adds the start token to every prompt."""
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    writer.add_tokenizer_model("gpt2")
    # llama.cpp's name for this way to split a text: single digits, then GPT-2's pattern
    writer.add_tokenizer_pre("starcoder")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    kinds = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([kinds[i in special] for i in range(len(vocabulary))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)


def main() -> None:
    model, out = Path(sys.argv[1]), sys.argv[2]
    config = json.loads((model / "config.json").read_text())
    known = ARCHITECTURES.get(config["model_type"])
    writer = gguf.GGUFWriter(out, known.name if known else config["model_type"])
    add_shape(writer, config)
    add_tokenizer(writer, json.loads((model / "tokenizer.json").read_text()), config)
    add_weights(writer, model, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
