"""A decode step with a static cache: contiguous keys and values, one batch that never changes, greedy.

Compiled whole and replayed as a graph, it is what a decode step may cost at best with torch alone. It answers no
requests.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_benchmark.shapes import LlamaShape


class StaticLayer(torch.nn.Module):
    """Weights and static cache of a layer. They are buffers, because a recorded graph copies all other tensors before
    it runs."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    cache: Tensor

    def __init__(self, shape: LlamaShape, rows: int, length: int, numbers: Callable[..., Tensor]) -> None:
        super().__init__()
        self._split = [shape.heads, shape.kv_heads, shape.kv_heads]
        self._head_size = shape.head_size
        self.register_buffer("qkv", numbers(sum(self._split) * shape.head_size, shape.hidden))
        self.register_buffer("out", numbers(shape.hidden, shape.heads * shape.head_size))
        self.register_buffer("gate_up", numbers(2 * shape.intermediate, shape.hidden))
        self.register_buffer("down", numbers(shape.hidden, shape.intermediate))
        self.register_buffer("cache", numbers(2, rows, shape.kv_heads, length, shape.head_size))

    def forward(self, x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        rows = x.shape[0]
        q, k, v = torch.split(F.linear(normed(x), self.qkv).view(rows, -1, self._head_size), self._split, dim=1)
        for part, states in zip(self.cache, (turned(k, cos, sin), v), strict=True):
            part.index_copy_(2, position, states.unsqueeze(2))
        queries = turned(q, cos, sin).unsqueeze(2)
        attended = F.scaled_dot_product_attention(queries, self.cache[0], self.cache[1], mask, enable_gqa=True)
        x = x + F.linear(attended.reshape(rows, -1), self.out)
        gate, up = F.linear(normed(x), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)


class StaticLoop(torch.nn.Module):
    """A Llama's decode step over a static cache, greedy, written for torch.compile."""

    embedding: Tensor
    head: Tensor
    angles: Tensor

    def __init__(self, shape: LlamaShape, rows: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()

        def numbers(*of: int) -> Tensor:
            return torch.randn(of, device=device, dtype=dtype) * 0.02

        self.register_buffer("embedding", numbers(shape.vocabulary, shape.hidden))
        self.register_buffer("head", numbers(shape.vocabulary, shape.hidden))
        half = torch.arange(shape.head_size // 2, device=device)
        self.register_buffer("angles", torch.outer(torch.arange(length, device=device), half).to(dtype))
        self.layers = torch.nn.ModuleList(StaticLayer(shape, rows, length, numbers) for _ in range(shape.layers))

    def forward(self, ids: Tensor, position: Tensor) -> Tensor:
        """The next ids after `ids`, all of which lie at `position`."""
        x = F.embedding(ids, self.embedding)
        cos, sin = self.angles[position].cos(), self.angles[position].sin()
        mask = (torch.arange(len(self.angles), device=ids.device) <= position).view(1, 1, 1, -1)
        for layer in self.layers:
            x = layer(x, position, cos, sin, mask)
        return F.linear(normed(x), self.head).argmax(dim=-1)


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), None, 1e-5)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
