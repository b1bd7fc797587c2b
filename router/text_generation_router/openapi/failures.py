"""The errors that the routes give, by status. A route's status for an error is that of its dialect."""

from collections.abc import Iterable

from text_generation_router import errors
from text_generation_router.errors import InferenceError
from text_generation_router.http.dialects import ErrorDialect

Errors = tuple[type[InferenceError], ...]

# Before a route is known, or by a defect of the server.
ANY: Errors = (
    errors.InvalidRequestError,
    errors.EncodedBodyError,
    errors.CodingError,
    errors.RequestTimeoutError,
    errors.HeadersTooLargeError,
    errors.TooManyConnectionsError,
    errors.InternalError,
)
KEY: Errors = (errors.UnauthorizedError,)
BODY: Errors = (
    errors.InvalidJsonError,
    errors.UnsupportedMediaTypeError,
    errors.PayloadTooLargeError,
    errors.UnprocessableError,
    errors.OverloadedError,
    errors.ShuttingDownError,
)
REFUSALS: Errors = (*BODY, errors.ValidationError)
GENERATION: Errors = (
    *REFUSALS,
    errors.GenerationError,
    errors.IncompleteGenerationError,
    errors.DeadlineError,
)
TEMPLATE: Errors = (errors.TemplateError,)
MODEL: Errors = (errors.UnknownModelError,)
PROMPTS: Errors = (errors.TooManyPromptsError, errors.SuffixError)
SCALING: Errors = (errors.UnauthorizedError, errors.ScalingError)
ADAPTERS: Errors = (
    errors.UnauthorizedError,
    errors.AdapterError,
    errors.NoSuchAdapterError,
    errors.AdapterUnsettledError,
)
VIEW_FULL: Errors = (errors.UnauthorizedError, errors.OverloadedError)
UNKNOWN_REQUEST: Errors = (errors.UnauthorizedError, errors.NoSuchRouteError)
UNHEALTHY: Errors = (errors.UnhealthyError,)


def by_status(kinds: Iterable[type[InferenceError]], dialect: ErrorDialect) -> dict[int, list[InferenceError]]:
    """The errors of each status, in order."""
    found: dict[int, list[InferenceError]] = {}
    for kind in dict.fromkeys(kinds):
        error = errors.OverloadedError() if kind is errors.OverloadedError else kind.restored("")
        found.setdefault(dialect.status(error), []).append(error)
    return dict(sorted(found.items()))
