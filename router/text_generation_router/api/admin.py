"""The routes of administrators, with a key of their own: the state of replicas, and their wanted number."""

from collections.abc import Collection
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from text_generation_common.link import ReplicaReport
from text_generation_router.errors import (
    InvalidJsonError,
    PayloadTooLargeError,
    ScalingError,
    UnauthorizedError,
    UnprocessableError,
)
from text_generation_router.http.encoding import json_response
from text_generation_router.http.keys import allowed_digest, authorization_of
from text_generation_router.text.json_depth import read_json

# Maximum size of a body in bytes.
BODY_BYTES = 4096
NO_REPLICAS = "this server starts no replicas: start it with --replicas"


class ReplicaControl(Protocol):
    """The launcher's control of its replicas, as a front uses it."""

    @property
    def report(self) -> ReplicaReport | None:
        """The replicas; None: the launcher has no replicas, or has not reported them yet."""

    async def scale(self, wanted: int) -> None:
        """Asks for another number of replicas. Raises ScalingError."""


class AdminRoutes:
    def __init__(self, key_digest: bytes, replicas: ReplicaControl | None) -> None:
        """`key_digest`: digest of the administrators' key. `replicas` None: there is no launcher with replicas."""
        self._digests = (key_digest,)
        self._replicas = replicas

    async def replicas(self, request: Request) -> Response:
        """The state of each replica."""
        check_key(request, self._digests)
        return json_response(_json_of(self._report()))

    async def scale(self, request: Request) -> Response:
        """Asks for another number of replicas, and answers before they are there."""
        check_key(request, self._digests)
        self._report()
        wanted = _wanted(await read_body(request, BODY_BYTES))
        assert self._replicas is not None
        await self._replicas.scale(wanted)
        return json_response(_json_of(self._report()))

    def _report(self) -> ReplicaReport:
        report = self._replicas.report if self._replicas is not None else None
        if report is None:
            raise ScalingError(NO_REPLICAS)
        return report


def check_key(request: Request, digests: Collection[bytes]) -> None:
    """Raises UnauthorizedError without the administrators' key. The comparison takes the same time for every header,
    and without a header."""
    if allowed_digest(authorization_of(request.scope), digests) is None:
        raise UnauthorizedError


async def read_body(request: Request, most: int) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise PayloadTooLargeError(most)
    return body


def _wanted(body: bytes) -> int:
    try:
        fields: Any = read_json(body)
    except ValueError as error:
        raise InvalidJsonError(str(error)) from None
    if not isinstance(fields, dict) or fields.keys() != {"replicas"}:
        raise UnprocessableError("", 'give {"replicas": NUMBER} and nothing else')
    if type(wanted := fields["replicas"]) is not int:
        raise UnprocessableError("replicas", "give a whole number")
    return wanted


def _json_of(report: ReplicaReport) -> dict[str, Any]:
    return report.as_json()
