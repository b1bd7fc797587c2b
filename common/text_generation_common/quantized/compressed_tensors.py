"""Reads the settings of compressed-tensors: several groups of modules, each with its own format."""

import re

from text_generation_common.quantized.patterns import Compiler, exactly
from text_generation_common.quantized.scheme import Description, Packing, Scheme, SchemeRule
from text_generation_common.quantized.settings import Settings

FORMATS = frozenset(f"{name}-quantized" for name in ("pack", "int", "float", "naive", "nvfp4-pack", "mxfp4-pack"))
PACKED_BITS = (2, 3, 4, 8)
LINEAR, EMBEDDING = "Linear", "Embedding"  # classes of all linear layers and embeddings, which a target may name
EMBEDDINGS = re.compile(r"(.*\.)?(embed_tokens|embed_in|word_embeddings|wte)")  # the modules of this class


def read_compressed_tensors(settings: Settings) -> Description:
    """Modules in `ignore` are not quantized. For the others a target with the exact name counts before expressions, and
    these before the classes of all linear layers and embeddings, as in the library."""
    if settings.inner("sparsity_config").word("format", default="dense") != "dense":
        raise settings.refused("sparse", "choose the model without sparsity")
    if settings.inner("transform_config").get("config_groups"):
        raise settings.refused("transforms of activations")
    compiler = Compiler(settings.where)
    ignored = SchemeRule(compiler.targets(settings.words("ignore")), None)
    exact, expressions, default, embedding = [], [], None, None
    groups = settings.inner("config_groups")
    for name in groups.raw:
        group = groups.inner(name)
        scheme = _scheme(group, group.word("format") or settings.word("format"))
        targets = group.words("targets")
        exact.append(SchemeRule(exactly(targets), scheme))
        expressions += [SchemeRule(compiler.targets([text]), scheme) for text in targets if text.startswith("re:")]
        default = default or (scheme if LINEAR in targets else None)
        embedding = embedding or (scheme if EMBEDDING in targets else None)
    rules = (ignored, *exact, *expressions, SchemeRule(lambda name: bool(EMBEDDINGS.fullmatch(name)), embedding))
    method = f"{settings.method} ({settings.word('format')})"
    return Description(method, default, rules, passed_over=tuple(_passed_over(settings)))


def _passed_over(settings: Settings) -> list[str]:
    groups = settings.inner("config_groups")
    activations = any(groups.inner(name).get("input_activations") for name in groups.raw)
    found = ["the quantization of activations"] if activations else []
    return found + (["the scales of the KV cache"] if settings.get("kv_cache_scheme") else [])


def _scheme(group: Settings, format: str) -> Scheme | None:
    if format not in FORMATS:
        raise group.refused(format or "no format")
    if group.get("weights") is None:
        return None
    weights = group.inner("weights")
    kind, strategy = weights.word("type", default="int"), _strategy(weights)
    symmetric = weights.flag("symmetric", default=True)
    match kind, weights.get("num_bits"):
        case "int", 8 if format != "pack-quantized" and strategy != "block":
            return Scheme(Packing.int8, 8, _group_size(weights, strategy), symmetric=symmetric)
        case "int", int() if format == "pack-quantized" and strategy != "block":
            bits = weights.whole("num_bits", allowed=PACKED_BITS)
            return Scheme(Packing.packed, bits, _group_size(weights, strategy), symmetric=symmetric)
        case "float", 8 if strategy in ("tensor", "channel", "block"):
            if strategy == "block" and weights.get("block_structure") is None:
                raise weights.wrong("block_structure", None)
            return Scheme(Packing.fp8, 8, None, weights.block("block_structure"))
        case "float", 4 if weights.get("group_size") == 16:
            return Scheme(Packing.nvfp4, 4, 16)
        case "float", 4 if weights.get("group_size") == 32:
            return Scheme(Packing.mxfp4_packed, 4, 32)
    raise group.refused(f"{weights.get('num_bits')} bits, {kind}, {strategy}, {format}")


def _strategy(weights: Settings) -> str:
    size = weights.get("group_size")
    return weights.word("strategy", default="tensor" if size is None else "channel" if size == -1 else "group")


def _group_size(weights: Settings, strategy: str) -> int | None:
    return weights.group_size("group_size") if strategy == "group" else None
