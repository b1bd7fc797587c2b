"""Refuses weights that are stored in a quantized format, which it recognises by config.json, by the types of tensors or
by their names.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from text_generation_common import quantization
from text_generation_common.errors import WeightsError

SERVED_TYPES = frozenset({"BF16", "F16", "F32", "F64"})
# Types in which quantized weights are stored: safetensors' names, and torch's names for them.
TYPE_NAMES: Mapping[str, str] = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BOOL": "bool",
    "C64": "complex64",
}

# Names of tensors that hold quantized weights or belong to them, and the formats that have such tensors.
QUANTIZED_NAMES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"\.(qweight|qzeros|scales)$", "gptq or awq"),
        (r"\.g_idx$", "gptq"),
        (r"\.weight_(packed|shape|zero_point|g_idx|global_scale)$", "compressed-tensors"),
        (r"\.(SCB|weight_format|absmax|quant_map|nested_absmax|nested_quant_map)$", "bitsandbytes"),
        (r"\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+)$", "bitsandbytes"),
        (r"_(blocks|scales)$", "mxfp4"),
        (r"scale_inv$", "fp8"),
        (r"[._](k_scale|v_scale|q_scale|prob_scale)$", "a quantized KV cache"),
        (r"(^|[._])scale$", "fp8 or compressed-tensors"),
    )
)

# Buffers that old versions of transformers saved. They are computed from config.json instead.
BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|(attn|attention|self_attention)\.(bias|masked_bias))$"
)
_INSTEAD = "choose the same model with unquantized weights"


def refuse_quantized(path: Path, config: Mapping[str, Any]) -> None:
    """Refuses the model with WeightsError if config.json, or a file beside it, names a format that we do not serve."""
    if reason := quantization.refusal(path, config):
        raise WeightsError(reason)


def refuse_quantized_tensors(file: Path, types: Mapping[str, str], served: str | None = None) -> None:
    """Refuses tensors that only quantized weights have: WeightsError for the first. `types` are spelled as in
    safetensors. Tensors of bytes with names of the format `served` are accepted.
    """
    for name, type in sorted(types.items()):
        if BUFFERS.search(name):
            continue
        formats = [format for pattern, format in QUANTIZED_NAMES if pattern.search(name)]
        if served in formats and type == "U8":
            continue
        if formats:
            raise WeightsError(
                f"{file}: the tensor {ascii(name)[1:-1]} belongs to weights quantized as {formats[0]}, which is not"
                f" supported yet: {_INSTEAD}"
            )
        if type not in SERVED_TYPES:
            called = TYPE_NAMES.get(type, ascii(type)[1:-1])
            raise WeightsError(
                f"{file}: the tensor {ascii(name)[1:-1]} is stored as {called}, which is not supported yet: {_INSTEAD}"
            )
