"""--quantize means what TGI's table says."""

import pytest

from text_generation_common.errors import ModelError
from text_generation_common.flags.kinds import Quantize
from text_generation_common.quantized.agreement import Use, use_of

METHODS = [
    "gptq", "awq", "auto-round", "compressed-tensors (pack-quantized)", "fp8", "fbgemm_fp8", "modelopt (FP8)",
    "modelopt (NVFP4)", "bitsandbytes", "bitsandbytes (nf4)", "bitsandbytes (fp4)", "mxfp4", "gguf",
]  # fmt: skip
# For each flag: what it does with weights that are not quantized, and the methods whose files it reads.
TABLE = {
    "gptq": (None, "gptq", "awq", "auto-round"),
    "awq": (None, "awq", "auto-round"),
    "compressed-tensors": (None, "compressed-tensors (pack-quantized)"),
    "fp8": (Use.fp8_on_load, "fp8", "fbgemm_fp8", "modelopt (FP8)"),
    "bitsandbytes": (Use.int8_on_load, "bitsandbytes", "bitsandbytes (nf4)", "bitsandbytes (fp4)"),
    "bitsandbytes-nf4": (None, "bitsandbytes (nf4)"),
    "bitsandbytes-fp4": (None, "bitsandbytes (fp4)"),
    "eetq": (Use.int8_on_load,),
    "int8": (Use.int8_on_load,),
    "int4": (Use.int4_on_load,),
    "marlin": (None,),
    "exl2": (None,),
}


@pytest.mark.parametrize("flag", Quantize)
def test_a_flag_reads_the_files_that_it_names_and_is_refused_with_both_names_otherwise(flag):
    on_load, *served = TABLE[flag]
    for method in (None, *METHODS):
        if method in served or (method is None and on_load):
            assert use_of(flag, method) is (on_load if method is None else Use.as_stored)
            continue
        with pytest.raises(ModelError, match=f"--quantize {flag}") as caught:
            use_of(flag, method)
        assert flag in ("marlin", "exl2") or (method or "not quantized") in str(caught.value)


@pytest.mark.parametrize("method", [None, *METHODS])
def test_a_checkpoint_needs_no_flag(method):
    assert use_of(None, method) is Use.as_stored
