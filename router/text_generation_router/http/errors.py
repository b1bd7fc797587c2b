"""Turns errors into HTTP answers. No other file of the router does this."""

from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from text_generation_router.errors import (
    InferenceError,
    InternalError,
    MethodError,
    NoSuchRouteError,
    PayloadTooLargeError,
)
from text_generation_router.http.answer_headers import added_headers
from text_generation_router.http.closing import ClosingResponse
from text_generation_router.http.dialects import ErrorDialect, ErrorDialects
from text_generation_router.http.encoding import json_response, to_json
from text_generation_router.http.limits import LimitHits
from text_generation_router.http.request_log import CLIENT_GONE
from text_generation_router.metrics.metrics import Limit


def error_response(error: InferenceError, dialect: ErrorDialect) -> Response:
    content, headers, status = dialect.answer(error), error_headers(error, dialect), dialect.status(error)
    if error.closes:
        return ClosingResponse(to_json(content), status, headers, "application/json")
    return json_response(content, headers, status)


def error_bytes(error: InferenceError, dialect: ErrorDialect) -> bytes:
    """A complete HTTP answer that ends the connection, for refusals that do not pass through the application."""
    body, status = to_json(dialect.answer(error)), dialect.status(error)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **error_headers(error, dialect),
    }
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def error_headers(error: InferenceError, dialect: ErrorDialect) -> dict[str, str]:
    retry = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return {**error.headers, **retry, **dialect.headers(error)}


def add_error_handlers(app: Starlette, hits: LimitHits, dialects: ErrorDialects) -> None:
    async def inference_error(request: Request, error: InferenceError) -> Response:
        if isinstance(error, PayloadTooLargeError):
            hits.count(Limit.BODY_SIZE)
        return error_response(error, dialects.of(request.url.path))

    async def client_gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_GONE)

    async def no_such_route(request: Request, error: HTTPException) -> Response:
        """Answers a request for a missing route or method: 404 and 405 are the only HTTPExceptions that Starlette
        itself raises.
        """
        path = request.url.path
        is_method = error.status_code == HTTPStatus.METHOD_NOT_ALLOWED
        error_here = MethodError(allowed_methods(app, path)) if is_method else NoSuchRouteError()
        return error_response(error_here, dialects.of(path))

    async def mistake(request: Request, _: Exception) -> Response:
        """Answers an unexpected exception. Starlette raises the exception again after the answer, so that uvicorn logs
        it.
        """
        response = error_response(InternalError(), dialects.of(request.url.path))
        # Starlette makes this answer outside of all middlewares.
        response.raw_headers.extend(added_headers(request.scope))
        return response

    handlers: dict[type[Exception], Any] = {
        InferenceError: inference_error,
        ClientDisconnect: client_gone,
        HTTPException: no_such_route,
        Exception: mistake,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def allowed_methods(app: Starlette, path: str) -> str:
    """Methods of all routes of `path`. Starlette itself would name only the methods of the first route."""
    routes = (route for route in app.routes if isinstance(route, Route) and route.path_regex.match(path))
    return ",".join(sorted({method for route in routes for method in route.methods or ()}))
