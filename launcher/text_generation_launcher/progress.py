"""Shows the progress of a download, as a child reports it: a bar on a terminal, a log line now and then elsewhere."""

import logging
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

# Seconds between two log lines.
LINE_S = 5.0
CLEAR = "\r\x1b[K"  # to the start of the line, and clear it
MIN_BAR, MAX_BAR = 10, 40


class DownloadDisplay:
    """Takes the log records of the download. `terminal` is where a bar can be drawn, or None."""

    def __init__(
        self, terminal: TextIO | None, has_fields: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`has_fields`: whether log lines keep the numbers as fields."""
        self._terminal = terminal
        self._has_fields = has_fields
        self._clock = clock
        self._logged_s = clock()
        self._is_drawn = False

    def takes(self, record: logging.LogRecord) -> bool:
        """Whether the record needs no log line: it is shown as a bar, or soon after another of its kind."""
        fields = getattr(record, "fields", {})
        if "received_bytes" not in fields:
            self.clear()
            return False
        if self._terminal is not None:
            self._draw(self._terminal, record.getMessage(), fields)
            return True
        now_s = self._clock()
        is_last = fields.get("left_s") == 0
        if now_s - self._logged_s < LINE_S and not is_last:
            return True
        self._logged_s = now_s
        if not self._has_fields:
            vars(record)["fields"] = {}
        return False

    def clear(self) -> None:
        """Removes the bar, so that a log line can take its place."""
        if self._terminal is not None and self._is_drawn:
            self._terminal.write(CLEAR)
            self._terminal.flush()
        self._is_drawn = False

    def _draw(self, terminal: TextIO, text: str, fields: dict[str, int]) -> None:
        columns = shutil.get_terminal_size().columns - 1
        width = min(MAX_BAR, columns - len(text) - 3)
        bar = ""
        if width >= MIN_BAR and fields["total_bytes"]:
            done = min(width, width * fields["received_bytes"] // fields["total_bytes"])
            bar = f" [{'#' * done}{'.' * (width - done)}]"
        terminal.write(f"{CLEAR}{(text + bar)[:columns]}")
        terminal.flush()
        self._is_drawn = True


def make_display(json_output: bool) -> DownloadDisplay:
    terminal = None if json_output else next((each for each in (sys.stderr, sys.stdout) if each.isatty()), None)
    return DownloadDisplay(terminal, has_fields=json_output)
