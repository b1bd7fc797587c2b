"""What --quantize means for a checkpoint: its weights are read as they are, or quantized when they are loaded, or the
flag is refused. As in TGI, a quantized checkpoint needs no flag. Pure."""

from collections.abc import Mapping
from enum import Enum, auto

from text_generation_common.errors import ModelError
from text_generation_common.flags.kinds import Quantize


class Use(Enum):
    as_stored = auto()
    int8_on_load = auto()  # one scale for each output
    int4_on_load = auto()  # one scale for 32 inputs of an output
    fp8_on_load = auto()  # one scale for each output


# By value of the flag: how descriptions of checkpoints begin that it may name. TGI reads AWQ files with gptq, too, and
# its `bitsandbytes` is the one in 8 bits.
STORED: Mapping[Quantize, tuple[str, ...]] = {
    Quantize.awq: ("awq", "auto-round (awq)"),
    Quantize.bitsandbytes: ("bitsandbytes (int8)",),
    Quantize.bitsandbytes_nf4: ("bitsandbytes (nf4)",),
    Quantize.bitsandbytes_fp4: ("bitsandbytes (fp4)",),
    Quantize.compressed_tensors: ("compressed-tensors",),
    Quantize.fp8: ("fp8", "fbgemm_fp8", "modelopt (FP8"),
    Quantize.gptq: ("gptq", "awq", "auto-round"),
}
ON_LOAD: Mapping[Quantize, Use] = {
    Quantize.bitsandbytes: Use.int8_on_load,
    Quantize.eetq: Use.int8_on_load,
    Quantize.fp8: Use.fp8_on_load,
    Quantize.int8: Use.int8_on_load,
    Quantize.int4: Use.int4_on_load,
}
NEVER = frozenset({Quantize.exl2, Quantize.marlin})


def use_of(flag: Quantize | None, method: str | None) -> Use:
    """How a checkpoint is read whose weights are quantized by `method` (`Description.method`; None: not at all).
    ModelError names flag and method, if the flag does not fit."""
    if flag is None:
        return Use.as_stored
    if flag in NEVER:
        raise ModelError(
            f"--quantize {flag} is not supported: choose the model in gptq or awq, and start without --quantize"
        )
    if method is None:
        if flag in ON_LOAD:
            return ON_LOAD[flag]
        raise ModelError(
            f"--quantize {flag} reads weights that are quantized so, and this model's are not quantized: start without"
            " it, or choose a quantized model"
        )
    if method.startswith(STORED.get(flag, ())):
        return Use.as_stored
    raise ModelError(
        f"--quantize {flag} contradicts the model's files, which are quantized as {method}: start without it"
    )
