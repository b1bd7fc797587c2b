"""Shows the progress of a download: a bar on a terminal, plain log lines elsewhere."""

import logging
import sys
import threading
import time
from datetime import timedelta
from typing import Protocol

from huggingface_hub.utils.tqdm import are_progress_bars_disabled, tqdm

logger = logging.getLogger(__name__)


class Progress(Protocol):
    """Shows the progress of downloads. All methods are called from several threads."""

    def received(self, name: str, num_bytes: int) -> None:
        """Notes that `num_bytes` of the file have been received, including bytes of earlier tries."""

    def finished(self, name: str) -> None: ...


class Quiet:
    """A progress that shows nothing, for small files."""

    def received(self, name: str, num_bytes: int) -> None:
        pass

    def finished(self, name: str) -> None:
        pass


class Lines:
    """Logs a line for each finished file. The estimated time assumes that all files have the same size, as a model's
    parts have.
    """

    def __init__(self, num_files: int) -> None:
        self._num_files = num_files
        self._num_finished = 0
        self._start = time.monotonic()
        self._lock = threading.Lock()

    def received(self, name: str, num_bytes: int) -> None:
        pass

    def finished(self, name: str) -> None:
        with self._lock:
            self._num_finished += 1
            elapsed_s = time.monotonic() - self._start
            left_s = round(elapsed_s / self._num_finished * (self._num_files - self._num_finished))
            logger.info("Download: [%d/%d] -- ETA: %s", self._num_finished, self._num_files, timedelta(seconds=left_s))


class Bar:
    """Shows one bar for the bytes of all files, on stderr."""

    def __init__(self, num_files: int, num_bytes: int) -> None:
        self._bar = tqdm(total=num_bytes or None, unit="B", unit_scale=True, desc="Download")  # type: ignore[no-untyped-call]
        self._num_left = num_files
        self._received: dict[str, int] = {}
        self._lock = threading.Lock()

    def received(self, name: str, num_bytes: int) -> None:
        with self._lock:
            self._bar.update(num_bytes - self._received.get(name, 0))
            self._received[name] = num_bytes

    def finished(self, name: str) -> None:
        with self._lock:
            self._num_left -= 1
            if not self._num_left:
                self._bar.close()


def make_progress(num_files: int, num_bytes: int) -> Progress:
    if sys.stderr.isatty() and not are_progress_bars_disabled():
        return Bar(num_files, num_bytes)
    return Lines(num_files)
