"""Writes a Llama checkpoint and its tokenizer as one GGUF file in bfloat16: `python gguf_file.py MODEL OUT.gguf`.

Runs in llama.cpp's virtual environment, and imports only `gguf` and packages that `gguf` requires.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint16]  # the bits of bfloat16, a type that numpy does not have

LAYER_NAMES = {
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
OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """The tensor's name in a GGUF file. ValueError for a tensor that a plain Llama does not have."""
    stem = name.removesuffix(".weight")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    known = LAYER_NAMES.get(layer.group(2)) if layer else OTHER_NAMES.get(stem)
    if known is None or stem == name:
        raise ValueError(f"{name}: not a weight of a plain Llama, and only plain Llamas are written as GGUF")
    return f"blk.{layer.group(1)}.{known}.weight" if layer else f"{known}.weight"


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


def add_weights(writer: Any, model: Path, config: dict[str, Any]) -> None:
    heads = {"self_attn.q_proj.weight": config["num_attention_heads"]}
    heads["self_attn.k_proj.weight"] = config["num_key_value_heads"]
    for name, bits in read_tensors(model / "model.safetensors"):
        if bits.ndim == 1:  # llama.cpp multiplies by norm weights in float32
            writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
            continue
        rotated = [count for suffix, count in heads.items() if name.endswith(suffix)]
        weight = interleaved(bits, rotated[0]) if rotated else bits
        writer.add_tensor(gguf_name(name), weight, raw_dtype=gguf.GGMLQuantizationType.BF16)


def add_shape(writer: Any, config: dict[str, Any]) -> None:
    """Writes the model's sizes. ValueError unless the model is a plain Llama."""
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"], "rope_type": "default"}
    if config["model_type"] != "llama" or rope["rope_type"] != "default" or config.get("rope_scaling"):
        raise ValueError("only a plain Llama without scaled rotary embeddings is written as GGUF")
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


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
    writer = gguf.GGUFWriter(out, "llama")
    add_shape(writer, config)
    add_tokenizer(writer, json.loads((model / "tokenizer.json").read_text()), config)
    add_weights(writer, model, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
