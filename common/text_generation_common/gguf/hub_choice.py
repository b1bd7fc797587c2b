"""Which GGUF file of a repository on the hub is meant, in the words of llama.cpp and Ollama: `owner/name:Q4_K_M`, with
`hf.co/` before it or without. No network.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from text_generation_common.errors import WeightsError
from text_generation_common.file_names import has_weights
from text_generation_common.gguf.choice import SUFFIX, models_among
from text_generation_common.gguf.container import PART, shown

DEFAULT = "Q4_K_M"
SHORT_ADDRESS = "hf.co/"
HUB_FOLDER = "models--"  # how the names of folders of the hub's cache begin
# Labels of types of weights, at the end of a file's name.
LABEL = r"(?:UD-)?(?:I?Q\d\w*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4\w*)"
_NAME = re.compile(r"([\w.-]+(?:/[\w.-]+)?)", re.ASCII)
_TAG = re.compile(rf"{LABEL}|[\w.-]+\.gguf", re.ASCII | re.IGNORECASE)
_AT_END = re.compile(rf"(?:^|[-._/])({LABEL})\Z", re.ASCII | re.IGNORECASE)
MAX_LISTED = 40  # maximum number of files that an error lists


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository, and which of its files is meant."""

    repository: str
    tag: str | None = None  # a label, or the name of a file. None: the weights in safetensors, or the label DEFAULT

    def __str__(self) -> str:
        return self.repository if self.tag is None else f"{self.repository}:{self.tag}"


def hub_name(model_id: str) -> HubName | None:
    """What a model id means, if it has the form of one of the hub: `name`, `owner/name`, `owner/name:TAG`. Only a type
    of weights or the name of a file is a tag: `user/llama3.2:1b` is a name of Ollama's."""
    rest = model_id.removeprefix(SHORT_ADDRESS)
    repository, colon, tag = rest.partition(":")
    has_owner = "/" in repository
    if not _NAME.fullmatch(repository) or {".", ".."} & set(repository.split("/")):
        return None
    if (colon or rest != model_id) and not has_owner:
        return None
    if not colon:
        return HubName(repository)
    return HubName(repository, tag) if _TAG.fullmatch(tag) else None


def is_fetched_as_gguf(name: HubName, listing: Iterable[str]) -> bool:
    """Whether a GGUF file is meant: one that is named, or any of a repository that has no other weights."""
    names = list(listing)
    return name.tag is not None or (bool(models_among(names)) and not has_weights(names))


def chosen_files(name: HubName, listing: Iterable[str]) -> list[str]:
    """The file that is meant, with all its parts. WeightsError, with a list, if there is none or more than one."""
    models = models_among(listing)
    tag = name.tag or DEFAULT
    found = [file for file in models if file == tag] or [file for file in models if _label(file).upper() == tag.upper()]
    if len(found) != 1:
        raise WeightsError(_not_one(name, tag, found or models, bool(found)))
    return all_parts(found[0])


def all_parts(name: str) -> list[str]:
    part = PART.fullmatch(name)
    if part is None:
        return [name]
    return [f"{part[1]}-{number:05}-of-{part[3]}.gguf" for number in range(1, int(part[3]) + 1)]


def _label(file: str) -> str:
    """The type of weights that the name of a file ends with, or an empty text."""
    part = PART.fullmatch(file)
    match = _AT_END.search(file.removesuffix(SUFFIX) if part is None else part[1])
    return match[1] if match else ""


def _not_one(name: HubName, tag: str, files: list[str], are_several: bool) -> str:
    if not files:
        return f"{name.repository} has no GGUF file of a model"
    labels = {_label(file) for file in files}
    # Labels tell files apart if each has one of its own.
    has_labels = not are_several and "" not in labels
    what = sorted(labels if has_labels else (file.rpartition("/")[2] for file in files))
    listed = ", ".join(map(shown, what[:MAX_LISTED])) + (", …" if len(what) > MAX_LISTED else "")
    told = "several GGUF files" if are_several else "no GGUF file"
    example = f"{name.repository}:{shown(what[0])}"
    return f"{name.repository} has {told} of {shown(tag)}: pass --model-id {example}, or one of {listed}"


def cached_file(cache: Path, name: HubName, revision: str | None) -> Path | None:
    """The GGUF file in the hub's cache, or None if a part of it is not there, or safetensors are meant."""
    folder = cache / (HUB_FOLDER + name.repository.replace("/", "--"))
    try:
        reference = folder / "refs" / (revision or "main")
        commit = reference.read_text().strip() if reference.is_file() else revision or ""
        snapshot = folder / "snapshots" / commit
        listing = [str(file.relative_to(snapshot)) for file in (*snapshot.glob("*.*"), *snapshot.glob("*/*.gguf"))]
        if not commit or not is_fetched_as_gguf(name, listing):
            return None
        files = [snapshot / file for file in chosen_files(name, listing)]
    except (OSError, ValueError, WeightsError):
        return None
    return files[0] if all(file.is_file() for file in files) else None
