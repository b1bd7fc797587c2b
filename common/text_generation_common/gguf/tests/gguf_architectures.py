"""Small headers of every architecture that is served, of each kind of tokenizer and of ropes, for tests."""

import struct
from typing import Any

from gguf_headers import FIRST, LETTERS, RAW_BYTES, WORDS
from gguf_writer import ALIGNMENT, header

from text_generation_common.gguf.config import ARCHITECTURES, FIELDS, LAYER_NORM
from text_generation_common.gguf.container import ARRAY, BYTE, TEXT
from text_generation_common.gguf.types import TYPES

U32, I32, F32, BOOL = 4, 5, 6, 7
Keys = dict[str, tuple[int, Any]]  # a kind and a value, as `gguf_writer.header` takes them
Entry = tuple[str, list[int], int, int]  # name, shape, type and offset of a tensor

SIZES = {
    "block_count": 2, "context_length": 64, "embedding_length": 16, "feed_forward_length": 64,
    "attention.head_count": 2, "attention.head_count_kv": 2, "attention.key_length": 8, "expert_used_count": 2,
    "final_logit_softcapping": 30.0, "attn_logit_softcapping": 30.0, "logit_scale": 2.0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"expert_count": 4, "expert_feed_forward_length": 32}
WINDOW: dict[str, Any] = {"attention.sliding_window": 20}
YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 16, "yarn_beta_fast": 32.0, "yarn_attn_factor": 1.5}
STRETCHED: dict[str, Any] = {f"rope.scaling.{name}": value for name, value in YARN.items()}
# Keys beside those of `SIZES` that the architecture has; None: the key is not there.
MORE: dict[str, dict[str, Any]] = {
    "llama": {"rope.dimension_count": 8, "attention.value_length": 8, "vocab_size": 12},
    "llama, rope_freqs": {"nextn_predict_layers": 1},
    "llama, experts": {**EXPERTS, "expert_feed_forward_length": None, "expert_used_count": 2},
    "llama, yarn": STRETCHED,
    "mistral3, linear": {"rope.scale_linear": 2.0, "attention.head_count": [2, 2]},
    "qwen2moe": {"expert_count": 4},
    "qwen3moe": {**EXPERTS, "expert_weights_scale": 1.0},
    "phi2": {"rope.dimension_count": 4},
    "phi3": {"rope.dimension_count": 4, "attention.sliding_window": 0},
    "phi3, rope_factors": {"rope.scaling.attn_factor": 1.25, "rope.scaling.original_context_length": 16},
    "granitemoe": {"expert_count": 4},
    "gemma2": WINDOW,
    "gemma2, 27b": {**WINDOW, "block_count": 46, "attention.value_length": 8},
    "gemma3": {**WINDOW, "rope.freq_base_swa": 100.0, "attention.sliding_window_pattern": [True, False]},
    "gemma3, 27b": {**WINDOW, "block_count": 62},
    "olmo2, windows": {**WINDOW, **STRETCHED, "attention.sliding_window_pattern": [True, False]},
    "olmoe": {"expert_count": 4},
    "chatglm": {"rope.dimension_count": 4, "attention.key_length": None},
    "glm4": {"rope.dimension_count": 4},
    "cohere2": {**WINDOW, "attention.sliding_window_pattern": 2},
    "gpt-oss": {**EXPERTS, **WINDOW, **STRETCHED, "expert_gating_func": 1},
    "gptneox": {"rope.dimension_count": 4, "use_parallel_residual": True},
    "starcoder": {"attention.head_count_kv": 1},
    "falcon": {"attention.head_count_kv": 1, "tensor_data_layout": "jploski"},
    "falcon, 40B": {},
    "mpt": {"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 0.0},
}
SHAPES = {
    "token_embd.weight": [12, 16], "output_norm.weight": [16], "blk.0.attn_q.weight": [16, 16],
    "blk.0.ffn_up.weight": [64, 16],
}  # fmt: skip
MORE_SHAPES = {
    "llama, rope_freqs": {"rope_freqs.weight": [4]},
    "phi3, rope_factors": {"rope_factors_short.weight": [4], "rope_factors_long.weight": [4]},
    "qwen2moe": {"blk.1.ffn_down_exps.weight": [4, 16, 32], "blk.1.ffn_down_shexp.weight": [16, 32],
                 "blk.1.ffn_gate_inp_shexp.weight": [16]},
    "falcon, 40B": {"blk.0.attn_norm_2.weight": [16], "blk.0.attn_qkv.bias": [48]},
    "qwen2": {"output.weight": [12, 16], "blk.0.attn_q.bias": [16]},
}  # fmt: skip
NAMES = sorted({*ARCHITECTURES, *MORE})

BYTE_LEVEL = ["!", "a", "b", "Ġ", "Ċ", "1", "ab", "Ġab", "11", "<|im_end|>", "<|end|>", ""]
TOKENS, SCORES, KINDS = map(list, zip(*FIRST, *RAW_BYTES[:3], *WORDS, *LETTERS, strict=True))
OF_PIECES = {"scores": (ARRAY, (F32, SCORES)), "tokens": (ARRAY, (TEXT, TOKENS)), "token_type": (ARRAY, (I32, KINDS))}
TOKENIZERS: tuple[Keys, ...] = (
    {"model": (TEXT, "llama"), **OF_PIECES, "add_space_prefix": (BOOL, True), "eos_token_id": (U32, 2)},
    {
        "model": (TEXT, "gpt2"), "pre": (TEXT, "llama-bpe"), "tokens": (ARRAY, (TEXT, BYTE_LEVEL)),
        "merges": (ARRAY, (TEXT, ["a b", "Ġ ab", "1 1"])), "token_type": (ARRAY, (U32, [1] * 10 + [4, 3])),
        "bos_token_id": (U32, 0), "eot_token_id": (U32, 9), "add_eos_token": (BOOL, False),
    },
    {
        "model": (TEXT, "t5"), **OF_PIECES, "eos_token_id": (U32, 1), "unknown_token_id": (U32, 0),
        "precompiled_charsmap": (ARRAY, (BYTE, [2, 0, 0, 0, 1, 2, 3])), "remove_extra_whitespaces": (BOOL, True),
    },
)  # fmt: skip
OTHERS: Keys = {
    "general.name": (TEXT, "Phi-3 ü"),
    "general.alignment": (U32, ALIGNMENT),
    "general.sampling.temp": (F32, 0.5),
    "general.sampling.top_k": (I32, 20),
    "general.sampling.mirostat": (I32, 1),
    "tokenizer.chat_template": (TEXT, "{{ messages }}"),
    "tokenizer.chat_template.tool_use": (TEXT, "{{ tools }}"),
    "tokenizer.chat_template.odd": (TEXT, "{{ 1 }}"),
}


def typed(value: Any) -> tuple[int, Any]:
    if isinstance(value, list):
        return ARRAY, (typed(value[0])[0], value)
    kinds = {bool: BOOL, int: U32, float: F32, str: TEXT}
    return kinds[type(value)], value


def keys_of(name: str) -> Keys:
    architecture = name.partition(",")[0]
    asked = {*FIELDS.values(), *(fields := ARCHITECTURES[architecture].fields.values()), "block_count"}
    if LAYER_NORM in fields:
        asked.remove(FIELDS["rms_norm_eps"])
    own = {key: SIZES.get(key, 1e-5 if "epsilon" in key else 0.5) for key in sorted(asked)}
    own = {key: value for key, value in {**own, **MORE.get(name, {})}.items() if value is not None}
    tokenizer = TOKENIZERS[NAMES.index(name) % len(TOKENIZERS)]
    return {
        "general.architecture": (TEXT, architecture),
        **{f"{architecture}.{key}": typed(value) for key, value in own.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()},
        **OTHERS,
    }


def entries_of(name: str) -> list[Entry]:
    entries: list[Entry] = [("blk.1.ffn_down.weight", [2, 32], 8, 0)]  # Q8_0
    offset = 96
    for tensor, shape in {**SHAPES, **MORE_SHAPES.get(name, {})}.items():
        entries.append((tensor, shape, 0, offset))
        offset += size_of(shape)
    return entries


def size_of(shape: list[int]) -> int:
    """Bytes that a tensor of float32 takes, to the next one."""
    count = TYPES[0].bytes
    for size in shape:
        count *= size
    return -(-count // ALIGNMENT) * ALIGNMENT


def content_of(keys: Keys, entries: list[Entry], data_bytes: int) -> bytes:
    """A file whose float32 are 1.5."""
    start = header(keys, entries)
    return start + bytes(-len(start) % ALIGNMENT) + struct.pack("<f", 1.5) * (data_bytes // 4)


def data_bytes(entries: list[Entry]) -> int:
    _, shape, _, offset = entries[-1]
    return offset + size_of(shape)
