"""The attention function that transformers calls in every layer, and three trials before serving, which find out what
each layer asks of it, and refuse models that would be computed wrongly.

A trial or a step decides what the function does. Some models do not pass unknown arguments on to their attention, so
the function finds its `Attend` in a context variable.

In the first trial transformers makes its attention masks, which steps do without: a mask must be causal, perhaps with a
window. In the other trials a token stands beside the same and beside other tokens, at one position, and attention
returns zeros. If its results differ, the model does not use the positions that it is given, or tokens meet outside of
attention.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from text_generation_common.errors import ModelError
from text_generation_server.kernels.interface import AttentionOptions

NAME = "tgi_slots"  # name of the attention function in transformers


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of one call: queries [1, H, T, D], keys [1, G, T, D] and values [1, G, T, D']."""

    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    options: Mapping[str, Any]

    @property
    def layer(self) -> int | None:
        return getattr(self.module, "layer_idx", None)


Attend = Callable[[AttentionCall], Tensor]  # returns [1, T, H, D']
_current: ContextVar[Attend] = ContextVar("attend")


def register() -> None:
    """Makes the function known to transformers. A second call has no effect."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Within this context, every attention that transformers computes is `attend`."""
    token = _current.set(attend)
    try:
        yield
    finally:
        _current.reset(token)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _current.get()(
        AttentionCall(
            module=module, query=query, key=key, value=value, mask=attention_mask, scale=scale, options=options
        )
    ), None


TOKENS = 4
# Arguments of an attention that a rule has, that do not change its result, or that say again what the mask says.
KNOWN = {
    *("s_aux", "softcap"),
    *("cache_position", "dropout", "position_embeddings", "position_ids", "return_dict", "sliding_window", "use_cache"),
    *("output_attentions", "output_hidden_states", "output_router_logits"),
}


@dataclass(frozen=True, slots=True)
class LayerRule:
    """What one layer asks of its attention."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    options: AttentionOptions

    @property
    def size(self) -> int:
        """Numbers of a head in the cache, where keys and values have the same size."""
        return max(self.key_size, self.value_size)


class Probe:
    """Attends to nothing, and notes each call."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def __call__(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        _, heads, tokens, _ = call.query.shape
        return call.value.new_zeros(1, tokens, heads, call.value.shape[-1])


def probe(
    model_type: str, base: Any, num_layers: int, max_total_tokens: int, device: torch.device
) -> tuple[list[LayerRule], Any]:
    """The rule of each layer, and what the base returned in the first trial, whose tokens are 0, at positions from 0.
    ModelError if the model would be computed wrongly for texts of up to `max_total_tokens` tokens."""

    def run(ids: list[int], positions: list[int]) -> tuple[list[AttentionCall], Any]:
        trial = Probe()
        with attending(trial):
            return trial.calls, run_base(base, *torch.tensor([ids, positions], dtype=torch.int32, device=device))

    with _masks_made(max_total_tokens) as windows:
        calls, output = run([0] * TOKENS, list(range(TOKENS)))
    if [call.layer for call in calls] != list(range(num_layers)):
        raise refused(model_type, f"its attention is not called once for each of its {num_layers} layers, in order")
    rules = [_rule(model_type, call, windows, max_total_tokens) for call in calls]
    same = _states(*run([0] * TOKENS, [1] * TOKENS))
    mixed = _states(*run([1, 2, 3, 0], [2, 3, 0, 1]))
    if not all(map(_rows_equal, (torch.cat([a, b[-1:]]) for a, b in zip(same, mixed, strict=True)))):
        raise refused(model_type, "tokens meet outside of its attention, or it has positions of its own")
    return rules, output


def _states(calls: list[AttentionCall], output: Any) -> list[Tensor]:
    """All that the trial has seen of each token: queries, keys and values of the layers, and the hidden states."""
    heads = [state[0].transpose(0, 1).flatten(1) for call in calls for state in (call.query, call.key, call.value)]
    return [*heads, output.last_hidden_state[0]]


def run_base(base: Any, ids_T: Tensor, positions_T: Tensor) -> Any:
    """What the base of a model returns, with its last hidden states [1, T, H]."""
    return base(input_ids=ids_T.long().unsqueeze(0), position_ids=positions_T.long().unsqueeze(0), use_cache=False)


def refused(model_type: str, reason: str) -> ModelError:
    return ModelError(f"models of type {model_type} are not supported: {reason}")


@contextmanager
def _masks_made(longest: int) -> Iterator[list[tuple[Tensor, int | None]]]:
    """Within this context, transformers makes masks. The list gets, for each mask, how many tokens the last of
    `longest` tokens sees, or None if the mask is not causal."""
    from transformers.masking_utils import AttentionMaskInterface

    made: list[tuple[Tensor, int | None]] = []

    def note(*_: Any, mask_function: Callable[..., Tensor], device: torch.device, **__: Any) -> Tensor:
        mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device=device)
        made.append((mask, seen(mask_function, longest)))
        return mask

    AttentionMaskInterface.register(NAME, note)
    try:
        yield made
    finally:
        AttentionMaskInterface._global_mapping.pop(NAME)  # the class has no public way to remove a function


def seen(visible: Callable[..., Tensor], longest: int) -> int | None:
    """How many tokens the last of `longest` tokens sees. None unless every token sees as many, or all if there are
    fewer, and none after itself. Looks at some tokens."""
    first = torch.zeros((), dtype=torch.long)
    keys = torch.arange(longest + 1)

    def seen_by(query: int) -> Tensor:
        return visible(first, first, torch.tensor(query), keys).expand(longest + 1)

    try:
        window = int(seen_by(longest - 1).sum())
        for query in {0, longest // 3, longest // 2, max(0, longest - 2), longest - 1}:
            expected = (keys <= query) & (keys > query - window)
            if not torch.equal(seen_by(query), expected):
                return None
    # The mask is one of this trial's tokens only, such as of blocks of images, and cannot be made for other tokens.
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None
    return window


def _rule(model_type: str, call: AttentionCall, windows: list[tuple[Tensor, int | None]], longest: int) -> LayerRule:
    for name, value in call.options.items():
        if name not in KNOWN and value is not None and not (name == "is_causal" and value is True):
            raise refused(model_type, f"its attention has the argument {name}, which is not supported yet")
    window = next((window for mask, window in windows if mask is call.mask), None)
    if window is None:
        raise refused(model_type, "its attention has a mask that is neither causal nor a sliding window")
    (_, heads, _, key_size), (_, kv_heads, _, value_size) = call.query.shape, call.value.shape
    options = AttentionOptions(
        scale=call.scale,
        softcap=_softcap(model_type, call),
        sinks_H=_sinks(model_type, call, heads),
        window=window if window < longest else None,
    )
    rule = LayerRule(heads, kv_heads, key_size, value_size, options)
    if call.key.shape[1] != kv_heads or heads % kv_heads or rule.size % 2:
        raise refused(model_type, f"{heads} heads of {rule.size} numbers cannot share {call.key.shape[1]} keys")
    return rule


def _softcap(model_type: str, call: AttentionCall) -> float | None:
    softcap = call.options.get("softcap")
    if softcap is None:
        return None
    if not isinstance(softcap, int | float) or not 0 < softcap < math.inf:
        raise refused(model_type, "its attention has a softcap that is not a number above 0")
    return float(softcap)


def _sinks(model_type: str, call: AttentionCall, heads: int) -> Tensor | None:
    sinks = call.options.get("s_aux")
    if sinks is None:
        return None
    if not isinstance(sinks, nn.Parameter) or sinks.numel() != heads:
        raise refused(model_type, f"its attention has sinks that are not one parameter for each of {heads} heads")
    return sinks.data.flatten().float()


def _rows_equal(rows: Tensor) -> bool:
    """Whether the rows are the same, but for rounding."""
    tolerance = 1e-3 if rows.dtype == torch.float32 else 5e-2
    rows = rows.float()
    return bool((rows - rows[:1]).abs().max() <= tolerance * rows.abs().max())
