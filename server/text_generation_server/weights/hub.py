"""Finds the directory of a model id: a local directory, or one in the hub's cache, into which one revision of the model
is downloaded if necessary. The hub's errors become ours.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from huggingface_hub import (
    HfApi,
    HfFileMetadata,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from text_generation_common import file_names
from text_generation_common.errors import WeightsError, first_line
from text_generation_common.file_names import is_plain
from text_generation_common.gguf.choice import SUFFIX
from text_generation_common.gguf.hub_choice import HubName, cached_file, chosen_files, hub_name, is_fetched_as_gguf
from text_generation_common.gguf.side_files import refuse_beginning
from text_generation_common.model_files import limit_bytes
from text_generation_common.models.served import read_served
from text_generation_common.version import named
from text_generation_common.weights.headers import read_index, read_json, refuse_quantized
from text_generation_server.errors import NetworkError, SilentHub
from text_generation_server.weights.files import HubAccess, described, local_directory
from text_generation_server.weights.progress import Progress, Quiet, make_progress
from text_generation_server.weights.transfer import TRANSIENT_STATUS, Blob, Retries, fetch_all

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
    """The directory of a revision in the cache, complete or not, or its GGUF file, complete. None if the cache has no
    file of it."""
    name = _named(model_id)
    checked = _checked(revision)
    if file := cached_file(access.cache, name, checked):
        return file
    if name.tag is not None:
        return None
    with hub_errors(model_id, revision):
        config = try_to_load_from_cache(name.repository, "config.json", access.cache, checked)
    return Path(config).parent if isinstance(config, str) else None


def download(
    model_id: str,
    revision: str | None,
    access: HubAccess | None = None,
    pickles_too: bool = True,
    retries: Retries | None = None,
) -> Path:
    """Downloads the files that serving needs and returns their directory in the cache, or the GGUF file there.
    Continues an earlier download.

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


def _fetch(snapshot: "HubSnapshot", pickles_too: bool) -> Path:
    if is_fetched_as_gguf(snapshot.name, snapshot.listing):
        files = chosen_files(snapshot.name, snapshot.listing)
        snapshot.fetch_files(files, refuse_beginning)
        return snapshot.finish() / files[0]
    snapshot.fetch_side_files(file_names.side_files(snapshot.listing))
    if "config.json" in snapshot.listing:  # Checked before the weights are downloaded, which are large.
        refuse_quantized(snapshot.path, read_json(snapshot.path / "config.json"))
        read_served(snapshot.path)
    if not snapshot.fetch_weights(file_names.INDEX, file_names.safetensors_names):
        if not pickles_too:
            raise WeightsError(f"{snapshot.model} has no .safetensors weights, and --no-auto-convert is set")
        logger.warning("No safetensors weights found for %s. Downloading PyTorch weights.", snapshot.model)
        if not snapshot.fetch_weights(file_names.PICKLE_INDEX, file_names.pickle_names):
            raise WeightsError(f"{snapshot.model} has no .safetensors, .bin or .pt weights")
    return snapshot.finish()


def _named(model_id: str) -> HubName:
    name = hub_name(model_id)
    if name is None:
        raise WeightsError(f"{model_id!r} is not a model id like `owner/name` or `owner/name:Q4_K_M`")
    return name


def _checked(revision: str | None) -> str:
    """The revision. WeightsError if the cache would turn it into a path outside the cache."""
    revision = revision or constants.DEFAULT_REVISION
    if not _REVISION.fullmatch(revision) or {".", ".."} & set(revision.split("/")):
        raise WeightsError(f"{revision!r} is not a revision: give a branch, a tag or a commit")
    return revision


def _is_wanted(name: str) -> bool:
    """Whether a file may be one of the model's: at the top level, or the part of a GGUF file in a folder there."""
    folder, _, last = name.rpartition("/")
    return is_plain(last) and (not folder or (is_plain(folder) and last.endswith(SUFFIX)))


_CACHE_KEY = re.compile(r"[\w-]+", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_API_TIMEOUT_S = 10.0

Choose = Callable[[Iterable[str], Set[str] | None], list[str]]
Examine = Callable[[int, str, Sequence[str], Path], bool]  # size, name, names of all files, where it arrives


class HubSnapshot:
    """One revision of a model. Asks the hub once for the revision's commit, and takes every file from that commit.

    `finish` records the revision in the cache, so an incomplete model is not found under its revision.
    """

    def __init__(self, model_id: str, revision: str, access: HubAccess, retries: Retries) -> None:
        self.model = described(model_id, revision)  # the model's name for errors
        self.name = _named(model_id)
        self._model_id = self.name.repository
        self._revision = revision
        self._access = access
        self._retries = retries
        self._commit, self.listing = retries.run(self._ask)
        self._folder = access.cache / repo_folder_name(repo_id=self._model_id, repo_type="model")
        self.path = self._folder / "snapshots" / self._commit

    def fetch_side_files(self, names: list[str]) -> None:
        """Downloads the files `names`. WeightsError for a file that is larger than the limit of `model_files`."""
        blobs = self._absent(names)
        for blob in blobs:
            limit = limit_bytes(blob.name)
            if blob.size is not None and blob.size > limit:
                raise WeightsError(f"{blob.name} of {self.model} has {blob.size} bytes: more than {limit} are refused")
        self._fetch(blobs, Quiet())

    def fetch_weights(self, index_name: str, choose: Choose) -> bool:
        """Downloads the index, if there is one, and the weights that `choose` finds with it. Returns
        False if `choose` finds none."""
        if index_name in self.listing:
            self.fetch_side_files([index_name])
        index = read_index(self.path / index_name)
        names = choose(self.listing, None if index is None else set(index.values()))
        self.fetch_files(names)
        return bool(names)

    def fetch_files(self, names: list[str], examine: Examine | None = None) -> None:
        """Downloads large files, and shows how far it is. `examine` sees their beginnings."""
        if absent := [name for name in names if name not in self.listing]:
            raise WeightsError(f"{self._model_id} has no {absent[0]}, which another of its files names")
        blobs = self._absent(names)
        if examine is not None:
            blobs = [replace(blob, examine=partial(examine, blob.size or 0, blob.name, names)) for blob in blobs]
        needed = [blob for blob in blobs if not blob.path.exists()]
        num_bytes = sum(blob.size or 0 for blob in needed)
        self._fetch(blobs, make_progress(len(needed), num_bytes, self._access.progress) if needed else Quiet())

    def finish(self) -> Path:
        if self._revision != self._commit:
            ref = self._folder / "refs" / self._revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            temporary = ref.with_name(f"{ref.name}.tgi.incomplete")
            temporary.write_text(self._commit)
            temporary.replace(ref)
        return self.path

    def _ask(self) -> tuple[str, list[str]]:
        with hub_errors(self._model_id, self._revision, SilentHub):
            api = HfApi(token=self._access.token, **named())
            info = api.model_info(self._model_id, revision=self._revision, timeout=_API_TIMEOUT_S)
        if not info.sha or not _CACHE_KEY.fullmatch(info.sha):
            raise WeightsError(f"the hub does not name the commit of {self.model}: try again later")
        return info.sha, [file.rfilename for file in info.siblings or () if _is_wanted(file.rfilename)]

    def _absent(self, names: list[str]) -> list[Blob]:
        return [self._blob(name) for name in names if not (self.path / name).exists()]

    def _blob(self, name: str) -> Blob:
        url = hf_hub_url(self._model_id, name, revision=self._commit)
        metadata = self._retries.run(lambda: self._metadata(url))
        etag = metadata.etag or ""
        if not _CACHE_KEY.fullmatch(etag):
            raise WeightsError(f"the hub gives no usable ETag for {name} of {self._model_id}")
        sha256 = etag if _SHA256.fullmatch(etag) else None
        return Blob(name, url, self._folder / "blobs" / etag, metadata.size, sha256)

    def _metadata(self, url: str) -> HfFileMetadata:
        with hub_errors(self._model_id, self._revision):
            return get_hf_file_metadata(url, token=self._access.token, **named())

    def _fetch(self, blobs: list[Blob], progress: Progress) -> None:
        try:
            fetch_all(blobs, build_hf_headers(token=self._access.token, **named()), progress, self._retries)
        finally:
            progress.close()
        for blob in blobs:
            self._retries.run(partial(self._link, blob.name))

    def _link(self, name: str) -> None:
        """Lets huggingface_hub link the downloaded file into the snapshot, in the form that its cache needs."""
        with hub_errors(self._model_id, self._revision):
            hf_hub_download(
                self._model_id,
                name,
                revision=self._commit,
                cache_dir=self._access.cache,
                token=self._access.token,
                **named(),
            )


# huggingface_hub uses requests (0.x), httpx (1.x) or httpx2 (2.x). Its HTTP error is derived from that library's HTTP
# error. The outermost class above it is the base of the library's connection errors too.
_TRANSPORT_ERROR: type[Exception] = [base for base in HfHubHTTPError.__mro__ if base.__module__ != "builtins"][-1]


@contextmanager
def hub_errors(model_id: str, revision: str | None, unreachable: type[NetworkError] = NetworkError) -> Iterator[None]:
    """Turns huggingface_hub's errors into WeightsError, or into NetworkError if trying again may help; `unreachable`
    if there is no answer."""
    try:
        yield
    except GatedRepoError as error:
        raise WeightsError(
            f"{model_id} is gated: ask for access on its page, then set HF_TOKEN to a token of yours"
        ) from error
    except RepositoryNotFoundError as error:
        raise WeightsError(
            f"{model_id} was not found at {constants.ENDPOINT}, or is private: check the name, or set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise WeightsError(f"{model_id} has no revision {revision}") from error
    except HFValidationError as error:
        raise WeightsError(f"{model_id!r} is not a valid model id: {first_line(error)}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        text = f"{constants.ENDPOINT} answered {status} for {described(model_id, revision)}"
        raise (NetworkError if status in TRANSIENT_STATUS else WeightsError)(text) from error
    except (LocalEntryNotFoundError, _TRANSPORT_ERROR) as error:
        raise unreachable(
            f"{constants.ENDPOINT} cannot be reached for {described(model_id, revision)} ({first_line(error)}): "
            "check the connection, then run the same command again"
        ) from error
