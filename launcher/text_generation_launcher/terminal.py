"""The log on a terminal: a few short lines in local time, the last one of a start being the server's address alone.

Where the log goes to a file or a pipe, or is JSON, nothing of this has an effect.
"""

import logging
import re
import shutil
import time
from collections.abc import Mapping
from typing import Any, TextIO

from text_generation_common.logs import LEVELS, exception_text, text_of

# The lines of a start and an end, and what a terminal shows in their place; None: nothing. The first rule that fits
# holds. `\1` is the first group.
RULES: tuple[tuple[str, str | None], ...] = (
    (r"Serving the demo model", "The demo model, which ships with the package: another by --model-id"),
    (r"Serving (.+) api=(\S+) docs=", "Ready: \\1, with /docs and /metrics; ^C stops\n\\2"),
    (r"Starting shard$", "Loading the model"),
    (r"Server started at \S+ \(([^;]+?\)?)(?:;.*)?\)(?: \w+=\d+)*$", r"Loaded, warming up: \1"),
    (r"Waiting for shard to be ready", "Still loading"),
    (r"Setting max batch total tokens to (\d+)", r"Room for \1 tokens"),
    (r"Port \d+ was chosen for --port 0", None),
    (r"Starting check and download process for ([^\s/]+/[^\s/]+)$", r"Checking the files of \1"),
    (r"Starting check and download process|Successfully downloaded weights|Files are already present on", None),
    (r"Default `max_batch_prefill_tokens`|loaded \d+ tensors, |Shard ready in |Starting Webserver", None),
    (r"Warming up model|Connected(?: worker=\d+)?$|Starting Engine|Engine serves its fronts at unix:", None),
    (r"engine unix:\S+ is (?:connected|left)|signal received, |Replica has left", None),
    (r"Terminating webserver", "Stopping after the last request; ^C again: at once"),
    (r"Shutting down shards|Terminating \w+$|(?:webserver|check) terminated", None),
    (r"(?:shard|engine|download) terminated", "Stopped"),
)
_RULES = tuple((re.compile(pattern), shown) for pattern, shown in RULES)
_RESET, _BOLD, _DIM = "\x1b[0m", "\x1b[1m", "\x1b[2m"
_COLORS = {"WARNING": "\x1b[33m", "ERROR": "\x1b[31m"}


def write_for_people(stdout: TextIO, environ: Mapping[str, str], json_output: bool) -> None:
    """Lets the log's lines be those of this module if they go to a terminal.
    LOG_LEVEL=debug keeps every line."""
    level = environ.get("LOG_LEVEL", "info")
    is_detailed = any(LEVELS.get(part.rpartition("=")[2].strip().lower()) == "DEBUG" for part in level.split(","))
    if json_output or is_detailed or not stdout.isatty():
        return
    screen = Screen(has_colors=not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb")
    for handler in logging.getLogger().handlers:
        handler.addFilter(screen.filter)
        handler.setFormatter(screen)


class Screen(logging.Formatter):
    """A filter of log records, and the formatter of those that it lets pass."""

    def __init__(self, has_colors: bool) -> None:
        super().__init__()
        self._has_colors = has_colors
        self._shown: set[str] = set()  # what rules have shown: several processes may log the same

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether there is anything to show; sets `record.shown`, a line of a rule, or None for all others."""
        record.shown = None
        if record.levelno > logging.INFO:  # Something has failed, and may start again.
            self._shown.clear()
            return True
        text = text_of(record)
        if text.startswith("Success total_time="):
            record.shown = answered(vars(record)["fields"])
            return True
        found = next(((match, shown) for rule, shown in _RULES if (match := rule.match(text)) is not None), None)
        if found is None:
            return True
        match, shown = found
        if shown is None or (line := match.expand(shown)) in self._shown:
            return False
        self._shown.add(line)
        record.shown = line
        return True

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        if (shown := vars(record)["shown"]) is not None:
            line, _, address = shown.partition("\n")
            line = shortened(line, shutil.get_terminal_size().columns - len(clock) - 2)
            return f"{self._styled(clock, _DIM)}  {line}" + (f"\n{self._styled(address, _BOLD)}" if address else "")
        level = f"{self._styled(record.levelname, _COLORS.get(record.levelname, ''))} "
        line = f"{self._styled(clock, _DIM)}  {'' if record.levelno == logging.INFO else level}{text_of(record)}"
        exception = exception_text(self, record)
        return f"{line}\n{exception}" if exception else line

    def _styled(self, text: str, style: str) -> str:
        return f"{style}{text}{_RESET}" if self._has_colors and style else text


def answered(fields: Mapping[str, Any]) -> str:
    """The end of a generation, as a person reads it: numbers of tokens, seconds and speed."""
    seconds, tokens = fields["total_time_s"], fields["generated_tokens"]
    speed = f", {tokens / seconds:.0f} tokens/s" if seconds else ""
    counts = f"{fields['prompt_tokens']} in, {tokens} out"
    return f"{fields['route']} {fields['finish_reason']}: {counts}, {seconds:.2f} s{speed}"


def shortened(text: str, columns: int) -> str:
    """`text`, without its middle if it is longer than a line."""
    if len(text) <= columns or columns < 3:
        return text
    half = (columns - 1) // 2
    return f"{text[: columns - 1 - half]}…{text[-half:]}"
