"""A checkpoint's settings say which layers are quantized and how; what is not supported is refused by name."""

import json
import time
from pathlib import Path

import pytest

from text_generation_common.errors import WeightsError
from text_generation_common.quantized.announcement import announcement_of
from text_generation_common.quantized.methods import REFUSED, describe, description_of
from text_generation_common.quantized.scheme import Packing, Scheme

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
LAYERS = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.layers.11.mlp.gate", "lm_head"


def read(settings):
    return description_of(announcement_of(settings, "config.json"))


def schemes(settings, layers=LAYERS):
    description = read(settings)
    return [description.scheme(layer) for layer in layers]


def grouped(*groups, format="mixed-precision", **settings):
    made = {f"group_{i}": {"targets": targets, **group} for i, (targets, group) in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": made, **settings}


G4 = Scheme(Packing.gptq, 4, 128)
P4 = Scheme(Packing.packed, 4, 32)
F8 = Scheme(Packing.fp8, 8)
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

READ = {
    "gptq": (GPTQ, [G4] * 4),
    "gptq without quant_method": ({"bits": 4, "group_size": 128, "desc_act": False}, [G4] * 4),
    "gptq_v2": (
        {**GPTQ, "checkpoint_format": "gptq_v2", "bits": 8, "group_size": -1},
        [Scheme(Packing.gptq_v2, 8)] * 4,
    ),
    "dynamic": (
        {**GPTQ, "dynamic": {r"-:.*\.gate$": {}, r"+:.*\.1\..*": {"bits": 8}, r".*1.*": {"group_size": 32}}},
        [G4, Scheme(Packing.gptq, 8, 128), None, G4],
    ),
    "awq": (
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "zero_point": True,
            "modules_to_not_convert": ["gate", "head"],
        },
        [Scheme(Packing.awq, 4, 128)] * 2 + [None] * 2,
    ),
    "awq by its version": (
        {"bits": 4, "group_size": 128, "version": "GEMM", "checkpoint_format": "awq"},
        [Scheme(Packing.awq, 4, 128)] * 4,
    ),
    "auto-round": (ROUND, [G4] * 4),
    "auto-round's mixed bits": (
        {
            **ROUND,
            "packing_format": "auto_round",
            "extra_config": {
                "model.layers.1.mlp.down_proj": {"bits": 2, "group_size": 32},
                r".*self_attn.*": {"bits": 8},
                "model.layers.11.mlp.gate": {"bits": 16},
            },
            "block_name_to_quantize": "model.layers, visual",
        },
        [Scheme(Packing.gptq_v2, 8, 128), Scheme(Packing.gptq_v2, 2, 32), None, None],
    ),
    "auto-round as awq": ({**ROUND, "packing_format": "auto_round:auto_awq"}, [Scheme(Packing.awq, 4, 128)] * 4),
    "groups": (
        grouped(
            (["Linear"], {"weights": PACKED, "format": "pack-quantized"}),
            (["re:.*self_attn.*"], {"weights": FP8, "format": "float-quantized"}),
            (["model.layers.1.mlp.down_proj"], {"weights": {**PACKED, "num_bits": 8}, "format": "pack-quantized"}),
            ignore=["lm_head", "re:.*gate$"],
        ),
        [F8, Scheme(Packing.packed, 8, 32), None, None],
    ),
    "an expression that excludes": (
        grouped((["re:^(?!.*(mlp|[)]x)).*"], {"weights": PACKED}), format="pack-quantized"),
        [P4, None, None, P4],
    ),
    "w8a8": (
        grouped((["Linear"], {"weights": {"num_bits": 8, "strategy": "channel"}}), format="int-quantized"),
        [Scheme(Packing.int8, 8)] * 4,
    ),
    "blocks": (
        grouped(
            (["Linear"], {"weights": {**FP8, "strategy": "block", "block_structure": [128, 128]}}),
            format="float-quantized",
        ),
        [Scheme(Packing.fp8, 8, None, (128, 128))] * 4,
    ),
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": ["lm_head"]},
        [F8] * 3 + [None],
    ),
    "fp8 in blocks": (
        {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "scale_fmt": "ue8m0",
            "fmt": "e4m3",
            "modules_to_not_convert": ["model.layers.1", "gate", r"lm_.*"],
        },
        [Scheme(Packing.fp8, 8, None, (128, 128)), None, None, None],
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, [F8] * 4),
    "modelopt": ({**MODELOPT, "ignore": ["*lm_head*", "model.layers.1*"]}, [F8, None, None, None]),
    "modelopt in a file": ({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}, [F8] * 3 + [None]),
    "modelopt mixed": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                LAYERS[0]: {"quant_algo": "FP8"},
                LAYERS[1]: {"quant_algo": "NVFP4", "group_size": 16},
            },
        },
        [F8, Scheme(Packing.nvfp4_modelopt, 4, 16), None, None],
    ),
    "nf4": ({**BNB4, "llm_int8_skip_modules": ["lm_head"]}, [Scheme(Packing.bnb4)] * 3 + [None]),
    "bitsandbytes in 8 bits": ({"load_in_8bit": True, "load_in_4bit": False}, [Scheme(Packing.bnb8, 8)] * 4),
    "mxfp4": (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        [Scheme(Packing.mxfp4, 4, 32)] * 3 + [None],
    ),
}


@pytest.mark.parametrize("name", READ)
def test_settings_give_each_layer_its_scheme(name):
    settings, expected = READ[name]
    assert schemes(settings) == expected


NAMED = {
    "gptq (marlin)": {**GPTQ, "checkpoint_format": "marlin"},
    "gptq (gptq_p)": {**GPTQ, "format": "gptq_p"},
    "gptq (pack_dtype int64)": {**GPTQ, "pack_dtype": "int64"},
    "bits is 5": {**ROUND, "bits": 5},
    "bits is 7": {**ROUND, "extra_config": {"lm_head": {"bits": 7}}},
    "auto-round (mx_fp)": {**ROUND, "data_type": "mx_fp"},
    "auto-round (auto_round:fp8_static)": {**ROUND, "packing_format": "auto_round:fp8_static"},
    "awq (gemv)": {"quant_method": "awq", "bits": 4, "version": "gemv"},
    "awq (gemv_fast)": {"quant_method": "awq", "bits": 4, "version": "GEMV_FAST"},
    "awq (llm-awq)": {"quant_method": "awq", "bits": 4, "backend": "llm-awq"},
    "zero_point is false": {"quant_method": "awq", "bits": 4, "zero_point": False},
    "compressed-tensors (marlin-24)": grouped((["Linear"], {"weights": PACKED}), format="marlin-24"),
    "compressed-tensors (sparse)": grouped(sparsity_config={"format": "sparse-24-bitmask"}),
    "compressed-tensors (mxfp8-quantized)": grouped((["Linear"], {"weights": FP8}), format="mxfp8-quantized"),
    "compressed-tensors (mixed-precision)": grouped((["Linear"], {"weights": FP8})),
    "compressed-tensors (transforms of activations)": grouped(transform_config={"config_groups": {"u": {}}}),
    "num_bits is 6": grouped((["Linear"], {"weights": {**PACKED, "num_bits": 6}}), format="pack-quantized"),
    "modelopt (W4A16_AWQ)": {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
    "modelopt (NVFP4_AWQ)": {"quantization": {"quant_algo": "NVFP4_AWQ"}},
    "fmt is e5m2": {"quant_method": "fp8", "fmt": "e5m2"},
    "weight_block_size is [0, 128]": {"quant_method": "fp8", "weight_block_size": [0, 128]},
    "bnb_4bit_quant_storage is bfloat16": {**BNB4, "bnb_4bit_quant_storage": "bfloat16"},
    "the pattern '^(?:a{1000})' cannot be used": {**GPTQ, "dynamic": {"a{1000}": {}}},
    "the pattern '^(?:()' cannot be used": grouped(ignore=["re:("]),
    "are not an object": ["gptq"],
    "quant_method does not name": {"quant_method": 7, "bits": 4},
    "quant_method is missing": {"anything": 1},
}
NAMED["quant_method does not name how"] = NAMED.pop("quant_method is missing")


@pytest.mark.parametrize("told", NAMED)
def test_what_is_not_supported_is_refused_by_name_with_a_way_out(told):
    with pytest.raises(WeightsError) as caught:
        read(NAMED[told])
    text = str(caught.value)
    assert told in text and "\n" not in text and text.startswith("config.json") and text.count(": ") >= 2


@pytest.mark.parametrize("method", [*REFUSED, "a new one"])
def test_other_methods_are_refused_with_a_way_out(method):
    with pytest.raises(WeightsError, match=f"quantized as {method}, which is not supported: "):
        read({"quant_method": method})


def test_the_first_announcement_counts(tmp_path):
    assert describe(tmp_path, {}) is None
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert describe(tmp_path, {}).default == F8
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 128}))
    assert describe(tmp_path, {}).default == G4
    assert describe(tmp_path, {"quantization_config": MODELOPT}).method == "modelopt (FP8)"
    (tmp_path / "quantize_config.json").write_text("{")
    with pytest.raises(WeightsError, match="not valid JSON"):
        describe(tmp_path, {})


def test_published_settings_are_read(tmp_path):
    path = Path(__file__).parents[4] / "server/text_generation_server/tests/published_configs.jsonl"
    found = {}
    for i, line in enumerate(path.read_text().splitlines()):
        published = json.loads(line)
        folder = tmp_path / str(i)
        folder.mkdir()
        for name, content in published.get("beside", {}).items():
            (folder / name).write_text(json.dumps(content))
        if (description := describe(folder, published["config"])) is not None:
            found[published["model"]] = description.default
    blocks, experts = Scheme(Packing.fp8, 8, None, (128, 128)), Scheme(Packing.mxfp4, 4, 32)
    assert set(found.values()) == {blocks, F8, experts, P4, Scheme(Packing.mxfp4_packed, 4, 32)} and len(found) == 16
    assert found["deepseek-ai/DeepSeek-V3"] == blocks and found["openai/gpt-oss-20b"] == experts


def test_a_file_of_mlx_is_not_taken_for_one_of_gptq(tmp_path):
    settings = {"group_size": 64, "bits": 4}
    for config in ({"quantization": settings}, {"quantization": settings, "quantization_config": settings}):
        with pytest.raises(WeightsError, match="quantized as mlx, which is not supported"):
            describe(tmp_path, config)


def test_an_expression_that_makes_others_backtrack_takes_no_time():
    description = read({**GPTQ, "dynamic": {"-:(a+)+$": {}, "-:(.*)*(.*)*(.*)*x": {}}})
    start = time.process_time()
    assert description.scheme("a" * 300 + "b") == G4
    assert time.process_time() - start < 1  # Python's own engine would not end


def test_expressions_are_bounded_together():
    with pytest.raises(WeightsError, match="more than 65536 characters"):
        read({**GPTQ, "dynamic": {f"-:{i:06}{'a' * 600}": {} for i in range(110)}})


def test_many_exact_names_need_not_be_expressions():
    names = [f"model.layers.{i}.mlp.experts.{j}.down_proj" for i in range(60) for j in range(100)]
    description = read(grouped((["Linear"], {"weights": PACKED}), format="pack-quantized", ignore=names))
    assert [description.scheme(name) for name in (*names[::99], "lm_head")] == [None] * 61 + [P4]


def test_what_has_no_effect_is_named_for_the_log():
    settings = grouped((["Linear"], {"weights": FP8, "input_activations": {"num_bits": 8}}), format="float-quantized")
    assert read({**settings, "kv_cache_scheme": {"num_bits": 8}}).passed_over == (
        "the quantization of activations",
        "the scales of the KV cache",
    )
