"""Reads a checkpoint's settings into a description: one reader for each method, and the methods that are refused."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from text_generation_common.quantized.announcement import Announcement, find_announcement
from text_generation_common.quantized.compressed_tensors import read_compressed_tensors
from text_generation_common.quantized.patterns import PLAIN, Compiler, Names, within_modules
from text_generation_common.quantized.scheme import Description, Packing, Scheme, SchemeRule
from text_generation_common.quantized.settings import WAY_OUT, Settings, shown

INTEGER_BITS = (2, 3, 4, 8)
DENSE_BITS = 16  # settings name this number of bits, or more, for modules that are not quantized
REQUANTIZE = "quantize the model again with GPTQModel, AutoRound or llm-compressor"
CONVERT = "convert it with GPTQModel to the format gptq, or choose one in gptq, awq or compressed-tensors"
UNQUANTIZED = "choose the unquantized model"
# Methods that are refused, with the way out.
REFUSED: Mapping[str, str] = {
    "aqlm": REQUANTIZE, "exl2": REQUANTIZE, "exl3": REQUANTIZE, "fp_quant": REQUANTIZE, "higgs": REQUANTIZE,
    "hqq": REQUANTIZE, "paroquant": REQUANTIZE, "qqq": REQUANTIZE, "quark": REQUANTIZE, "quip": REQUANTIZE,
    "sinq": REQUANTIZE, "spqr": REQUANTIZE, "torchao": REQUANTIZE, "vptq": REQUANTIZE,
    "bitblas": CONVERT, "marlin": CONVERT,
    "bitnet": "only bitnet.cpp computes it; choose another model",
    "eetq": f"its files have the order of one GPU's kernels; {UNQUANTIZED} and start it with --quantize eetq",
    "gguf": "give the GGUF file itself as --model-id",
    "mlx": UNQUANTIZED, "quanto": UNQUANTIZED,
}  # fmt: skip


def describe(folder: Path, config: Mapping[str, Any]) -> Description | None:
    """How the weights in a folder are quantized, whose config.json is `config`; None if they are not. WeightsError, in
    one line, if they are quantized in a way that is not supported."""
    announcement = find_announcement(folder, config)
    return None if announcement is None else description_of(announcement)


def description_of(announcement: Announcement) -> Description:
    settings = Settings(announcement.settings, shown(announcement.method), announcement.where)
    reader = READERS.get(announcement.method)
    if reader is None:
        raise settings.refused("", REFUSED.get(announcement.method, WAY_OUT))
    return reader(settings)


def _gptq(settings: Settings) -> Description:
    compiler = Compiler(settings.where)
    rules = []
    for pattern, changes in settings.inner("dynamic").raw.items():
        name = pattern.removeprefix("+:").removeprefix("-:")
        if not isinstance(changes, dict):
            raise settings.wrong(f"dynamic: {shown(pattern)}", changes)
        scheme = None if pattern.startswith("-:") else _gptq_scheme(settings.merged(changes))
        rules.append(SchemeRule(compiler.expression(name), scheme))
    return Description(settings.method, _gptq_scheme(settings), tuple(rules))


def _gptq_scheme(settings: Settings) -> Scheme:
    kind = settings.word("checkpoint_format", "format", default="gptq")
    packing = {"gptq": Packing.gptq, "gptq_v2": Packing.gptq_v2}.get(kind)
    if packing is None or settings.get("is_marlin_format"):
        raise settings.refused("marlin" if packing else kind, CONVERT)
    if settings.word("pack_dtype", default="int32").removeprefix("torch.") != "int32" or settings.get("rotation"):
        raise settings.refused("rotation" if settings.get("rotation") else f"pack_dtype {settings.get('pack_dtype')}")
    return _integers(settings, packing)


def _integers(settings: Settings, packing: Packing) -> Scheme:
    bits = settings.whole("bits", "w_bit", allowed=(4,) if packing is Packing.awq else INTEGER_BITS)
    symmetric, act_order = settings.get("sym") is not False, settings.get("desc_act") is True
    size = settings.group_size("group_size", "q_group_size")
    return Scheme(packing, bits, size, symmetric=symmetric, act_order=act_order)


def _awq(settings: Settings) -> Description:
    version = settings.word("version", "format", "checkpoint_format", default="gemm")
    backend = settings.word("backend", default="autoawq")
    if version != "gemm" or backend == "llm-awq":
        raise settings.refused(version if version != "gemm" else backend, "pack it again with version gemm")
    if not settings.flag("zero_point", default=True):
        raise settings.wrong("zero_point", False)
    parts = settings.words("modules_to_not_convert")  # parts of names, as AutoAWQ compares them
    rule = SchemeRule(lambda name: any(part in name for part in parts), None)
    return Description(settings.method, _integers(settings, Packing.awq), (rule,))


# AutoRound's layouts by packing_format. Without it files have GPTQ's.
AUTO_ROUND: Mapping[str, Packing] = {
    "auto_round": Packing.gptq_v2,
    "auto_round:gptqmodel": Packing.gptq_v2,
    "auto_round:auto_gptq": Packing.gptq,
    "auto_round:auto_awq": Packing.awq,
}


def _auto_round(settings: Settings) -> Description:
    packing_format = settings.word("packing_format", default="auto_round:auto_gptq")
    packing = AUTO_ROUND.get(packing_format)
    if packing is None:
        raise settings.refused(packing_format)
    compiler = Compiler(settings.where)
    default, schemes = _auto_round_scheme(settings, packing), {}
    for name, changes in settings.inner("extra_config").raw.items():
        if not isinstance(changes, dict):
            raise settings.wrong(f"extra_config: {shown(name)}", changes)
        schemes[name] = _auto_round_scheme(settings.merged(changes), packing)
    expressions = [name for name in schemes if not PLAIN.fullmatch(name)]
    rules = [SchemeRule(compiler.expression(name, anywhere=True), schemes[name]) for name in expressions]
    rules.append(SchemeRule(compiler.modules(settings.words("modules_to_not_convert")), None))
    if blocks := _blocks(settings):
        rules.append(SchemeRule(blocks, default))
    return Description(f"{settings.method} ({packing})", None if blocks else default, tuple(rules), schemes)


def _auto_round_scheme(settings: Settings, packing: Packing) -> Scheme | None:
    if isinstance(bits := settings.get("bits"), int) and DENSE_BITS <= bits <= 2 * DENSE_BITS:
        return None
    if (data_type := settings.word("data_type", default="int")) != "int":
        raise settings.refused(data_type)
    return _integers(settings, packing)


def _blocks(settings: Settings) -> Names | None:
    """The blocks of layers that are quantized, None for all."""
    name = "block_name_to_quantize" if settings.get("block_name_to_quantize") else "to_quant_block_names"
    given = settings.get(name)
    names = given.split(",") if isinstance(given, str) else settings.words(name)
    return within_modules([name.strip() for name in names]) if names else None


def _fp8(settings: Settings) -> Description:
    for name, allowed in {"fmt": ("e4m3", "float8_e4m3fn"), "scale_fmt": ("ue8m0", "float"), "quant_algo": ()}.items():
        if settings.word(name, default="") not in ("", *allowed):
            raise settings.wrong(name, settings.get(name))
    skipped = settings.words("modules_to_not_convert", "ignored_layers", "ignore")
    rule = SchemeRule(Compiler(settings.where).modules(skipped), None)
    scheme = Scheme(Packing.fp8, 8, None, settings.block("weight_block_size"))
    static = settings.word("activation_scheme", default="dynamic") == "static"
    return Description(settings.method, scheme, (rule,), passed_over=("the scales of activations",) if static else ())


def _bitsandbytes(settings: Settings) -> Description:
    skipped = settings.words("llm_int8_skip_modules")
    rule = SchemeRule(Compiler(settings.where).modules(skipped), None)
    if settings.flag("load_in_8bit") or settings.flag("_load_in_8bit"):
        note = ("outlier columns in 16 bits",)
        return Description(f"{settings.method} (int8)", Scheme(Packing.bnb8, 8), (rule,), passed_over=note)
    if not (settings.flag("load_in_4bit") or settings.flag("_load_in_4bit")):
        raise settings.refused("neither load_in_4bit nor load_in_8bit")
    if (kind := settings.word("bnb_4bit_quant_type", default="fp4")) not in ("nf4", "fp4"):
        raise settings.wrong("bnb_4bit_quant_type", kind)
    if (storage := settings.word("bnb_4bit_quant_storage", default="uint8")) != "uint8":
        raise settings.wrong("bnb_4bit_quant_storage", storage)
    return Description(f"{settings.method} ({kind})", Scheme(Packing.bnb4, 4), (rule,))


def _mxfp4(settings: Settings) -> Description:
    rule = SchemeRule(Compiler(settings.where).modules(settings.words("modules_to_not_convert")), None)
    bits = settings.whole("bits", allowed=(4,), default=4)
    return Description(settings.method, Scheme(Packing.mxfp4, bits, 32), (rule,))


MODELOPT: Mapping[str, Scheme] = {
    "fp8": Scheme(Packing.fp8, 8),
    "fp8_per_channel_per_token": Scheme(Packing.fp8, 8),
    "nvfp4": Scheme(Packing.nvfp4_modelopt, 4, 16),
    "w4a16_nvfp4": Scheme(Packing.nvfp4_modelopt, 4, 16),
}


def _modelopt(settings: Settings) -> Description:
    skipped = SchemeRule(Compiler(settings.where).wildcards(settings.words("exclude_modules", "ignore")), None)
    has_kv = settings.get("kv_cache_quant_algo", "kv_cache_scheme")
    passed_over = ("the scales of activations", *(["the scales of the KV cache"] if has_kv else []))
    algorithm, layers = settings.word("quant_algo"), settings.inner("quantized_layers")
    is_mixed = algorithm == "mixed_precision"
    default = None if is_mixed else _modelopt_scheme(settings)
    named = {name: _modelopt_scheme(layers.inner(name)) for name in layers.raw} if is_mixed else {}
    return Description(f"modelopt ({algorithm.upper()})", default, (skipped,), named, passed_over)


def _modelopt_scheme(settings: Settings) -> Scheme:
    algorithm = settings.word("quant_algo")
    scheme = MODELOPT.get(algorithm)
    if scheme is None:
        raise settings.refused(algorithm.upper() or "no quant_algo")
    if scheme.group_size:
        settings.whole("group_size", allowed=(scheme.group_size,), default=scheme.group_size)
    return scheme


READERS: Mapping[str, Callable[[Settings], Description]] = {
    "auto-round": _auto_round,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "fbgemm_fp8": _fp8,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}
