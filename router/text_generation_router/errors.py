"""The router's errors: one tree for requests, one tree for the shards, and StartError.

`http/errors.py` turns an InferenceError into an HTTP answer with the status shown here; on OpenAI's routes 422 becomes
400, and 424 becomes 500.

    InferenceError
    ├── ValidationError             422
    │   ├── TooLongError                422
    │   ├── UnsupportedParameterError   422
    │   ├── UnknownParameterError       422
    │   └── GrammarError                422
    ├── UnknownModelError           404
    ├── TemplateError               422
    ├── ToolError                   422
    ├── SuffixError                 422
    ├── TooManyPromptsError         422
    ├── OverloadedError             429
    ├── DeadlineError               504
    ├── GenerationError             424
    ├── IncompleteGenerationError   500
    ├── IncompleteStreamError       500
    ├── InternalError               500
    ├── UnhealthyError              503
    ├── ShuttingDownError           503
    ├── TooManyConnectionsError     503
    ├── RequestTimeoutError         408
    ├── HeadersTooLargeError        431
    ├── InvalidRequestError         400
    │   ├── SmallChunksError            400
    │   └── PipelineError               400
    ├── CodingError                 501
    ├── UnauthorizedError           401
    ├── NoSuchRouteError            404
    ├── ScalingError                409
    ├── AdapterError                400
    │   ├── NoSuchAdapterError          404
    │   └── AdapterUnsettledError       503
    ├── MethodError                 405
    └── BodyError
        ├── UnsupportedMediaTypeError   415
        │   └── EncodedBodyError            415
        ├── PayloadTooLargeError        413
        ├── InvalidJsonError            400
        ├── UnprocessableError          422
        └── TooExpensiveError           422
    RefusedError                    `api/common/generation_stream.py` turns it into an InferenceError
    StartError                      `cli.py` prints the error and exits with status 1
    ShardsError                     `engine/` gives the shards up and waits for new ones
    ├── WarmupRefusedError          at the first warm-up: the router ends; later: as ShardsError
    ├── StepFailedError             the shards are kept; all running requests start again
    └── StepAbortedError            a step behind a failed step; ignored, as the failed step is handled
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Self


class InferenceError(Exception):
    """An error of a request, with TGI's `error` text, `error_type` and HTTP status. `label` is the `err` of
    tgi_request_failure.
    """

    error_type: str
    status: int
    label: str
    text: str  # set by the class where all its errors have the same
    retry_after_s: int | None = None  # seconds until a retry may succeed; None: the error is not temporary
    headers: Mapping[str, str] = MappingProxyType({})  # additional headers of the answer
    param: str | None = None  # path of the field that is wrong
    code: str | None = None  # OpenAI's `code`
    is_counted: bool = False  # whether tgi_request_failure has counted this error
    closes: bool = False  # whether the answer ends the connection, because the rest of the request is not read

    def __init__(self, text: str | None = None, param: str | None = None) -> None:
        self.text = self.text if text is None else text
        super().__init__(self.text)
        self.param = param or self.param

    @classmethod
    def restored(cls, text: str, param: str | None = None) -> Self:
        """An error that was raised in another process: `text` is its complete text, prefix included."""
        error = cls.__new__(cls, text)
        error.text = text
        error.param = param or cls.param
        return error


class ValidationError(InferenceError):
    error_type, status, label = "validation", 422, "validation"

    def __init__(self, reason: str, param: str | None) -> None:
        super().__init__(f"Input validation error: {reason}", param)

    @classmethod
    def of(cls, name: str, why: str) -> Self:
        """The error of a field, whose text begins with the field's name."""
        return cls(f"`{name}` {why}", name)


class TooLongError(ValidationError):
    """The prompt, or prompt and output, are longer than the server allows."""

    code = "context_length_exceeded"


class UnsupportedParameterError(ValidationError):
    code = "unsupported_parameter"

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"`{name}` {why}", name)


class UnknownParameterError(ValidationError):
    """Raised with `--strict-parameters` only."""

    code = "unknown_parameter"

    def __init__(self, name: str, close: str) -> None:
        """`close`: a known name that resembles it, or ""."""
        hint = f"did you mean `{close}`?" if close else "/docs lists the fields of each route"
        super().__init__(f"`{name}` is not a field of this route: {hint}", name)


class GrammarError(ValidationError):
    """The grammar in `field` is refused. The native field has TGI's words."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"grammar is not valid: {reason}" if field == "grammar" else f"`{field}`: {reason}", field)


class UnknownModelError(InferenceError):
    """Raised with `--strict-parameters` only."""

    error_type, status, label, code = "model_not_found", 404, "validation", "model_not_found"
    param = "model"

    def __init__(self, name: str, served: str) -> None:
        super().__init__(f"The model `{name}` does not exist here: the server has `{served}`")


class TemplateError(InferenceError):
    error_type, status, label = "template_error", 422, "template"

    def __init__(self, reason: str, param: str | None = "messages") -> None:
        super().__init__(f"Template error: {reason}", param)


class ToolError(InferenceError):
    error_type, status, label = "tool_error", 422, "validation"

    def __init__(self, reason: str, param: str = "tools") -> None:
        super().__init__(f"Tool error: {reason}", param)


class OverloadedError(InferenceError):
    error_type, status, label = "overloaded", 429, "overloaded"

    def __init__(self, retry_after_s: int = 1) -> None:
        super().__init__("Model is overloaded")
        self.retry_after_s = max(retry_after_s, 1)


class DeadlineError(InferenceError):
    error_type, status, label = "deadline", 504, "deadline"
    text = "The request timed out before its first token: give it a longer timeout, or send it again later"


class GenerationError(InferenceError):
    error_type, status, label = "generation", 424, "generation"

    def __init__(self, reason: str) -> None:
        super().__init__(f"Request failed during generation: {reason}")


class IncompleteGenerationError(InferenceError):
    error_type, status, label = "incomplete_generation", 500, "incomplete"
    text = "Incomplete generation"


class IncompleteStreamError(InferenceError):
    error_type, status, label = "incomplete_generation_stream", 500, "incomplete"
    text = "Incomplete generation stream"


class SuffixError(InferenceError):
    error_type, status, label = "suffix not supported", 422, "validation"
    param = "suffix"
    text = "Suffix is not supported and can be achieved by preprocessing the prompt."


class TooManyPromptsError(InferenceError):
    error_type, status, label = "batch size exceeded", 422, "validation"
    param = "prompt"

    def __init__(self, limit: int) -> None:
        super().__init__(f"Number of prompts exceeds the maximum allowed batch size of {limit}")


class UnhealthyError(InferenceError):
    error_type, status, label = "healthcheck", 503, "healthcheck"
    text = "unhealthy"


class ShuttingDownError(InferenceError):
    error_type, status, label = "unavailable", 503, "unavailable"
    closes = True
    retry_after_s = 1
    text = "The server is shutting down: send the request to another server"


class TooManyConnectionsError(InferenceError):
    error_type, status, label = "unavailable", 503, "unavailable"
    closes = True
    retry_after_s = 1
    text = "Too many connections are open: try again later"


class RequestTimeoutError(InferenceError):
    error_type, status, label = "timeout", 408, "timeout"

    def __init__(self, part: str, seconds: float) -> None:
        super().__init__(f"The request's {part} did not arrive within {seconds:g} seconds")


class HeadersTooLargeError(InferenceError):
    error_type, status, label = "headers_too_large", 431, "headers"
    closes = True

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request's headers are too large, send at most {limit} bytes")


class InvalidRequestError(InferenceError):
    error_type, status, label = "invalid_request", 400, "request"
    closes = True

    def __init__(self, reason: str) -> None:
        super().__init__(f"Invalid HTTP request: {reason}")


class SmallChunksError(InvalidRequestError):
    def __init__(self, chunk_bytes: int) -> None:
        super().__init__(
            f"the body comes in many chunks of less than {chunk_bytes} bytes, send larger chunks or a `Content-Length`"
        )


class PipelineError(InvalidRequestError):
    def __init__(self, limit: int) -> None:
        super().__init__(f"at most {limit} requests may be sent ahead of their answers: send this request again")


class CodingError(InferenceError):
    error_type, status, label = "not_implemented", 501, "request"
    closes = True

    def __init__(self, codings: str) -> None:
        super().__init__(f"`Transfer-Encoding: {codings}` is not supported: send `chunked`, or a `Content-Length`")


class UnauthorizedError(InferenceError):
    error_type, status, label = "unauthorized", 401, "key"
    headers = MappingProxyType({"www-authenticate": "Bearer"})
    text = "This route needs an API key: send one as `Authorization: Bearer KEY`"


class ScalingError(InferenceError):
    """There cannot be as many replicas as an administrator asks for."""

    error_type, status, label = "scaling", 409, "validation"


class AdapterError(InferenceError):
    """An adapter cannot be loaded or unloaded as an administrator asks for."""

    error_type, status, label = "adapter", 400, "validation"


class NoSuchAdapterError(AdapterError):
    error_type, status = "not_found", 404


class AdapterUnsettledError(AdapterError):
    """Something that restarts or is stuck has not answered: the text says what has changed."""

    error_type, status, label = "unavailable", 503, "unavailable"


class NoSuchRouteError(InferenceError):
    error_type, status, label = "not_found", 404, "route"
    text = "There is no such route: /docs lists all routes"


class MethodError(InferenceError):
    error_type, status, label = "method_not_allowed", 405, "route"

    def __init__(self, allowed: str) -> None:
        super().__init__(f"This route does not support this method. Allowed: {allowed}")
        self.headers = {"allow": allowed}


class InternalError(InferenceError):
    error_type, status, label = "internal", 500, "internal"
    text = "Internal error of the server: its log has the cause"


class BodyError(InferenceError):
    """The body is not a valid request. Body errors are not counted in tgi_request_failure."""

    label = "body"


class UnsupportedMediaTypeError(BodyError):
    error_type, status = "unsupported_media_type", 415
    text = "Expected request with `Content-Type: application/json`"


class EncodedBodyError(UnsupportedMediaTypeError):
    headers = MappingProxyType({"accept-encoding": "identity"})
    closes = True

    def __init__(self, codings: str) -> None:
        super().__init__(f"`Content-Encoding: {codings}` is not supported: send the body as it is")


class PayloadTooLargeError(BodyError):
    error_type, status = "payload_too_large", 413
    closes = True

    def __init__(self, limit: int) -> None:
        super().__init__(f"Failed to buffer the request body: length limit exceeded, send at most {limit} bytes")


class InvalidJsonError(BodyError):
    error_type, status = "invalid_json", 400

    def __init__(self, reason: str) -> None:
        super().__init__(f"Failed to parse the request body as JSON: {reason}")


class UnprocessableError(BodyError):
    """Valid JSON with a wrong type or value. `path` names the field, such as `parameters.top_k`; "": the whole body."""

    error_type, status = "unprocessable", 422

    def __init__(self, path: str, reason: str) -> None:
        where = f"{path}: " if path else ""
        super().__init__(f"Failed to deserialize the JSON body into the target type: {where}{reason}", path)


class TooExpensiveError(BodyError):
    error_type, status = "unprocessable", 422

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"Reading and rendering the request body takes more than {seconds:g} seconds or more memory than allowed:"
            " send a smaller body"
        )


class Refusal(StrEnum):
    TOO_LONG = "too long"  # prompt and output do not fit the memory of the current shards
    OVERLOADED = "overloaded"  # too many prompt tokens wait, and the owner or tenant has used its share of them
    CLOSED = "closed"  # the engine has ended
    DRAINING = "draining"  # the engine takes no new requests, because it is about to end
    # The request may have ended an engine, and this one has such requests of another loss.
    OTHER_SUSPECTS = "other suspects"
    NO_ADAPTER = "no adapter"  # the engine has not loaded the request's adapter


class RefusedError(Exception):
    """The engine refuses a request."""

    def __init__(self, reason: Refusal, retry_after_s: int = 1) -> None:
        super().__init__(reason.value)
        self.reason = reason
        self.retry_after_s = retry_after_s


class FrontLostError(Exception):
    """A front does not read what the engine sends, or has connected again."""


class StartError(Exception):
    """The router cannot start. The text is one line that says what is wrong, why, and what the user can do."""


class ShardsError(Exception):
    """The shards cannot be reached or gave a wrong answer, so this group of shards cannot be used any more."""


class WarmupRefusedError(ShardsError):
    """The limits set by the flags do not fit the model or the memory. Trying again with the same shards is useless."""


class StepFailedError(ShardsError):
    """A step raised in a shard. All rows of the shard are void; the shard works again after a ClearCache call."""


class StepAbortedError(ShardsError):
    """A step was not run, because an earlier step failed or did not arrive."""
