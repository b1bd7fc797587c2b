"""The OpenAPI form of one operation: parameters, body, answers, errors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from text_generation_router.errors import InferenceError
from text_generation_router.http.dialects import ANTHROPIC, OPENAI, ErrorDialect, ErrorDialects
from text_generation_router.openapi import failures
from text_generation_router.openapi.anthropic_answers import AnthropicErrorJson
from text_generation_router.openapi.native_answers import ErrorJson
from text_generation_router.openapi.operations import (
    ADAPTER_OPERATIONS,
    ADMIN_OPERATIONS,
    OPERATIONS,
    VIEW_OPERATIONS,
    Access,
    Operation,
)
from text_generation_router.openapi.v1_answers import V1ErrorJson

# Schemas of bodies, answers and events, by the operation's name and the part.
Schemas = Mapping[str, dict[str, Any]]
ANSWER_HEADERS = {
    "X-Request-Id": "The id of the request: the client's own, or a random one.",
    "X-Ignored-Parameters": "Fields of the request that are unknown and had no effect.",
    "Retry-After": "Seconds until the request may succeed.",
    "Www-Authenticate": "The scheme of the key: Bearer.",
    "X-Should-Retry": "`false`: OpenAI's clients do not send the request again.",
}
X_REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "An id for answers and log lines: at most 128 letters, digits or `._:/+=@-`.",
    "schema": {"type": "string"},
}
CALLER = [
    {
        "name": "X-Request-Timeout",
        "in": "header",
        "description": "Seconds from the receipt of the request. A text that is not complete by then ends there.",
        "schema": {"type": "string", "pattern": r"^[0-9]{1,6}(\.[0-9]{1,6})?$"},
    },
    {
        "name": "X-Tenant",
        "in": "header",
        "description": "The tenant that the request is for. Requests of different tenants take turns.",
        "schema": {"type": "string", "maxLength": 128},
    },
]
NAME = {
    "name": "name",
    "in": "path",
    "required": True,
    "description": "The model's name or hub id.",
    "schema": {"type": "string", "minLength": 1},
}
REQUEST_ID = {
    "name": "id",
    "in": "path",
    "required": True,
    "description": "The id of a request, as in its header `X-Request-Id`.",
    "schema": {"type": "string", "minLength": 1},
}
EVENTS = "Server-sent events: each line `data: ` has one object, of the schema in `x-event`, or an error."


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """What of the server the document depends on."""

    version: str
    has_keys: bool = False
    closed_routes: bool = False
    tgi_dialect: bool = False
    has_admin: bool = False
    loads_adapters: bool = False
    engine_view: bool = False

    @property
    def operations(self) -> tuple[Operation, ...]:
        shown = VIEW_OPERATIONS if self.has_admin or self.engine_view else ()
        loading = ADAPTER_OPERATIONS if self.loads_adapters else ()
        return (*OPERATIONS, *(ADMIN_OPERATIONS if self.has_admin else ()), *loading, *shown)

    def needs_key(self, operation: Operation) -> bool:
        closed = operation.access is Access.ALWAYS or (operation.access is Access.CLOSED and self.closed_routes)
        return self.has_keys and closed


def operation_json(operation: Operation, interface: Interface, schemas: Schemas) -> dict[str, Any]:
    made: dict[str, Any] = {
        "tags": [operation.tag.value[0]],
        "operationId": operation.name,
        "summary": operation.summary,
        "description": f"{operation.summary} {operation.description}".strip(),
        "parameters": _parameters(operation),
        "responses": {"200": _success(operation, schemas)} | _errors(operation, interface),
    }
    if operation.body is not None:
        examples = {name: {"value": value} for name, value in operation.examples.items()}
        content = {"schema": schemas[f"{operation.name} body"], "examples": examples}
        made["requestBody"] = {"required": True, "content": {"application/json": content}}
    if interface.needs_key(operation):
        made["security"] = [{"key": []}]
    if operation.access is Access.ADMIN and interface.has_admin:
        made["security"] = [{"admin_key": []}]
    return made


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    path = [parameter for parameter in (NAME, REQUEST_ID) if f"{{{parameter['name']}}}" in operation.path]
    return [*path, X_REQUEST_ID, *(CALLER if operation.body is not None else ())]


def _success(operation: Operation, schemas: Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content["application/json"] = {"schema": schemas[f"{operation.name} answer"]}
    if operation.text is not None:
        content[operation.text] = {"schema": {"type": "string"}}
    if operation.event is not None:
        event = schemas[f"{operation.name} event"]
        content["text/event-stream"] = {"schema": {"type": "string", "description": EVENTS, "x-event": event}}
    ignored = ("X-Ignored-Parameters",) if operation.body is not None else ()
    answer = {"description": "The answer.", "headers": _headers("X-Request-Id", *ignored)}
    return answer | {"content": content} if content else answer


def _errors(operation: Operation, interface: Interface) -> dict[str, Any]:
    kinds = (*failures.ANY, *(failures.KEY if interface.needs_key(operation) else ()), *operation.errors)
    dialect = ErrorDialects(interface.tgi_dialect).of(operation.path)
    found = failures.by_status(kinds, dialect)
    return {str(status): _error(errors, dialect) for status, errors in found.items()}


def _error(errors: list[InferenceError], dialect: ErrorDialect) -> dict[str, Any]:
    types = ", ".join(dict.fromkeys(f"`{error.error_type}`" for error in errors))
    names = {"X-Request-Id"}
    for error in errors:
        names |= {name.title() for name in (*error.headers, *dialect.headers(error))}
        names |= {"Retry-After"} if error.retry_after_s is not None else set()
    model = AnthropicErrorJson if dialect is ANTHROPIC else V1ErrorJson if dialect is OPENAI else ErrorJson
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {
        "description": f"Errors of the kinds {types}.",
        "headers": _headers(*sorted(names)),
        "content": {"application/json": {"schema": schema}},
    }


def _headers(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}
