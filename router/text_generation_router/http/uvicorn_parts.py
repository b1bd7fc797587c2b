"""The parts of uvicorn that are not its public interface, and that `Connection`, `Server` and `cycles.py` build on."""

from collections.abc import Iterable
from types import FunctionType

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from text_generation_router.errors import StartError

# Names by class. A method that uvicorn does not call any more would leave a limit without effect, and say nothing.
PARTS: dict[type, tuple[str, ...]] = {
    HttpToolsProtocol: (
        *("_start_asgi_task", "_unset_keepalive_if_required", "timeout_keep_alive_handler"),
        *("connection_made", "connection_lost", "data_received", "eof_received", "pause_writing", "resume_writing"),
        *("on_message_begin", "on_header", "on_headers_complete", "on_body", "on_message_complete"),
        *("on_response_complete", "send_400_response"),
        *("app", "client", "connections", "cycle", "flow", "headers", "parser", "timeout_keep_alive", "url"),
        *("timeout_keep_alive_task", "transport"),
    ),
    RequestResponseCycle: (
        *("run_asgi", "send", "receive", "chunked_encoding", "default_headers", "disconnected"),
        *("expected_content_length", "flow", "keep_alive", "message_event", "more_body", "response_complete"),
        *("response_started", "scope", "transport", "waiting_for_100_continue"),
    ),
    uvicorn.Server: ("startup", "shutdown", "on_tick", "capture_signals", "server_state", "servers", "force_exit"),
}


def check_uvicorn(version: str = uvicorn.__version__) -> None:
    """Raises StartError if the installed uvicorn lacks a part."""
    missing = [f"{owner.__name__}.{name}" for owner, names in PARTS.items() for name in missing_in(owner, names)]
    if missing:
        raise StartError(
            f'uvicorn {version} has no {", ".join(missing)}, which this server builds on: install "uvicorn>=0.46,<0.55"'
        )


def missing_in(owner: type, names: Iterable[str]) -> list[str]:
    """Names that the class does not have, and that none of its methods sets or reads."""
    methods = (value for value in vars(owner).values() if isinstance(value, FunctionType))
    known = set(dir(owner)).union(*(method.__code__.co_names for method in methods))
    return [name for name in names if name not in known]
