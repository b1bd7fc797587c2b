"""Models that are on this machine, as --model-id names them. Imports no library of the hub, which takes long."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from text_generation_common.flags.model import DEMO_MODEL
from text_generation_common.gguf.hub_choice import HUB_FOLDER


def local_models(word: str, cache: Path) -> list[str]:
    """Names of models that begin with `word`, and, if that is a path, folders in which to look further."""
    known = [DEMO_MODEL, *_in_cache(cache)]
    return list(dict.fromkeys([*(name for name in known if name.startswith(word)), *_in_folder(word)]))


def hub_cache(environ: Mapping[str, str], given: str | None = None) -> Path:
    """The folder of the hub's cache; `given` is the value of --huggingface-hub-cache."""
    for folder in (given, environ.get("HUGGINGFACE_HUB_CACHE"), environ.get("HF_HUB_CACHE")):
        if folder:
            return Path(folder).expanduser()
    above = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "/"), ".cache"))
    return Path(environ.get("HF_HOME") or Path(above, "huggingface"), "hub").expanduser()


def is_in_cache(model_id: str, cache: Path) -> bool:
    return (cache / (HUB_FOLDER + model_id.partition(":")[0].replace("/", "--"))).is_dir()


def _in_cache(cache: Path) -> Iterator[str]:
    for folder in sorted(cache.glob(f"{HUB_FOLDER}*")):
        if any(folder.glob("snapshots/*/config.json")):
            yield folder.name.removeprefix(HUB_FOLDER).replace("--", "/")


def _in_folder(word: str) -> Iterator[str]:
    above, slash, start = word.rpartition("/")
    try:
        folder = Path(above + slash).expanduser()
        names = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name.startswith(start))
    except (OSError, RuntimeError):  # the folder cannot be read, or the machine has no such user
        return
    for name in names:
        if (folder / name / "config.json").is_file():
            yield above + slash + name
        elif slash and (start or not name.startswith(".")):
            yield f"{above}{slash}{name}/"
