"""What the modules of an adapter's files change in a model. Their names are those of transformers' modules, and those
of experts have changed between its versions.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from text_generation_common.adapters.config import AdapterConfig
from text_generation_common.models.architecture import ModelConfig, Moe
from text_generation_common.models.names import ExpertLayout, LayerNames
from text_generation_common.models.tensors import LinearSize, linear_sizes

# Words that names of layers have in some files and not in others, which were written without the head, or by another
# version of transformers.
FRONTS = frozenset({"model", "language_model", "transformer", "gpt_neox"})
# The parameters of a module that PEFT wraps one after the other, the first innermost: as its `base_layer`.
OF_EXPERTS, OF_OTHERS = ("gate_up_proj", "down_proj"), ("weight",)
INNER = ".base_layer"
NUMBER = re.compile(r"(?<=[.]experts[.])[0-9]{1,9}(?=[.])")  # the number of an expert
# Names within a layer, as versions 4 and 5 of transformers have them: of routers, and of the parameters of all experts.
ROUTERS = (
    "mlp.gate",
    "mlp.router",
    "block_sparse_moe.gate",
    "block_sparse_moe.router",
    "block_sparse_moe.router.layer",
)
GATE_UPS = ("mlp.experts.gate_up_proj", "block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.input_linear")
DOWNS = ("mlp.experts.down_proj", "block_sparse_moe.experts.down_proj", "block_sparse_moe.output_linear")


class ExpertRole(Enum):
    gate = "gate"
    up = "up"
    down = "down"


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """A product of the experts of a layer that a pair of matrices changes, for one of them or for all."""

    layer: str  # see `expert_layer`
    size: LinearSize  # size of one expert's product
    experts: int  # number of experts of the layer
    expert: int | None = None  # None: the pair has matrices for all experts
    # The product's outputs among those of the pair, as (first, end, step).
    outputs: tuple[int, int, int] = (0, 0, 0)
    of_pair: int = 0  # number of outputs of the pair


def plain_name(layer: str) -> str:
    """A layer's name without words that files with the head have, and those without it lack."""
    return ".".join(word for word in layer.split(".") if word not in FRONTS)


def expert_layer(names: LayerNames, role: ExpertRole) -> str:
    """A name for a product of all experts of a layer, whatever the layout of the files is."""
    return f"{plain_name(names.router)}.experts.{role.value}"


def by_parameters(modules: Iterable[str], config: AdapterConfig) -> dict[str, str]:
    """For each module of an adapter's files the parameter that it stands for, or its own name if it is a layer."""
    wrapped: dict[str, list[str]] = {}
    for module in modules:
        wrapped.setdefault(module.replace(INNER, ""), []).append(module)
    found: dict[str, str] = {}
    for module, wrappers in wrapped.items():
        parameters = OF_EXPERTS if module.endswith(".experts") else OF_OTHERS
        wanted = [f"{module}.{name}" for name in parameters if config.targets(f"{module}.{name}")]
        innermost_first = sorted(wrappers, key=len, reverse=True)
        # Other numbers of wrappers are not ours to name; they are refused as layers that the model has not.
        found |= dict(zip(innermost_first, wanted if len(wanted) == len(wrappers) else innermost_first, strict=True))
    return found


def layer_sizes(config: ModelConfig) -> dict[str, LinearSize]:
    """The linear layers that adapters may change, by their plain names: without experts, embedding and head."""
    found = linear_sizes(config)
    hidden = config.hidden_size
    for _, names, moe in _layers_of_experts(config):
        found[names.router] = LinearSize(moe.experts, hidden, config.biases.experts)
        if moe.shared_size:
            found |= {name: LinearSize(moe.shared_size, hidden) for name in (names.shared_gate, names.shared_up)}
            found[names.shared_down] = LinearSize(hidden, moe.shared_size)
            found[names.shared_score] = LinearSize(1, hidden)
    return {plain_name(name): size for name, size in found.items()}


def routers(config: ModelConfig) -> dict[str, str]:
    """The plain name of each router, by the plain names that adapters have for it."""
    before = config.names if config.converted is None else config.converted.names
    return {
        plain_name(f"{before.layers}.{number}.{name}"): plain_name(names.router)
        for number, names, _ in _layers_of_experts(config)
        for name in ROUTERS
    }


class ExpertModules:
    """What the matrices of modules of experts change, by the modules' plain names."""

    def __init__(self, config: ModelConfig) -> None:
        self._parts = _expert_parts(config)

    def parts(self, module: str) -> list[ExpertPart]:
        """Empty for a module that is not one of experts."""
        number = NUMBER.search(module)
        found = self._parts.get(NUMBER.sub("{}", module), [])
        if number is None:
            return found
        expert = int(number[0])
        return [replace(part, expert=expert) for part in found if expert < part.experts]


def _expert_parts(config: ModelConfig) -> dict[str, list[ExpertPart]]:
    """The parts by plain names, with {} for the number of an expert."""
    before = config.names if config.converted is None else config.converted.names
    found: dict[str, list[ExpertPart]] = {}
    for number, names, moe in _layers_of_experts(config):
        old, block = before.layer(number), plain_name(f"{before.layers}.{number}")
        wide, hidden, count = moe.intermediate_size, config.hidden_size, moe.experts
        sizes = {role: LinearSize(wide, hidden) for role in (ExpertRole.gate, ExpertRole.up)}
        sizes[ExpertRole.down] = LinearSize(hidden, wide)
        gate, up, down = (
            ExpertPart(expert_layer(names, role), size, count, outputs=(0, size.outputs, 1), of_pair=size.outputs)
            for role, size in sizes.items()
        )
        turned = before.experts is ExpertLayout.turned
        halves = [(0, 2 * wide, 2), (1, 2 * wide, 2)] if turned else [(0, wide, 1), (wide, 2 * wide, 1)]
        both = [replace(part, outputs=half, of_pair=2 * wide) for part, half in zip((gate, up), halves, strict=True)]
        found |= {f"{block}.{name}": both for name in GATE_UPS} | {f"{block}.{name}": [down] for name in DOWNS}
        if before.experts is ExpertLayout.apart:
            names_of_one = (old.expert_gate, old.expert_up, old.expert_down)
            found |= {plain_name(name): [part] for name, part in zip(names_of_one, (gate, up, down), strict=True)}
    return found


def _layers_of_experts(config: ModelConfig) -> list[tuple[int, LayerNames, Moe]]:
    if config.moe is None:
        return []
    numbers = filter(config.has_experts, range(config.num_layers))
    return [(number, config.names.layer(number), config.moe) for number in numbers]
