"""The attention function that transformers calls, in every layer of every model that it computes here.

A trial before serving, or a step, decides what the function does. Some models do not pass unknown arguments on to their
attention, so the function finds its `Attend` in a context variable.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor

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
    return _current.get()(AttentionCall(module, query, key, value, attention_mask, scale, options)), None
