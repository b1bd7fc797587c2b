"""A request's body: received up to a limit, and read where that holds nobody up."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request

from text_generation_router.api.asking import Question
from text_generation_router.api.caller import Callers
from text_generation_router.api.disconnect import unless_disconnected
from text_generation_router.api.fields import Body, ListLimits
from text_generation_router.api.reading_child import job_of, read_answer
from text_generation_router.errors import (
    OverloadedError,
    PayloadTooLargeError,
    TooExpensiveError,
    UnsupportedMediaTypeError,
)
from text_generation_router.offload.errors import BusyError, JobFailedError, JobLostError, JobTimeoutError

B = TypeVar("B", bound=Body)

# Larger bodies are read in a child process: with the dearest content this many bytes take the event loop 5 ms.
LARGE_BYTES = 2**16
# For a child to read a body and to render its prompt.
READ_S = 10.0


class Offload(Protocol):
    async def run(self, name: str, content: bytes, timeout_s: float, tenant: str = "", heavy: bool = False) -> bytes:
        """Raises JobError."""


class Bodies:
    """`limits` is asked for each body: they follow from the shards' memory, which may change."""

    def __init__(
        self, payload_limit: int, limits: Callable[[], ListLimits], callers: Callers, offload: Offload
    ) -> None:
        self._payload_limit = payload_limit
        self._limits = limits
        self._callers = callers
        self._offload = offload

    async def read(self, request: Request, question: Question[B]) -> B:
        """Raises BodyError for what is not such a request, ValidationError for what is refused by its name."""
        content = await receive_json(request, self._payload_limit)
        if len(content) <= LARGE_BYTES:
            return question.read(content, self._limits())
        job = job_of(content, self._limits())
        del content
        owner = self._callers.owner_of(request)
        answer = await unless_disconnected(request.receive, self._run(question.name, job, owner))
        return read_answer(question, answer)

    async def _run(self, name: str, job: bytes, owner: str) -> bytes:
        try:
            try:
                return await self._offload.run(name, job, READ_S, owner, heavy=True)
            except JobLostError:  # perhaps somebody killed the child
                return await self._offload.run(name, job, READ_S, owner, heavy=True)
        except BusyError as error:
            raise OverloadedError from error
        except (JobTimeoutError, JobLostError) as error:
            raise TooExpensiveError(READ_S) from error
        except JobFailedError as error:
            if error.reason == MemoryError.__name__:
                raise TooExpensiveError(READ_S) from error
            raise


async def receive_json(request: Request, limit: int) -> bytes:
    """A body that calls itself JSON. Raises BodyError; of more than `limit` bytes nothing is kept."""
    if not _is_json(request.headers.get("content-type", "")):
        raise UnsupportedMediaTypeError
    announced = request.headers.get("content-length", "")
    # int() refuses numbers of more than 4,300 digits.
    if announced.isascii() and announced.isdigit() and (len(announced) > 18 or int(announced) > limit):
        raise PayloadTooLargeError(limit)
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > limit:
            raise PayloadTooLargeError(limit)
        if not message.get("more_body"):
            return bytes(body)


def _is_json(content_type: str) -> bool:
    kind = content_type.split(";", 1)[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
