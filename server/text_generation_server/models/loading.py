"""Reads the weights of one rank: from every tensor only the part that the rank needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.functional import pad

from text_generation_common import faults
from text_generation_common.errors import ModelError
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.names import TensorNames
from text_generation_common.models.tensors import LinearSize, Shape, no_codes, shapes
from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_common.quantized.tensors.splits import (
    inputs_of,
    joined,
    on_outputs,
    on_tensors,
    padded_inputs,
    size_of,
)
from text_generation_common.quantized.tensors.stored import CodesInFile
from text_generation_common.quantized.values import Dense, Weight
from text_generation_common.weights.headers import Stored
from text_generation_server.device.arena import empty, give_back
from text_generation_server.kernels.interface import AdapterMatrices, LinearKernel
from text_generation_server.layers.adapted import AdaptedLinear, VocabularyAdapters
from text_generation_server.layers.linear import LinearOp, RowLinear, make_fused, make_linear
from text_generation_server.layers.vocabulary import pad_rows
from text_generation_server.layers.weights import WeightFormat, dense
from text_generation_server.models.adapters import AdaptedPart, AdapterBank
from text_generation_server.platforms import Platform


class Files(Protocol):
    """A source of a model's tensors, on any device and of any type: see weights.files."""

    bytes_read: int

    @property
    def names(self) -> list[str]: ...

    def describe(self, name: str) -> Stored | None: ...

    def get(self, name: str) -> Tensor: ...

    def get_slice(self, name: str, dim: int, start: int, stop: int) -> Tensor: ...


class PackedLayers(Protocol):
    """The linear layers whose weights are quantized in the files."""

    def tensors(self, layer: str, size: LinearSize) -> Mapping[str, Shape] | None:
        """The names and shapes of the tensors of a layer's weight; None if the files have it as numbers."""
        ...

    def has(self, layer: str) -> bool:
        """Whether the files have a weight of this name as codes."""
        ...

    def weight(self, layer: str) -> Weight | None:
        """The whole weight of a layer, or that of one expert, on any device; None if the files have it as numbers."""
        ...


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Some outputs of a linear layer: rows of a tensor in the files."""

    name: str  # without .weight or .bias
    rows: range
    # The wanted rows of each `group` consecutive rows, in the wanted order. None: all rows.
    picks: list[int] | None = None
    group: int = 1

    @property
    def count(self) -> int:
        """Number of the wanted rows."""
        return len(self.rows) if self.picks is None else len(self.rows) // self.group * len(self.picks)


def stacked(*layers: tuple[str, int, range]) -> list[LayerPart]:
    """The wanted outputs of layers of the same input: (name, number of all its outputs, wanted outputs). Layers of the
    same name lie one after the other in one tensor."""
    parts, ends = [], dict[str, int]()
    for name, size, wanted in layers:
        start = ends.get(name, 0)
        ends[name] = start + size
        parts.append(LayerPart(name, range(start + wanted.start, start + wanted.stop)))
    return parts


class Loader:
    """Loads tensors onto the device, in the model's type. Gives a sign of life after each tensor."""

    def __init__(
        self,
        files: Files,
        platform: Platform,
        dtype: torch.dtype,
        on_tensor: Callable[[], None],
        weight_format: WeightFormat = dense,
        transposed: bool = False,
        packed: PackedLayers | None = None,
        head_format: WeightFormat | None = None,
        adapters: AdapterBank | None = None,
    ) -> None:
        """`weight_format` is that of linear layers; embedding and head keep the files'. `head_format`: that of a copy
        of the head's weight. `transposed`: the files have
        the weights of linear layers as [inputs, outputs]. `packed`: the layers of which the files have codes instead.
        """
        self.num_tensors = 0
        self.dtype = dtype
        self.adapters = adapters or AdapterBank()
        self._files = files
        self._platform = platform
        self._on_tensor = on_tensor
        self._weight_format = weight_format
        self._transposed = transposed
        self._packed = packed
        self._head_format = head_format
        self._half = max(1, len(files.names) // 2)

    @property
    def is_dense(self) -> bool:
        """Whether linear layers keep their weights as they are."""
        return self._weight_format is dense

    def has(self, layer: str) -> bool:
        return self._files.describe(f"{layer}.weight") is not None or self.has_codes(layer)

    def has_codes(self, layer: str) -> bool:
        return self._packed is not None and self._packed.has(layer)

    def keeps_float16(self, layer: str) -> bool:
        """Whether a linear layer's weight is float16 and stays so in a model that computes in bfloat16, which has fewer
        digits: the products of CPUs widen it."""
        stored = self._files.describe(self._stored_name(layer))
        is_half = stored is not None and stored.type == TYPE_OF[torch.float16]
        return is_half and self.dtype == torch.bfloat16 and self._platform.device.type == "cpu"

    def whole(self, name: str, factor: float = 1.0) -> Tensor:
        return _multiplied(self._place(self._files.get(name)), factor)

    def rows(self, name: str, part: range) -> Tensor:
        """The `part` of the first dimension: some outputs of a weight, or a piece of a bias."""
        return self._place(self._files.get_slice(name, 0, part.start, part.stop))

    def numbers(self, layer: str) -> Tensor:
        """The weight of a small layer, which is kept as numbers even if the files have codes."""
        packed = self._packed_weight(layer)
        return self.whole(f"{layer}.weight") if packed is None else exact_weight(packed).to(self.dtype)

    def table(self, layer: str, rows: range, count: int) -> Weight:
        """Rows of the embedding or the head, in the form of the files, and zeros until there are `count`."""
        packed = self._packed_rows(layer, rows)
        weight = Dense(self._part(layer, 0, rows)) if packed is None else packed
        return on_outputs(weight, lambda numbers: pad_rows(numbers, count))

    def head(self, table: Weight) -> Weight:
        """The weight by which the head multiplies: the table itself, or a copy in another form."""
        return table if self._head_format is None else self._head_format(exact_weight(table))

    def columns(self, name: str, part: range) -> Tensor:
        """The `part` of the second dimension: some inputs of a weight."""
        # Copied, because the slice is a view of the mapped file, and each of its rows would keep whole pages in use.
        return self._place(self._files.get_slice(name, 1, part.start, part.stop)).contiguous()

    def fused(self, parts: Sequence[LayerPart], has_bias: bool, gated: bool = False, multiple: int = 1) -> LinearOp:
        """One product for several layers with the same input, each with this rank's part of its outputs. Zeros follow
        the outputs of each layer until they are a `multiple`."""
        weights = self.outputs(parts, multiple)
        bias = torch.cat(self._biases(parts, multiple)) if has_bias else None
        linear = make_fused(self._platform.kernels, weights, bias, gated=gated, x_type=self.dtype)
        return self.adapted(linear, [_adapted_part(part, multiple) for part in parts])

    def adapted(self, linear: LinearKernel, parts: Sequence[AdaptedPart]) -> LinearOp:
        """The layer itself if no adapter changes it."""
        if (matrices := self.matrices_of(parts)) is None:
            return linear
        return AdaptedLinear(self._platform.kernels, linear, matrices, self.adapters.of_step)

    def matrices_of(self, parts: Sequence[AdaptedPart], experts: int = 0) -> AdapterMatrices | None:
        """What adapters add to a layer, or to a product of `experts` experts; None if nothing."""
        dtype, device = self.dtype, self._platform.device
        if experts:
            return self.adapters.experts(parts, experts, dtype, device)
        return self.adapters.linear(parts, dtype, device, self._files.get)

    def vocabulary_adapters(self, names: TensorNames, hidden: int, rows: range, count: int) -> VocabularyAdapters:
        """`rows`: this rank's rows of the head, with zeros until there are `count`. All ranks have all embeddings."""
        bank, dtype, device = self.adapters, self.dtype, self._platform.device
        head = AdaptedPart(names.head, count, lambda up: pad_rows(up[rows.start : rows.stop], count))
        in_files = names.head if self.has(names.head) else names.embedding
        return VocabularyAdapters(
            self._platform.kernels,
            bank.table(names.embedding, hidden, dtype, device, self._dense),
            bank.head(head, dtype, device, self._dense, in_files),
        )

    def _dense(self, name: str) -> Tensor:
        """A tensor of the files. ModelError if the files have codes in its place."""
        if self._files.describe(name) is None or self.has_codes(name.rpartition(".")[0]):
            raise ModelError(
                f"an adapter brings a tensor {name}, which cannot be compared with the codes of the model's"
            )
        return self._files.get(name)

    def outputs(self, parts: Sequence[LayerPart], multiple: int = 1) -> list[Weight]:
        """The weights of `fused`: one, if their forms are the same."""
        return [self._formed(weight) for weight in joined(self._weights(parts, multiple))]

    def _weights(self, parts: Sequence[LayerPart], multiple: int) -> list[Weight]:
        ranges = dict.fromkeys((part.name, part.rows) for part in parts)  # parts of the same rows are read once
        read = {(name, rows): self._outputs(name, rows) for name, rows in ranges}
        return [
            on_outputs(read[part.name, part.rows], partial(_picked, part=part, multiple=multiple)) for part in parts
        ]

    def _biases(self, parts: Sequence[LayerPart], multiple: int) -> list[Tensor]:
        return [_picked(self.rows(f"{part.name}.bias", part.rows), part, multiple) for part in parts]

    def _formed(self, weight: Weight) -> Weight:
        return self._weight_format(weight.values) if isinstance(weight, Dense) else weight

    def _outputs(self, layer: str, rows: range) -> Weight:
        packed = self._packed_rows(layer, rows)
        return Dense(self._linear(layer, 0, rows)) if packed is None else packed

    def _inputs(self, layer: str, part: range) -> Weight:
        packed = self._packed_weight(layer)
        return Dense(self._linear(layer, 1, part)) if packed is None else inputs_of(packed, part)

    def _linear(self, layer: str, dim: int, part: range) -> Tensor:
        """The `part` of a dimension of a linear layer's weight [N, K], or of the weight of one expert."""
        if "[" in layer:
            return self._of_expert(layer, dim, part)
        return self._part(layer, 1 - dim, part).t().contiguous() if self._transposed else self._part(layer, dim, part)

    def _part(self, layer: str, dim: int, part: range) -> Tensor:
        """The `part` of a dimension of a layer's tensor."""
        found = self._files.get_slice(f"{layer}.weight", dim, part.start, part.stop)
        placed = self._place(found, found.dtype if self.keeps_float16(layer) else None)
        # Copied, because a slice of inputs is a view of the mapped file, and each of its rows would keep whole pages.
        return placed.contiguous() if dim else placed

    def _of_expert(self, layer: str, dim: int, part: range) -> Tensor:
        """The same for one expert, of a tensor for all experts."""
        number, name = int(layer.partition("[")[2].removesuffix("]")), self._stored_name(layer)
        found = self._files.get_slice(name, 0, number, number + 1)[0]
        numbers = found if name.endswith(".weight") else found.t()  # see ExpertLayout.turned
        wanted = numbers.narrow(dim, part.start, len(part))
        return self._place(wanted, found.dtype if self.keeps_float16(layer) else None).contiguous()

    def _stored_name(self, layer: str) -> str:
        """The name of the tensor that has the weight of a layer, or of the expert that `expert_name` names."""
        of_all = layer.partition("[")[0]
        return of_all if self._files.describe(of_all) is not None else f"{of_all}.weight"

    def _packed_rows(self, layer: str, rows: range) -> Weight | None:
        packed = self._packed_weight(layer)
        if packed is None or rows == range(size_of(packed)[0]):
            return packed
        # Copied, because a view would keep the whole weight.
        return on_outputs(packed, lambda numbers: numbers[rows.start : rows.stop].clone())

    def _packed_weight(self, layer: str) -> Weight | None:
        if self._packed is None or (weight := self._packed.weight(layer)) is None:
            return None
        if not (isinstance(weight, Dense) or isinstance(weight.q, CodesInFile)):
            give_back()  # what was freed when this weight was unpacked, and the one before was packed
        return on_tensors(weight, lambda tensor: self._place(tensor, tensor.dtype))

    def row_split(
        self, name: str, part: range, has_bias: bool, factor: float = 1.0, multiple: int = 1
    ) -> RowLinear:  # fmt: skip
        """A layer with this rank's part of its inputs, whose result is multiplied by `factor`. Only rank 0 adds the
        bias. Inputs until the next `multiple` are not used."""
        kernels, group = self._platform.kernels, self._platform.group
        bias = self.whole(f"{name}.bias", factor) if has_bias and group.rank == 0 else None
        weight, left = self.inputs(name, part, factor, multiple)
        linear = make_linear(kernels, weight, bias, x_type=self.dtype, factor=left)
        adapted = AdaptedPart(
            name,
            size_of(weight)[0],
            of_up=lambda up: up * factor,
            of_down=lambda down: pad(down[:, part.start : part.stop], (0, -len(part) % multiple)),
            adds_biases=group.rank == 0,
        )
        return RowLinear(self.adapted(linear, [adapted]), group)

    def inputs(self, name: str, part: range, factor: float = 1.0, multiple: int = 1) -> tuple[Weight, float]:
        """The weight of `row_split`, and the factor by which its product is to be multiplied."""
        weight = padded_inputs(self._inputs(name, part), multiple)
        if self.is_dense and isinstance(weight, Dense) and weight.values.dtype == self.dtype:
            return Dense(_multiplied(weight.values, factor)), 1.0
        return self._formed(weight), factor

    def along(self, name: str, dim: int, part: range) -> Tensor:
        """The `part` of a dimension."""
        return self._place(self._files.get_slice(name, dim, part.start, part.stop)).contiguous()

    def empty(self, *shape: int) -> Tensor:
        """A tensor in the model's type, for numbers that are collected or unpacked. Gives a sign of life."""
        self._on_tensor()
        return empty(shape, self.dtype, self._platform.device)

    def _place(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        self.num_tensors += 1
        self._on_tensor()
        if self.num_tensors == self._half:
            faults.point("shard.load")
        return tensor.to(device=self._platform.device, dtype=dtype or self.dtype)


def _adapted_part(part: LayerPart, multiple: int) -> AdaptedPart:
    def of_up(up: Tensor) -> Tensor:
        return _picked(up[part.rows.start : part.rows.stop], part, multiple)

    return AdaptedPart(part.name, part.count + -part.count % multiple, of_up)


def _picked(rows: Tensor, part: LayerPart, multiple: int) -> Tensor:
    if part.picks is not None:
        rows = rows.view(-1, part.group, *rows.shape[1:])[:, part.picks].flatten(0, 1)
    return pad_rows(rows, rows.shape[0] + -rows.shape[0] % multiple)


def _multiplied(weight: Tensor, factor: float) -> Tensor:
    """`weight * factor`, rounded once."""
    return weight if factor == 1 else (weight.float() * factor).to(weight.dtype)


DEVIATION = 0.02
TYPE_OF = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # as safetensors spells them


class DummyFiles:
    """Replaces the weights files of a model. One name and one slice always give the same numbers on the same kind of
    device. The numbers of a slice differ from those of the same part of the whole tensor.
    """

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, codes: PackedLayers | None = None
    ) -> None:
        self.bytes_read = 0  # always 0: no file is read
        self.codes = codes  # codes of layers that have no numbers
        self._device = device
        self._dtype = dtype
        self._shapes = shapes(config, no_codes if codes is None else codes.tensors)

    @property
    def names(self) -> list[str]:
        return sorted(self._shapes)

    def describe(self, name: str) -> Stored | None:
        return Stored(TYPE_OF[self._dtype], self._shapes[name]) if name in self._shapes else None

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
