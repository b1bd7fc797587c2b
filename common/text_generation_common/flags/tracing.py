"""Checks of --otlp-endpoint that launcher and router make, without loading what sends traces."""

import importlib.util
from urllib.parse import urlsplit

# Modules of the packages of tgi-py[otlp].
MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter")


def refusal(endpoint: str | None) -> tuple[str, str] | None:
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
