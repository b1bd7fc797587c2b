"""The file in which a launcher tells where its engine serves: for scripts that let the kernel choose the port."""

import logging
import os
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger("text_generation_launcher")


class AddressFile:
    """The file has the whole address, or is not there. `path` None: there is no file."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._written = ""

    def write(self, address: str) -> None:
        """An address that cannot be written is logged: the engine serves, and fronts that know it go on."""
        if self._path is None or address == self._written:
            return
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}.partial")
        try:
            partial.write_text(f"{address}\n")
            partial.replace(self._path)
        except OSError as error:
            logger.error("--engine-address-file %s cannot be written: %s", self._path, error.strerror)
            return
        self._written = address

    def remove(self) -> None:
        """Removes the file that `write` has made."""
        if self._path is not None and self._written:
            with suppress(OSError):
                self._path.unlink()
