"""Weights that nobody trained, for measurements: the shapes config.json says, made where they are needed."""

from zlib import crc32

import torch
from torch import Tensor

from text_generation_server.models.config import ModelConfig

DEVIATION = 0.02


class DummyFiles:
    """In place of the files of a Llama's weights. A name and a slice always give the same numbers on the same kind of
    device; those of a slice are not part of the whole tensor's."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.bytes_read = 0  # none: they are made
        self._device = device
        self._dtype = dtype
        self._shapes = shapes(config)

    @property
    def names(self) -> list[str]:
        return sorted(self._shapes)

    def get(self, name: str) -> Tensor:
        return self._make(name, self._shapes[name], name)

    def get_slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        shape = self._shapes[name]
        return self._make(name, (*shape[:dim], stop - start, *shape[dim + 1 :]), f"{name} {dim} {start}")

    def _make(self, name: str, shape: tuple[int, ...], seed: str) -> Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        if name.endswith("norm.weight"):
            return tensor.fill_(1)
        return tensor.normal_(std=DEVIATION, generator=torch.Generator(self._device).manual_seed(crc32(seed.encode())))


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of all tensors of a Llama, by name."""
    hidden, wide = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    linears = {
        "self_attn.q_proj": (queries, hidden, config.attention_bias),
        "self_attn.k_proj": (keys, hidden, config.attention_bias),
        "self_attn.v_proj": (keys, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, queries, config.attention_bias),
        "mlp.gate_proj": (wide, hidden, config.mlp_bias),
        "mlp.up_proj": (wide, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, wide, config.mlp_bias),
    }
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = (config.vocab_size, hidden)
    found["model.norm.weight"] = (hidden,)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        for name, (outputs, inputs, has_bias) in linears.items():
            found[f"{layer}.{name}.weight"] = (outputs, inputs)
            if has_bias:
                found[f"{layer}.{name}.bias"] = (outputs,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}.{name}.weight"] = (hidden,)
    return found
