"""The list of adapters that a server is started with: `--lora-adapters id`, `id=path` or `id=path@revision`."""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from text_generation_common.adapters.content import digest_of
from text_generation_common.adapters.files import read_adapter
from text_generation_common.errors import ModelError
from text_generation_common.flags.model import MAX_ADAPTERS
from text_generation_common.gguf.hub_choice import hub_name
from text_generation_common.model_files import local_folder

DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_NAME = 256
# Models' names of clients that mean whatever is served.
ANY_MODEL = ("", "tgi", "dummy")
MAX_LIST = 120_000  # characters of the list in a process's environment, where one value has at most 128 KiB
OF_TRANSFORMERS = (
    "--lora-adapters and --lora-dirs are not supported for a model that transformers computes: merge the adapter into"
    " it"
)


@dataclass(frozen=True, slots=True)
class ListedAdapter:
    """An adapter by the name that clients give. `revision` is that of a hub's repository; of a folder, the digest that
    its files must have."""

    name: str
    path: str  # a folder, or the id of a repository of the hub
    revision: str = ""

    @property
    def digest(self) -> str | None:
        return self.revision if DIGEST.fullmatch(self.revision) else None

    def __str__(self) -> str:
        return f"{self.name}={self.path}" + (f"@{self.revision}" if self.revision else "")


def listed(text: str | None) -> tuple[ListedAdapter, ...]:
    """ModelError for an item in another form, and for two of one name."""
    found: dict[str, ListedAdapter] = {}
    for item in (text or "").split(","):
        if not item.strip():
            continue
        adapter = _item(item.strip())
        if adapter.name in found:
            raise ModelError(f"--lora-adapters names {adapter.name} twice: give each adapter a name of its own")
        found[adapter.name] = adapter
    return tuple(found.values())


def _item(item: str) -> ListedAdapter:
    name, _, path = item.partition("=")
    path, *more = (path or name).split("@")
    name = name.partition("@")[0]
    if not name or not path or len(more) > 1 or len(name) > MAX_NAME or not name.isprintable():
        raise ModelError(
            f"Invalid LoRA adapter format: {ascii(item)[1:-1]}: write it as id, id=path or id=path@revision"
        )
    return ListedAdapter(name, path, more[0] if more else "")


def located(adapter: ListedAdapter, cache: str | None) -> ListedAdapter:
    """The same with an absolute folder. ModelError if the adapter is not on this machine."""
    folder = local_folder(adapter.path)
    if folder is not None:
        if adapter.revision and adapter.digest is None:
            raise ModelError(f"--lora-adapters {adapter}: a folder has no revision, only a repository of the hub has")
        return replace(adapter, path=_plain_path(adapter, folder))
    if hub_name(adapter.path) is None:
        raise ModelError(f"--lora-adapters {adapter}: there is no folder {adapter.path}")
    # Imported here because the import is slow, and needed for adapters of the hub only.
    from huggingface_hub import constants, try_to_load_from_cache

    where = Path(cache or constants.HF_HUB_CACHE)
    file = try_to_load_from_cache(
        adapter.path, "adapter_config.json", cache_dir=where, revision=adapter.revision or None
    )
    if not isinstance(file, str):
        revision = f" --revision {adapter.revision}" if adapter.revision else ""
        raise ModelError(
            f"--lora-adapters {adapter}: the repository is not in the hub's cache: run"
            f" `hf download {adapter.path}{revision}` first"
        )
    return replace(adapter, path=_plain_path(adapter, Path(file).parent), revision="")


def _plain_path(adapter: ListedAdapter, folder: Path) -> str:
    """The absolute path, which other processes read in a list like the user's."""
    path = str(folder.absolute())
    if "," in path or "@" in path:
        raise ModelError(f"--lora-adapters {adapter}: the path {path} has a comma or an @: give a link to it")
    return path


def identified(adapter: ListedAdapter) -> ListedAdapter:
    """The same with the digest of its files. ModelError if it was given, and is another one."""
    digest = digest_of(Path(adapter.path))
    if adapter.digest not in (None, digest):
        raise ModelError(f"--lora-adapters {adapter.name}: the files in {adapter.path} have changed since the start")
    return replace(adapter, revision=digest)


def check_base(is_native: bool) -> None:
    """ModelError if the model takes no adapters."""
    if not is_native:
        raise ModelError(OF_TRANSFORMERS)


def check_names(adapters: Collection[str], of_model: Collection[str]) -> None:
    """ModelError for an adapter's name that means the model itself."""
    if taken := [name for name in adapters if name in (*of_model, *ANY_MODEL)]:
        raise ModelError(f"--lora-adapters names {taken[0]}, which means the model itself: give it another name")


def digests(text: str | None, cache: str | None = None) -> dict[str, str]:
    """The digests of the listed adapters, by their names. Reads the files of those whose digest is not given."""
    found = (adapter if adapter.digest else identified(located(adapter, cache)) for adapter in listed(text))
    return {adapter.name: adapter.revision for adapter in found}


def folders_of(text: str | None) -> tuple[Path, ...]:
    """The folders of --lora-dirs."""
    return tuple(Path(path) for path in (text or "").split(",") if path)


def real_folders(text: str | None) -> str | None:
    """The same list with the places to which links lead now. ModelError if one is not a folder."""
    found = [Path(path.strip()).resolve() for path in (text or "").split(",") if path.strip()]
    for folder in found:
        if not folder.is_dir():
            raise ModelError(f"--lora-dirs: there is no folder {folder}")
        if folder == Path(folder.anchor):
            raise ModelError(f"--lora-dirs {folder}: every file of the machine lies there: name a folder of adapters")
    return ",".join(map(str, found)) or None


def checked(text: str | None, cache: str | None, max_rank: int) -> tuple[ListedAdapter, ...]:
    """All that can be checked of the listed adapters without their model: folders, fields, tensors, and digests."""
    found = listed(text)
    if len(found) > MAX_ADAPTERS:
        raise ModelError(f"--lora-adapters names {len(found)} adapters, and at most {MAX_ADAPTERS} are served")
    found = tuple(located(adapter, cache) for adapter in found)
    for adapter in found:
        read_adapter(Path(adapter.path), max_rank)
    found = tuple(map(identified, found))
    if (size := len(",".join(map(str, found)))) > MAX_LIST:
        raise ModelError(
            f"--lora-adapters takes {size} characters with its folders, and {MAX_LIST} fit: use short paths"
        )
    return found
