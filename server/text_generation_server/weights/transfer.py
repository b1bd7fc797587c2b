"""Downloads files over HTTP into the hub's cache, and continues the downloads of a killed process.

huggingface_hub 0.x kept a partial file and resumed it; since 1.x every process starts anew with its own file. So the
bytes are downloaded here, into `blobs/<etag>.tgi.incomplete`, checked, and renamed to `blobs/<etag>`. There every
version of huggingface_hub finds the file as if it had downloaded the file itself.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TypeVar

import httpx

from text_generation_common.errors import WeightsError
from text_generation_common.report import parted
from text_generation_server.errors import NetworkError, SilentHub
from text_generation_server.weights.progress import Progress

CONNECTIONS = 4
CHUNK_BYTES = 1 << 18  # small, because progress is noted after each chunk
FIRST_LOOK = 1 << 20  # bytes of a file after which its beginning is examined for the first time
TIMEOUT = httpx.Timeout(10.0, read=30.0)
# Status codes after which another try may succeed.
TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504}

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Blob:
    name: str  # the file's name in the model
    url: str
    path: Path  # where the file goes in the cache
    size: int | None
    sha256: str | None  # None for small files, whose hash the hub does not give
    # Examines the beginning of a file, of which some bytes are there. False: it needs more of them. WeightsError ends
    # the download.
    examine: Callable[[Path], bool] | None = None

    @property
    def partial(self) -> Path:
        return self.path.with_name(f"{self.path.name}.tgi.incomplete")


@dataclass(frozen=True, slots=True)
class Retries:
    tries: int = 5
    pause_s: float = 5.0
    silent_tries: int = 2  # before the first answer of a hub: its address, or the network, is probably wrong

    def run(self, action: Callable[[], T], sleep: Callable[[float], object] = time.sleep) -> T:
        """Repeats `action` after a NetworkError; after the last try the error is raised. Other errors are raised at
        once.
        """
        for number in range(2, self.tries + 1):
            try:
                return action()
            except NetworkError as error:
                is_silent = isinstance(error, SilentHub)
                tries = min(self.tries, self.silent_tries) if is_silent else self.tries
                if number > tries:
                    raise
                cause, _ = parted(str(error))
                # The error that ends the command would repeat the cause of a hub that never answers.
                log = logger.debug if is_silent else logger.warning
                log("%s: try %d of %d follows in %g s", cause, number, tries, self.pause_s)
                sleep(self.pause_s)
        return action()


def fetch_all(blobs: Sequence[Blob], headers: dict[str, str], progress: Progress, retries: Retries) -> None:
    """Downloads the files that are missing, a few at a time. The first error stops all downloads."""
    needed = [blob for blob in blobs if not blob.path.exists()]
    _check_disk_space(needed)
    stop = threading.Event()
    with (
        httpx.Client(headers=headers, timeout=TIMEOUT, follow_redirects=True) as client,
        ThreadPoolExecutor(CONNECTIONS) as pool,
    ):
        fetch_one = partial(_fetch_one, client=client, progress=progress, retries=retries, stop=stop)
        jobs = [pool.submit(fetch_one, blob) for blob in needed]
        try:
            done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
        for job in done:
            job.result()


def _fetch_one(blob: Blob, client: httpx.Client, progress: Progress, retries: Retries, stop: threading.Event) -> None:
    retries.run(lambda: fetch(blob, client, progress, stop), sleep=stop.wait)
    progress.finished(blob.name)


def fetch(blob: Blob, client: httpx.Client, progress: Progress, stop: threading.Event) -> None:
    """Downloads and checks `blob.path`. If it raises, the received bytes are kept for the next try."""
    if stop.is_set():
        raise WeightsError(f"download of {blob.name} was stopped")
    blob.path.parent.mkdir(parents=True, exist_ok=True)
    with _disk_errors(blob), blob.partial.open("ab", buffering=0) as file:
        _lock(file, blob)
        if blob.path.exists():
            blob.partial.unlink(missing_ok=True)
            return
        if file.seek(0, os.SEEK_END) != blob.size:
            _receive(blob, file, client, progress, stop)
        _check(blob, file)
        os.fsync(file.fileno())
        blob.partial.replace(blob.path)


def _lock(file: FileIO, blob: Blob) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("Another process is downloading %s: waiting for it", blob.name)
        fcntl.flock(file, fcntl.LOCK_EX)


def _receive(blob: Blob, file: FileIO, client: httpx.Client, progress: Progress, stop: threading.Event) -> None:
    """Appends the rest of the file, or writes it anew if the server cannot continue or the partial file is too long."""
    held = file.seek(0, os.SEEK_END)
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={held}-"} if held else {})
    with _network_errors(blob), client.stream("GET", blob.url, headers=headers) as response:
        status = response.status_code
        if status == 416 or (status == 206 and not _starts_at(response, held)):
            file.truncate(0)
            raise NetworkError(f"{blob.url} cannot continue at byte {held}: starting again")
        if status in TRANSIENT_STATUS:
            raise NetworkError(f"{blob.url} answered {status}")
        if status not in (200, 206):
            raise WeightsError(f"{blob.url} answered {status}, so {blob.name} cannot be downloaded")
        if status == 200:
            file.truncate(held := 0)
        progress.received(blob.name, held)
        beginning = _Beginning(blob, file)
        for chunk in response.iter_bytes(CHUNK_BYTES):
            if stop.is_set():
                raise WeightsError(f"download of {blob.name} was stopped")
            file.write(chunk)
            held += len(chunk)
            progress.received(blob.name, held)
            beginning.look(held)


class _Beginning:
    """Examines a file while it arrives: after its first bytes, and whenever they have doubled, until that succeeds."""

    def __init__(self, blob: Blob, file: FileIO) -> None:
        self._blob, self._file = blob, file
        self._next = float("inf") if blob.examine is None else FIRST_LOOK

    def look(self, held: int) -> None:
        """WeightsError if the file is refused. Nothing of it is kept then."""
        blob = self._blob
        if blob.examine is None or held < min(self._next, blob.size or self._next):
            return
        try:
            self._next = float("inf") if blob.examine(blob.partial) else 2 * held
        except WeightsError:
            self._file.truncate(0)
            raise


def _starts_at(response: httpx.Response, held: int) -> bool:
    return bool(response.headers.get("Content-Range", "").startswith(f"bytes {held}-"))


def _check(blob: Blob, file: FileIO) -> None:
    size = file.seek(0, os.SEEK_END)
    if blob.size is not None and size < blob.size:
        raise NetworkError(f"download of {blob.name} broke off after {size} of {blob.size} bytes")
    if blob.size is not None and size > blob.size:
        file.truncate(0)
        raise NetworkError(f"{blob.name} arrived with {size} bytes instead of {blob.size}")
    if blob.sha256 is not None:
        with blob.partial.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != blob.sha256:
            file.truncate(0)
            raise NetworkError(f"{blob.name} arrived damaged: its sha256 is {digest} instead of {blob.sha256}")


def _check_disk_space(blobs: Sequence[Blob]) -> None:
    if not blobs:
        return
    folder = blobs[0].path.parent
    folder.mkdir(parents=True, exist_ok=True)
    held = sum(blob.partial.stat().st_size for blob in blobs if blob.partial.exists())
    needed, free = sum(blob.size or 0 for blob in blobs) - held, shutil.disk_usage(folder).free
    if needed > free:
        raise WeightsError(f"{folder} has {free / 1e9:.1f} GB free and the download needs {needed / 1e9:.1f} GB more")


@contextmanager
def _network_errors(blob: Blob) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise NetworkError(f"download of {blob.name} broke off ({reason}): run the same command to go on") from error


@contextmanager
def _disk_errors(blob: Blob) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeightsError(f"{blob.path} cannot be written: {error.strerror or error}") from error
