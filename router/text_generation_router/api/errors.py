"""Errors to HTTP, in the one place that does so."""

from http import HTTPStatus

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from text_generation_router.api.closing import ClosingResponse
from text_generation_router.api.encoding import json_response, to_event, to_json
from text_generation_router.api.limits import LimitHits
from text_generation_router.errors import (
    HeadersTooLargeError,
    InferenceError,
    PayloadTooLargeError,
    ShuttingDownError,
)
from text_generation_router.metrics import Limit

CLIENT_GONE = 499  # nginx's number; nobody is there to read it
# What the client goes on sending is not worth reading.
CLOSING = (HeadersTooLargeError, PayloadTooLargeError, ShuttingDownError)


def error_response(error: InferenceError) -> Response:
    content, headers = error_json(error), error_headers(error)
    if isinstance(error, CLOSING):
        return ClosingResponse(to_json(content), error.status, headers, "application/json")
    return json_response(content, headers, error.status)


def error_bytes(error: InferenceError) -> bytes:
    """The whole answer to a client that never got as far as a request. It ends the connection."""
    body = to_json(error_json(error))
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **error_headers(error),
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def error_json(error: InferenceError) -> dict[str, str]:
    return {"error": error.text, "error_type": error.error_type}


def error_headers(error: InferenceError) -> dict[str, str]:
    return {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}


def error_event(error: InferenceError) -> bytes:
    """How a native stream says that it failed; its status is 200 all the same."""
    return to_event(error_json(error))


def openai_error_event(error: InferenceError) -> bytes:
    return to_event({"error": {"message": error.text, "http_status_code": error.status}})


def add_error_handlers(app: FastAPI, hits: LimitHits) -> None:
    @app.exception_handler(InferenceError)
    async def inference_error(_: Request, error: InferenceError) -> Response:
        if isinstance(error, PayloadTooLargeError):
            hits.count(Limit.BODY_SIZE)
        return error_response(error)

    @app.exception_handler(ClientDisconnect)
    async def client_gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        """Empty, as TGI answers unknown paths and methods."""
        headers = {"allow": allowed_methods(app, request.url.path)} if error.status_code == 405 else None
        return Response(status_code=error.status_code, headers=headers)


def allowed_methods(app: FastAPI, path: str) -> str:
    """Of all routes of the path: Starlette would name those of the first alone."""
    routes = (route for route in app.routes if isinstance(route, Route) and route.path == path)
    return ",".join(sorted({method for route in routes for method in route.methods or ()}))
