"""Downloads one revision of a model from the hub into the cache."""

import re
from collections.abc import Callable, Iterable, Set
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi, HfFileMetadata, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from text_generation_common.errors import WeightsError
from text_generation_common.model_files import limit_bytes
from text_generation_common.version import named
from text_generation_common.weights.headers import read_index
from text_generation_common.weights.names import is_plain
from text_generation_server.weights.access import HubAccess, described
from text_generation_server.weights.hub_errors import hub_errors, mentioned_if_slow
from text_generation_server.weights.progress import Progress, Quiet, make_progress
from text_generation_server.weights.transfer import Blob, Retries, fetch_all

_CACHE_KEY = re.compile(r"[\w-]+", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_API_TIMEOUT_S = 10.0

Choose = Callable[[Iterable[str], Set[str] | None], list[str]]


class HubSnapshot:
    """One revision of a model. Asks the hub once for the revision's commit, and takes every file from that commit.

    `finish` records the revision in the cache, so an incomplete model is not found under its revision.
    """

    def __init__(self, model_id: str, revision: str, access: HubAccess, retries: Retries) -> None:
        self.model = described(model_id, revision)  # the model's name for errors
        self._model_id = model_id
        self._revision = revision
        self._access = access
        self._retries = retries
        self._commit, self.listing = retries.run(self._ask)
        self._folder = access.cache / repo_folder_name(repo_id=model_id, repo_type="model")
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
        if absent := [name for name in names if name not in self.listing]:
            raise WeightsError(f"{self._model_id} has no {absent[0]}, which its {index_name} names")
        blobs = self._absent(names)
        needed = [blob for blob in blobs if not blob.path.exists()]
        num_bytes = sum(blob.size or 0 for blob in needed)
        self._fetch(blobs, make_progress(len(needed), num_bytes, self._access.progress) if needed else Quiet())
        return bool(names)

    def finish(self) -> Path:
        if self._revision != self._commit:
            ref = self._folder / "refs" / self._revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            temporary = ref.with_name(f"{ref.name}.tgi.incomplete")
            temporary.write_text(self._commit)
            temporary.replace(ref)
        return self.path

    def _ask(self) -> tuple[str, list[str]]:
        with hub_errors(self._model_id, self._revision), mentioned_if_slow(self.model):
            api = HfApi(token=self._access.token, **named())
            info = api.model_info(self._model_id, revision=self._revision, timeout=_API_TIMEOUT_S)
        if not info.sha or not _CACHE_KEY.fullmatch(info.sha):
            raise WeightsError(f"the hub does not name the commit of {self.model}: try again later")
        return info.sha, [file.rfilename for file in info.siblings or () if is_plain(file.rfilename)]

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
        with hub_errors(self._model_id, self._revision), mentioned_if_slow(self.model):
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
