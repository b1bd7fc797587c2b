"""Flags that every process of a server has, and TGI's flags whose features are missing."""

import importlib.util
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import urlsplit

from text_generation_common.flags.declaration import flag
from text_generation_common.flags.kinds import Topic


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFlags:
    TOPIC: ClassVar = Topic.LOGS
    json_output: bool = flag(False, "Write each log line as one JSON object.")
    # Used by tests of this project. It has no environment variable, because a variable can be inherited by accident.
    testing: bool = flag(False, "Let processes fail at the places that FAILPOINTS names.", env=False, hidden=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class InheritedFlags:
    """Flags that the processes of a server read from the environment, which they share."""

    failpoints: str = flag("", "Places at which this process fails, with --testing.", hidden=True)
    runtime_dir: str = flag("", "The folder in which the folders of all ports lie.", env="XDG_RUNTIME_DIR", hidden=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingFlags:
    TOPIC: ClassVar = Topic.LOGS
    otlp_endpoint: str | None = flag(
        None,
        "Send a trace of each request to this collector, by OTLP over gRPC, as in http://localhost:4317; needs the "
        "packages of tgi-py[otlp].",
    )
    otlp_service_name: str = flag(
        "text-generation-inference.router",
        "Name of the service in traces; used with --otlp-endpoint only.",
        no_effect="the name is for traces, which need --otlp-endpoint",
        unless="otlp_endpoint",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsentFlags:
    """Flags of TGI's launcher and router whose features are missing: refused, or accepted without effect."""

    TOPIC: ClassVar = Topic.ABSENT
    trust_remote_code: bool = flag(
        False, "Not supported yet: code from a model repository is never run.", refused_except=(False,)
    )
    ngrok: bool = flag(False, "Not supported yet.", refused_except=(False,))
    ngrok_authtoken: str | None = flag(None, "Not supported yet.", refused_except=(None,))
    ngrok_edge: str | None = flag(None, "Not supported yet.", refused_except=(None,))
    prometheus_port: int | None = flag(
        None,
        "Accepted without effect; /metrics is served on --port.",
        min=0,
        max=65535,
        no_effect="metrics are served on --port at /metrics",
    )
    usage_stats: str | None = flag(
        None, "Accepted without effect; no usage is ever sent.", no_effect="no usage is ever sent"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsentShardFlags:
    """Flags of TGI's shards whose features are missing: refused, or accepted without effect."""

    TOPIC: ClassVar = Topic.ABSENT
    speculate: int | None = flag(None, "Not supported yet; 0 is off.", min=0, refused_except=(None, 0))
    disable_custom_kernels: bool = flag(
        False,
        "Accepted without effect; there are no custom kernels.",
        no_effect="there are no custom kernels to disable",
    )
    master_addr: str = flag(
        "localhost", "Accepted without effect; shards meet through a file.", no_effect="shards meet through a file"
    )
    master_port: int = flag(
        29500,
        "Accepted without effect; shards meet through a file.",
        min=0,
        max=65535,
        no_effect="shards meet through a file",
    )


# Modules of the packages of tgi-py[otlp].
MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter")


def tracing_refusal(endpoint: str | None) -> tuple[str, str] | None:
    """Why no traces can be sent to `endpoint`, and what to do. None: they can be, or none are wanted."""
    if endpoint is None:
        return None
    if not _is_address(endpoint):
        return f"--otlp-endpoint {endpoint} is not an address", "write it as http://HOST:PORT or https://HOST:PORT"
    if not all(map(_is_installed, MODULES)):
        return "--otlp-endpoint needs OpenTelemetry, which is not installed", "pip install 'tgi-py[otlp]'"
    return None


def _is_address(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # the port is not a number, or too large
        return False


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package around the module is missing
        return False
