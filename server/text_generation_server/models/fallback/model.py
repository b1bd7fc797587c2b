"""A `Model` whose layers transformers computes, all but their linear layers and their attention, which are ours."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from text_generation_common.errors import ModelError
from text_generation_server.device.arena import zeros
from text_generation_server.kernels.interface import Kernels, KvLayer
from text_generation_server.layers.linear import LinearOp
from text_generation_server.models.fallback.probe import AttentionCall, LayerRule, attending, run_base
from text_generation_server.models.kv_cache import KvShape, MakeTensor, bytes_per_slot, make_kv_cache
from text_generation_server.platforms import Platform
from text_generation_server.step.inputs import StepInput

Angles = tuple[Tensor, Tensor]  # cosine and sine, float32 [L, D / 2]


class KernelLinear(nn.Module):
    """A linear layer of ours in the place of one of transformers'."""

    def __init__(self, linear: LinearOp, dtype: torch.dtype) -> None:
        super().__init__()
        self._linear = linear
        self._dtype = dtype
        self.weight = torch.empty(0, dtype=dtype)  # for models that ask for its type; a product with it fails

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self._dtype:
            raise ModelError(f"a linear layer of {self._dtype} has inputs of {x.dtype}")
        return self._linear(x.reshape(-1, x.shape[-1]).contiguous()).view(*x.shape[:-1], -1)


class LinearOfCodes(nn.Module):
    """Stands for a linear layer of which the files have codes, until one of ours takes its place: transformers loads
    its bias only."""

    def __init__(self, linear: nn.Linear, layer: str) -> None:
        """`layer`: its name in the files."""
        super().__init__()
        self.bias = linear.bias
        self.layer = layer


class GivenHidden(nn.Module):
    """Stands for the base of a model, all but its head, and returns hidden states that it was given."""

    def __init__(self, make_output: Callable[..., Any]) -> None:
        """`make_output`: the class of what the base returns."""
        super().__init__()
        self._make_output = make_output
        self.hidden_TH = torch.empty(0)

    @property
    def decoder(self) -> "GivenHidden":
        """The part of the base that some heads call."""
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._make_output(last_hidden_state=self.hidden_TH.unsqueeze(0))


class ForeignHead:
    """The head of a model, with all that the model does to its logits."""

    def __init__(self, model: Any, given: GivenHidden) -> None:
        """`model` has `given` in the place of its base."""
        self._model = model
        self._given = given

    def __call__(self, hidden_TH: Tensor) -> Tensor:
        """The logits [T, V], float32."""
        self._given.hidden_TH = hidden_TH
        logits: Tensor = self._model(inputs_embeds=hidden_TH.unsqueeze(0), use_cache=False).logits
        return logits[0].float().contiguous()


@dataclass(frozen=True, slots=True)
class FallbackSizes:
    vocab_size: int
    max_total_tokens: int
    dtype: torch.dtype


class FallbackModel:
    """Keeps keys and values, and nothing for a row."""

    bytes_per_row = 0

    def __init__(
        self, base: Any, head: ForeignHead, rules: list[LayerRule], sizes: FallbackSizes, platform: Platform
    ) -> None:
        self.vocab_size = sizes.vocab_size
        self.vocabulary = range(sizes.vocab_size)
        self.dtype = sizes.dtype
        self.max_total_tokens = sizes.max_total_tokens
        self._base = base
        self._head = head
        self._rules = rules
        self._kernels = platform.kernels
        self._device = platform.device
        self._kv_shapes = [KvShape(2 * rule.kv_heads, rule.size) for rule in rules]
        self._unturned = {rule.size: _angle_of_zero(rule.size, platform.device) for rule in rules}

    def bytes_per_slot(self, dtype: torch.dtype) -> int:
        return bytes_per_slot(self._kv_shapes, dtype)

    def one_layer_of_each_kind(self) -> "FallbackModel":
        return self

    def make_cache(self, slots: int, rows: int, dtype: torch.dtype, make: MakeTensor = zeros) -> list[KvLayer]:
        return make_kv_cache(self._kv_shapes, slots, dtype, self._device, make)

    def forward(self, step: StepInput, cache: list[KvLayer], on_layer: Callable[[], None]) -> Tensor:
        attend = SlotAttention(
            kernels=self._kernels, rules=self._rules, unturned=self._unturned, step=step, cache=cache, on_layer=on_layer
        )
        with attending(attend):
            hidden: Tensor = run_base(self._base, step.ids_T, step.positions_T).last_hidden_state
        return hidden[0]

    def logits(self, hidden_TH: Tensor, adapters_T: Tensor | None = None) -> Tensor | None:
        return self._head(hidden_TH)

    def own_logits(self, hidden_TH: Tensor, adapters_T: Tensor | None = None) -> Tensor:
        return self._head(hidden_TH)


class SlotAttention:
    """The attention of one step, in all layers."""

    def __init__(
        self, kernels: Kernels, rules: list[LayerRule], unturned: dict[int, Angles], step: StepInput,
        cache: list[KvLayer], on_layer: Callable[[], None],
    ) -> None:  # fmt: skip
        """`unturned`: the angle of 0, for each size of heads."""
        self._kernels = kernels
        self._rules = rules
        self._unturned = unturned
        self._step = step
        self._cache = cache
        self._on_layer = on_layer
        self._first_T = torch.zeros_like(step.positions_T)

    def __call__(self, call: AttentionCall) -> Tensor:
        assert call.layer is not None  # the trial has seen the layers' numbers
        rule, kv, step, kernels = self._rules[call.layer], self._cache[call.layer], self._step, self._kernels
        heads = [_padded(states[0].transpose(0, 1), rule.size) for states in (call.query, call.key, call.value)]
        qkv = torch.cat(heads, dim=1).to(call.value.dtype).flatten(1)
        # transformers has turned queries and keys already: an angle of 0 leaves them as they are.
        counts, angles = (rule.heads, rule.kv_heads), self._unturned[rule.size]
        q_THD = kernels.rope_and_store_kv(qkv, counts, angles, positions_T=self._first_T, kv=kv, slots_T=step.slots_T)
        out = kernels.attend(
            q_THD,
            kv,
            step.table,
            rows_R=step.rows_R,
            lengths_R=step.lengths_R,
            segments=step.segments,
            options=rule.options,
        )
        self._on_layer()
        return out[:, :, : rule.value_size].unsqueeze(0)


def _angle_of_zero(size: int, device: torch.device) -> Angles:
    return torch.ones(1, size // 2, device=device), torch.zeros(1, size // 2, device=device)


def _padded(states_THD: Tensor, size: int) -> Tensor:
    """Adds zeros to each head until it has `size` numbers: they change neither scores nor sums."""
    missing = size - states_THD.shape[2]
    return F.pad(states_THD, (0, missing)) if missing else states_THD
