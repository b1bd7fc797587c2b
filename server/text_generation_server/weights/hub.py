"""Finds the directory of a model id: a local directory, or one in the hub's cache, downloaded if necessary."""

import logging
import re
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache

from text_generation_common.errors import WeightsError
from text_generation_common.models.served import read_served
from text_generation_common.weights import names
from text_generation_common.weights.headers import read_json, refuse_quantized
from text_generation_server.weights.access import HubAccess, described, local_directory
from text_generation_server.weights.hub_errors import hub_errors
from text_generation_server.weights.snapshot import HubSnapshot
from text_generation_server.weights.transfer import Retries

logger = logging.getLogger(__name__)

_REVISION = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)


def resolve(model_id: str, revision: str | None, access: HubAccess | None = None) -> Path:
    """The directory of a model on this machine. Uses no network. WeightsError if the model is not on this machine."""
    access = access or HubAccess()
    path = local_directory(model_id, access) or cached_snapshot(model_id, revision, access)
    if path is None:
        raise WeightsError(
            f"{described(model_id, revision)} is not in the cache {access.cache}: "
            f"run `text-generation-server download-weights {model_id}` first"
        )
    return path


def cached_snapshot(model_id: str, revision: str | None, access: HubAccess) -> Path | None:
    """The directory of a revision in the cache, complete or not, or None if the cache has no file of it."""
    with hub_errors(model_id, revision):
        config = try_to_load_from_cache(model_id, "config.json", access.cache, _checked(revision))
    return Path(config).parent if isinstance(config, str) else None


def download(
    model_id: str,
    revision: str | None,
    access: HubAccess | None = None,
    pickles_too: bool = True,
    retries: Retries | None = None,
) -> Path:
    """Downloads the files that serving needs and returns their directory in the cache. Continues an earlier download.

    Weights in PyTorch's own format are downloaded only if there are no safetensors, and only with `pickles_too`.
    NetworkError if the hub cannot be reached after all tries, WeightsError for all other failures.
    """
    access = access or HubAccess()
    if constants.HF_HUB_OFFLINE:
        raise WeightsError(
            f"{described(model_id, revision)} is not whole in the cache {access.cache}, and HF_HUB_OFFLINE is set: "
            "unset it to download"
        )
    try:
        return _fetch(HubSnapshot(model_id, _checked(revision), access, retries or Retries()), pickles_too)
    except OSError as error:
        raise WeightsError(f"the cache {access.cache} cannot be written: {error.strerror or error}") from error


def _fetch(snapshot: HubSnapshot, pickles_too: bool) -> Path:
    snapshot.fetch_side_files(names.side_files(snapshot.listing))
    if "config.json" in snapshot.listing:  # Checked before the weights are downloaded, which are large.
        refuse_quantized(snapshot.path, read_json(snapshot.path / "config.json"))
        read_served(snapshot.path)
    if not snapshot.fetch_weights(names.INDEX, names.safetensors_names):
        if not pickles_too:
            raise WeightsError(f"{snapshot.model} has no .safetensors weights, and --no-auto-convert is set")
        logger.warning("No safetensors weights found for %s. Downloading PyTorch weights.", snapshot.model)
        if not snapshot.fetch_weights(names.PICKLE_INDEX, names.pickle_names):
            if found := names.only_gguf(snapshot.listing):
                raise WeightsError(f"{snapshot.model} has GGUF files only, such as {found}: {names.GGUF_HINT}")
            raise WeightsError(f"{snapshot.model} has no .safetensors, .bin or .pt weights")
    return snapshot.finish()


def _checked(revision: str | None) -> str:
    """The revision. WeightsError if the cache would turn it into a path outside the cache."""
    revision = revision or constants.DEFAULT_REVISION
    if not _REVISION.fullmatch(revision) or {".", ".."} & set(revision.split("/")):
        raise WeightsError(f"{revision!r} is not a revision: give a branch, a tag or a commit")
    return revision
