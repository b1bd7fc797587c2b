"""How the tensors of a layer are stored, and which layers of a checkpoint are stored so. No input or output."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from text_generation_common.quantized.patterns import Names


class Packing(StrEnum):
    """Formats of a layer's tensors."""

    gptq = "gptq"  # zero points are stored minus 1
    gptq_v2 = "gptq_v2"
    awq = "awq"
    packed = "pack-quantized"
    int8 = "int-quantized"
    fp8 = "fp8"
    bnb4 = "bitsandbytes in 4 bits"
    bnb8 = "bitsandbytes in 8 bits"
    mxfp4 = "mxfp4"  # gpt-oss's experts
    mxfp4_packed = "mxfp4-pack-quantized"
    nvfp4 = "nvfp4-pack-quantized"
    nvfp4_modelopt = "NVFP4 of ModelOpt"


@dataclass(frozen=True, slots=True)
class Scheme:
    packing: Packing
    bits: int = 4
    group_size: int | None = None  # inputs with the same scale; None: all inputs of an output
    block: tuple[int, int] | None = None  # outputs and inputs with the same scale
    symmetric: bool = True  # in compressed-tensors: whether a layer may lack zero points; in others: what settings say
    act_order: bool = False  # what the settings of GPTQ say; g_idx decides

    def groups(self, inputs: int) -> int:
        """How many groups the inputs of one output have."""
        return 1 if self.group_size is None else -(-inputs // self.group_size)


@dataclass(frozen=True, slots=True)
class SchemeRule:
    names: Names
    scheme: Scheme | None


@dataclass(frozen=True, slots=True)
class Description:
    """What a checkpoint says of its weights. A module has the scheme that is named for it, or of the first rule for
    its name, or the default. None: it is not quantized."""

    method: str  # for messages, such as `gptq` or `compressed-tensors`
    default: Scheme | None
    rules: tuple[SchemeRule, ...] = ()
    named: Mapping[str, Scheme | None] = field(default_factory=dict)
    # What the settings ask for beyond the weights, and has no effect, for the log.
    passed_over: tuple[str, ...] = ()

    def scheme(self, module: str) -> Scheme | None:
        """The scheme of a module, by its name in the files."""
        if module in self.named:
            return self.named[module]
        return next((rule.scheme for rule in self.rules if rule.names(module)), self.default)
