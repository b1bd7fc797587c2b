"""--quantize means what TGI's table says."""

import pytest

from text_generation_common.errors import ModelError
from text_generation_common.flags.kinds import Quantize
from text_generation_common.quantized.agreement import Use, use_of
from text_generation_common.quantized.announcement import announcement_of
from text_generation_common.quantized.methods import description_of

METHODS = [
    "gptq", "awq", "auto-round (gptq)", "auto-round (gptq_v2)", "auto-round (awq)",
    "compressed-tensors (pack-quantized)", "fp8", "fbgemm_fp8", "modelopt (FP8)", "modelopt (NVFP4)",
    "bitsandbytes (int8)", "bitsandbytes (nf4)", "bitsandbytes (fp4)", "mxfp4", "gguf",
]  # fmt: skip
# For each flag: what it does with weights that are not quantized, and the methods whose files it reads.
TABLE = {
    "gptq": (None, "gptq", "awq", "auto-round (gptq)", "auto-round (gptq_v2)", "auto-round (awq)"),
    "awq": (None, "awq", "auto-round (awq)"),
    "compressed-tensors": (None, "compressed-tensors (pack-quantized)"),
    "fp8": (Use.fp8_on_load, "fp8", "fbgemm_fp8", "modelopt (FP8)"),
    "bitsandbytes": (Use.int8_on_load, "bitsandbytes (int8)"),
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


BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
# Settings of files, and the values of the flag that read them.
READ_BY = [
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, {"gptq"}),
    ({"quant_method": "awq", "bits": 4, "group_size": 128}, {"awq", "gptq"}),
    (ROUND, {"gptq"}),
    ({**ROUND, "packing_format": "auto_round"}, {"gptq"}),
    ({**ROUND, "packing_format": "auto_round:auto_awq"}, {"awq", "gptq"}),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, {"bitsandbytes"}),
    ({**BNB4, "bnb_4bit_quant_type": "nf4"}, {"bitsandbytes-nf4"}),
    (BNB4, {"bitsandbytes-fp4"}),
    (PACKED, {"compressed-tensors"}),
    ({"quant_method": "fp8"}, {"fp8"}),
    ({"quant_method": "fbgemm_fp8"}, {"fp8"}),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, {"fp8"}),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, set()),
    ({"quant_method": "mxfp4"}, set()),
]


@pytest.mark.parametrize(("settings", "flags"), READ_BY)
def test_what_the_settings_say_decides_which_flags_fit(settings, flags):
    method, found = description_of(announcement_of(settings, "config.json")).method, set()
    assert method in METHODS
    for flag in Quantize:
        try:
            found |= {flag} if use_of(flag, method) is Use.as_stored else set()
        except ModelError as error:
            assert "\n" not in str(error)
    assert found == flags
