"""The keys of one architecture in a GGUF file, and what its tensors say beside them. Notes which keys are asked for."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from text_generation_common.errors import ModelError
from text_generation_common.gguf.container import LENGTH, GgufArray, GgufHeader, shown

# Keys without effect on what is computed, or which repeat what tensors say.
HARMLESS = frozenset(
    {"context_length", "expert_shared_count", "leading_dense_block_count", "pooling_type", "rope.scaling.finetuned",
     "rope.scaling.original_context_length", "rope.scaling.yarn_ext_factor", "tensor_data_layout", "vocab_size"}
)  # fmt: skip
# Values with which a key changes nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "expert_gating_func": (1,),  # a softmax
    "expert_weights_scale": (1.0,),
    "rope.scale_linear": (1.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.type": ("none",),
}


MAX_LAYERS = 2**12


class Keys:
    """Reads the keys whose names begin with that of the architecture. In the place of a list, which has a value for
    each layer, it takes the only value that occurs."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.architecture = header.text("general.architecture")
        self._asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """A number, a flag or a text, for fields of config.json, which the families' readers check. Code that computes
        with a value takes `whole`, `size` or `number`. The default without the key."""
        return self._single(name).metadata.get(self._key(name), default)

    def whole(self, name: str, default: int | None = None) -> int:
        return self._single(name).whole(self._key(name), default)

    def size(self, name: str) -> int:
        """A whole number that something may be divided by."""
        if (value := self.whole(name)) < 1:
            raise self.header.error(f"{shown(self._key(name))} is {value}, and must be at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        return self._single(name).number(self._key(name), default)

    def each(self, name: str) -> list[Any] | None:
        """The elements of a list; None if there is none."""
        self._asked.add(name)
        array = self.header.metadata.get(self._key(name))
        if not isinstance(array, GgufArray):
            return None
        if array.size > MAX_LAYERS * LENGTH.size:
            raise self.header.error(f"{shown(self._key(name))} has {array.count} values, more than models have layers")
        return array.values()

    def note(self, *names: str) -> None:
        self._asked.update(names)

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def in_layers(self, ending: str) -> list[int]:
        """The numbers of the layers that have a tensor with this ending."""
        names = self.header.tensors
        return [layer for layer in range(self.layers) if f"blk.{layer}.{ending}" in names]

    @property
    def layers(self) -> int:
        """How many layers there are, without those at the end that only predict further tokens."""
        count, further = self.whole("block_count"), self.whole("nextn_predict_layers", 0)
        if not 0 < count - further <= MAX_LAYERS:
            raise self.header.error(f"{shown(self._key('block_count'))} is {count}")
        return count - further

    def refuse_others(self) -> None:
        """ModelError for the first key that nothing has asked for, and that may change what is computed."""
        for name, value in self._others():
            is_neutral = value in NEUTRAL.get(name, ()) or value in (0, "") or value is False
            if isinstance(value, GgufArray) or not is_neutral:
                text = "a list" if isinstance(value, GgufArray) else shown(str(value))
                raise ModelError(
                    f"{self._where(name)} is {text}, which is not supported: choose a model without this key, or the"
                    " same model in safetensors"
                )

    def _single(self, name: str) -> GgufHeader:
        """The header in which the key has a single value."""
        if (values := self.each(name)) is None:
            return self.header
        different = set(values)
        if len(different) != 1:
            raise ModelError(
                f"{self._where(name)} differs between layers, which is not supported: choose another model"
            )
        return replace(self.header, metadata={self._key(name): different.pop()})

    def _others(self) -> Iterator[tuple[str, Any]]:
        start = f"{self.architecture}."
        for key, value in self.header.metadata.items():
            name = key.removeprefix(start)
            if key.startswith(start) and name not in self._asked and name not in HARMLESS:
                yield name, value

    def _key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def _where(self, name: str) -> str:
        return f"{self.header.path}: the key {shown(self._key(name))}"
