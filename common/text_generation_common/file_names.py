"""Decides, from the names of a model's files, which of them are needed to serve it. No input or output."""

import re
from collections.abc import Iterable, Set

from text_generation_common.errors import WeightsError

INDEX = "model.safetensors.index.json"
PICKLE_INDEX = "pytorch_model.bin.index.json"

# Files that router and shard read, weights excepted.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
)
# The folder with a model's chat templates besides its first one.
TEMPLATES = "additional_chat_templates/"
# Files from which a tokenizer.json can be made if the model has none.
SLOW_TOKENIZER_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "added_tokens.json",
)

# How the names of a fine-tune's leftovers begin, beside the weights that it was merged into.
ADAPTER = "adapter_model."
ADAPTER_CONFIG = "adapter_config.json"
_PART = re.compile(r"-(\d+)-of-(\d+)\.")
MAX_PARTS = 100_000  # most files that one model's weights may have: a thousand times as many as the largest models have
MAX_DIGITS = 18  # most digits of the number of a part, leading zeros included

GGUF = ".gguf"


def is_leftover(name: str) -> bool:
    return name.startswith(ADAPTER)


def side_files(listing: Iterable[str]) -> list[str]:
    """The model's files with configuration, tokenizer and chat template that exist."""
    names = set(listing)
    wanted = SIDE_FILES if "tokenizer.json" in names else SIDE_FILES + SLOW_TOKENIZER_FILES
    templates = sorted(name for name in names if name.startswith(TEMPLATES) and name.endswith(".jinja"))
    return [name for name in wanted if name in names] + templates


def safetensors_names(listing: Iterable[str], indexed: Set[str] | None) -> list[str]:
    """The safetensors files to load: the files of the index; without index, model.safetensors; otherwise all at the top
    level.
    """
    return _choose(listing, indexed, "model.safetensors", (".safetensors",))


def pickle_names(listing: Iterable[str], indexed: Set[str] | None) -> list[str]:
    """PyTorch's own files to load, chosen like the safetensors files."""
    return _choose(listing, indexed, "pytorch_model.bin", (".bin", ".pt"))


def only_gguf(listing: Iterable[str]) -> str | None:
    """A GGUF file of a model that has no weights in a format that is served."""
    names = sorted(listing)
    return None if has_weights(names) else next((name for name in names if name.endswith(GGUF)), None)


def has_weights(listing: Iterable[str]) -> bool:
    """Whether there are weights in safetensors or in PyTorch's own files, as far as names tell."""
    names = list(listing)
    return bool(safetensors_names(names, None) or pickle_names(names, None))


def _choose(listing: Iterable[str], indexed: Set[str] | None, single: str, suffixes: tuple[str, ...]) -> list[str]:
    if indexed is not None:
        return sorted(indexed)
    names = {name for name in listing if name.endswith(suffixes) and _is_model_weights(name)}
    # Mistral's repositories have the same weights a second time, in a format of its own.
    others = {name for name in names if not name.startswith("consolidated")}
    return [single] if single in names else sorted(others or names)


def _is_model_weights(name: str) -> bool:
    """Whether the file holds weights: not a training program's file, not an adapter, not in a folder, not hidden."""
    return (
        is_plain(name) and not is_leftover(name) and not any(word in name for word in ("arguments", "args", "training"))
    )


def is_plain(name: str) -> bool:
    """Whether `name` contains no folder: names from an index or a listing must not lead out of the model's folder."""
    return bool(name) and not name.startswith(".") and "/" not in name and "\\" not in name and "\0" not in name


def missing_parts(names: Iterable[str]) -> list[str]:
    """The first missing file of each set like model-00001-of-00003.safetensors, so that an incomplete model is noticed.
    Takes no longer if a name claims a huge set. WeightsError for more than MAX_PARTS files.
    """
    present: dict[tuple[str, str, str, int], set[int]] = {}
    for name in names:
        if match := _PART.search(name):
            digits = len(match[1])
            if max(digits, len(match[2])) > MAX_DIGITS or int(match[2]) > MAX_PARTS:
                raise WeightsError(f"{name[:80]!r} says that its model has more than {MAX_PARTS} files: remove it")
            part_of = (name[: match.start()], match[2], name[match.end() :], digits)
            present.setdefault(part_of, set()).add(int(match[1]))
    missing: list[str] = []
    for (before, total, after, digits), numbers in present.items():
        absent = next((number for number in range(1, int(total) + 1) if number not in numbers), None)
        if absent is not None:
            missing.append(f"{before}-{absent:0{digits}}-of-{total}.{after}")
    return sorted(missing)
