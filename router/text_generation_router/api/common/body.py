"""Receives a request's body up to a size limit, and reads it: a small body on the event loop, a large body in a child
process.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request

from text_generation_router.api.common.body_kinds import Read, RequestBody, job_of, read_answer
from text_generation_router.api.common.fields import Body, ListLimits
from text_generation_router.api.common.ignored import IgnoredParameters
from text_generation_router.errors import (
    OverloadedError,
    PayloadTooLargeError,
    TooExpensiveError,
    UnsupportedMediaTypeError,
)
from text_generation_router.http.caller import Callers
from text_generation_router.http.disconnect import unless_disconnected
from text_generation_router.http.room import OwnerLimits
from text_generation_router.offload.errors import BusyError, JobFailedError, JobLostError, JobTimeoutError
from text_generation_router.offload.malloc import Tidying

B = TypeVar("B", bound=Body)

# Bodies of more than LARGE_BYTES bytes are read in a child process: a body of this size takes the event loop at most 3
# to 5 ms.
LARGE_BYTES = 2**16
# Seconds for a child process to read a body and to render its prompt.
READ_S = 10.0
# Maximum number of one owner's large bodies in memory. A body counts from its first LARGE_BYTES bytes until it has been
# read.
OWNERS_BODIES = 16
# Seconds that a large body may wait until fewer than OWNERS_BODIES of its owner are in memory.
WAIT_S = 30.0


class Offload(Protocol):
    async def run(self, name: str, content: bytes, timeout_s: float, tenant: str = "") -> bytes:
        """Runs the job `name` on `content` in a child process. Raises JobError."""


class Bodies:
    """Reads the bodies of all requests. `limits` is called for each body, because the limits follow from the shards'
    memory, which may change."""

    def __init__(
        self,
        payload_limit: int,
        limits: Callable[[], ListLimits],
        callers: Callers,
        offload: Offload,
        ignored: IgnoredParameters,
        tidying: Tidying | None = None,
    ) -> None:
        self._payload_limit = payload_limit
        self._limits = limits
        self._callers = callers
        self._offload = offload
        self._ignored = ignored
        self._places = OwnerLimits(OWNERS_BODIES, WAIT_S)
        self.tidying = tidying or Tidying()

    async def read(self, request: Request, kind: RequestBody[B]) -> B:
        """Reads and checks the body. Raises BodyError if the body does not have the form of `kind`, ValidationError
        if a field is refused.
        """
        read = await self._read(request, kind)
        self._ignored.note(request, read.unknown, kind.known)
        self._ignored.note_left_out(request, read.left_out)
        return read.asked

    async def _read(self, request: Request, kind: RequestBody[B]) -> Read[B]:
        self._check_headers(request)
        incoming = Incoming(request, self._payload_limit)
        if await incoming.is_complete_within(LARGE_BYTES):
            return kind.read(bytes(incoming.content), self._limits())
        owner = self._callers.owner_of(request)
        with self.tidying.after():
            async with self._places.one_of(owner):
                await incoming.is_complete_within(self._payload_limit)
                job = job_of(incoming.content, self._limits())
                del incoming
                answer = await unless_disconnected(request.receive, self._run(kind.name, job, owner))
                return read_answer(kind, answer)

    def _check_headers(self, request: Request) -> None:
        if not _is_json(request.headers.get("content-type", "")):
            raise UnsupportedMediaTypeError
        announced = request.headers.get("content-length", "")
        # The number of digits is compared first: int() refuses more than 4,300 digits.
        if (
            announced.isascii()
            and announced.isdigit()
            and (len(announced) > 18 or int(announced) > self._payload_limit)
        ):
            raise PayloadTooLargeError(self._payload_limit)

    async def _run(self, name: str, job: bytes, owner: str) -> bytes:
        try:
            try:
                return await self._offload.run(name, job, READ_S, owner)
            except JobLostError:  # the child's end may have another cause than this job, so the job is tried once more
                return await self._offload.run(name, job, READ_S, owner)
        except BusyError as error:
            raise OverloadedError from error
        except (JobTimeoutError, JobLostError) as error:
            raise TooExpensiveError(READ_S) from error
        except JobFailedError as error:
            if error.reason == MemoryError.__name__:
                raise TooExpensiveError(READ_S) from error
            raise


class Incoming:
    """A body's content received so far."""

    def __init__(self, request: Request, limit: int) -> None:
        self.content = bytearray()
        self._request = request
        self._limit = limit
        self._has_ended = False

    async def is_complete_within(self, size: int) -> bool:
        """Receives until the body has ended. Returns False, or raises PayloadTooLargeError beyond the body limit, once
        the body is larger than `size`."""
        while not self._has_ended and len(self.content) <= size:
            message = await self._request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self.content += message.get("body", b"")
            self._has_ended = not message.get("more_body")
            if len(self.content) > self._limit:
                raise PayloadTooLargeError(self._limit)
        return len(self.content) <= size


def _is_json(content_type: str) -> bool:
    kind = content_type.split(";", 1)[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
