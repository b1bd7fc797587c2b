"""`--print-config`: the values that a start would use, each with its source, and what a start would refuse.

What is printed is a file for --config: a value that was given and is not refused is a line of TOML, all else comments.
"""

import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from text_generation_common import report
from text_generation_common.addresses import without_service_links
from text_generation_common.errors import CommandError
from text_generation_common.flags.declaration import Flag, flag_name, values_of, with_flags
from text_generation_common.flags.programs import LAUNCHER
from text_generation_common.secret_values import is_secret
from text_generation_common.version import OFF
from text_generation_launcher import checks, config_file, model
from text_generation_launcher.config import LauncherConfig, LaunchPlan
from text_generation_launcher.local_models import hub_cache, is_in_cache
from text_generation_launcher.preflight import check_before_start
from text_generation_launcher.resolve import DEVICE_VARIABLES, resolve, with_prefill_budget

logger = logging.getLogger("text_generation_launcher")

HEADER = "# text-generation-launcher --print-config: the values of a start, as a file for --config"
WIDTH = 40  # characters of the column with values
# Variables without a flag: those that this server and libraries read, and those of TGI's launcher and of images.
READ = ("LOG_LEVEL", "XDG_RUNTIME_DIR", *DEVICE_VARIABLES)
OF_LIBRARIES = ("HF_", "HUGGING_FACE_", "NCCL_", "OMP_", "OTEL_")
UNREAD = (
    *("ATTENTION", "COMPUTE_TYPE", "PREFILL_CHUNKING", "TGI_WIGGLE_ROOM", "USE_FLASH_ATTENTION"),
    *("HF_MODEL_ID", "HF_MODEL_QUANTIZE", "HF_MODEL_REVISION", "HF_MODEL_TRUST_REMOTE_CODE", "SM_NUM_GPUS"),
    "SAGEMAKER_BIND_TO_PORT",
)
# Flags and variables of which the value of a flag is made that is not given. The first that is given is the origin.
_ORIGINS: Mapping[str, tuple[str, ...]] = {
    "num_shard": ("sharded", *DEVICE_VARIABLES),
    "served_model_name": ("model_id",),
    "max_input_tokens": ("max_input_length",),
    "rope_scaling": ("rope_factor",),
    "rope_factor": ("rope_scaling",),
    "replicas": ("min_replicas", "max_replicas"),
    "api_workers": ("replicas", "max_replicas", "engines", "engines_dns", "engines_file"),
    "max_batch_prefill_tokens": ("max_batch_total_tokens", "model_id"),
}
_SOURCES = {"COMMANDLINE": "flag", "ENVIRONMENT": "variable {variable}", "DEFAULT_MAP": "file {file}"}
_LOGIN = re.compile(r"//[^/@\s]*@")  # a password may stand before an address's host


@dataclass(frozen=True, slots=True)
class Given:
    """A command line, as far as it can be read."""

    config: LauncherConfig
    sources: Mapping[str, str]  # click's name of the source of each flag's value
    faults: Mapping[str, str | None]  # what cannot be read, by its text: the flag's name, None if it is not one flag


def print_config(given: Given, environ: Mapping[str, str], echo: Callable[..., None]) -> int:
    """Returns the exit status: 1 if a start would refuse anything. No process of a server starts, no hub is asked."""
    missing = {flag.name: error for flag, error in checks.unsupported(given.config)}
    with _kept_lines() as notes:
        plan, errors = _planned(given.config, missing, environ)
    if plan is not None and _is_here(plan, environ):
        plan = with_prefill_budget(plan, model.model_config(plan))
    for line in (*_Lines(given, plan, missing, environ), *(f"# note: {note}" for note in notes)):
        echo(" ".join(line.splitlines()).encode(errors="backslashreplace").decode())
    faults = [*map(report.parted, given.faults), *((each.reason, each.hint) for each in (*missing.values(), *errors))]
    for cause, hint in faults:
        echo(report.told(cause, hint, "ArgumentValidation", given.config.process.json_output), err=True)
    return 1 if faults else 0


def _planned(
    config: LauncherConfig, missing: Collection[str], environ: Mapping[str, str]
) -> tuple[LaunchPlan | None, list[CommandError]]:
    """The plan of a start without the flags `missing`, and what ends that start."""
    if config.config and (line := config_file.exposure(config.config)):
        logger.warning("%s", line)
    flags = list(LAUNCHER.flags_of(LauncherConfig))
    environ = without_service_links([flag.variable for flag in flags], environ, logger)
    defaults = {flag.name: flag.default for flag in flags if flag.name in missing}
    plan = None
    try:
        plan = resolve(with_flags(config, **defaults), environ)
        if _is_here(plan, environ):
            check_before_start(plan, environ)
        else:
            logger.info("%s is not on this machine: it is checked when it is downloaded", plan.model_id)
    except CommandError as error:
        if plan is None:
            logger.info("Values that are made of others are not known before the last error is mended")
        return plan, [error]
    return plan, []


def _is_here(plan: LaunchPlan, environ: Mapping[str, str]) -> bool:
    """Whether files of the model may be on this machine. If not, the hub's library, which takes long, is not loaded."""
    return model.is_local(plan) or is_in_cache(plan.model_id, hub_cache(environ, plan.cache.huggingface_hub_cache))


class _Lines:
    """The lines of all values."""

    def __init__(
        self, given: Given, plan: LaunchPlan | None, missing: Collection[str], environ: Mapping[str, str]
    ) -> None:
        self._given, self._environ = given, environ
        self._values = values_of(given.config)
        self._final = self._values | ({} if plan is None else values_of(plan))
        self._unread = {*filter(None, given.faults.values())}
        self._refused = self._unread.union(missing)

    def __iter__(self) -> Iterator[str]:
        yield HEADER
        for flag in LAUNCHER.flags_of(LauncherConfig):
            if flag.name not in config_file.OF_COMMAND_LINE and (not flag.hidden or self._has(flag.name)):
                yield self._line(flag)
        for name in sorted(self._environ):
            if name in UNREAD:
                yield f"# {name} is set, and the launcher does not read it"
            elif (name in READ or name.startswith(OF_LIBRARIES)) and name not in OFF:
                yield f"# {_shown(name, self._environ[name])}"

    def _line(self, flag: Flag) -> str:
        """A flag's value, and where it comes from."""
        value, final = self._values[flag.name], self._final[flag.name]
        if flag.name in self._unread and self._given.sources[flag.name] == "ENVIRONMENT":
            value = self._environ.get(flag.variable or "", "")  # as it is written
        source = self._source(flag) if self._has(flag.name) else self._origin(flag.name)
        is_made = self._has(flag.name) and final != value and flag.name not in self._refused
        is_used = self._has(flag.name) and flag.name not in self._refused and not _is_hidden(flag.name, value)
        # A name in HOSTNAME chooses no address, and a file's `hostname` would.
        mark = "" if is_used and not (flag.is_address and is_made) else "# "
        line = mark + _shown(flag.flag_name.removeprefix("--"), value if self._has(flag.name) else final)
        end = ": refused" if flag.name in self._refused else f"; resolved to {_toml(final)}" if is_made else ""
        return f"{line:{WIDTH}}  # {source}{end}"

    def _has(self, name: str) -> bool:
        return self._given.sources.get(name, "") in _SOURCES

    def _source(self, flag: Flag) -> str:
        file = self._given.config.config
        return _SOURCES[self._given.sources[flag.name]].format(variable=flag.variable, file=file)

    def _origin(self, name: str) -> str:
        """Where a value comes from that is not given."""
        if self._final[name] == self._values[name]:
            return "default"
        found = (each for each in _ORIGINS.get(name, ()) if self._has(each) or each in self._environ)
        origin = next(found, None)
        return "default" if origin is None else f"resolved from {origin if origin.isupper() else flag_name(origin)}"


def _shown(name: str, value: Any) -> str:
    """Name and value in TOML, or in words what TOML has no value for. Secrets are not shown."""
    if value is None or value == ():
        return f"{name} is not set"
    return f"{name} is set, and not shown" if _is_hidden(name, value) else f"{name} = {_toml(value)}"


def _is_hidden(name: str, value: Any) -> bool:
    """Whether the value is a secret, or an address with a login."""
    return bool(value) and (is_secret(name.replace("-", "_")) or _LOGIN.search(str(value)) is not None)


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)  # inf and nan are words of TOML too
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


@contextmanager
def _kept_lines() -> Iterator[list[str]]:
    """Collects what the launcher logs meanwhile."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    before = logger.level, logger.propagate
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
