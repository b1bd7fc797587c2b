"""Reports the fields of a request that are unknown, and its parts that have no effect: in a header, in a log line and
in a metric. A request with an unknown field may be refused.
"""

import logging
import re
from collections.abc import Sequence

from starlette.requests import Request

from text_generation_common.adapters.listed import ANY_MODEL
from text_generation_router.api.common.adapters import ServedAdapters
from text_generation_router.api.common.contract import MAX_NAME_CHARS, unknown_parameter
from text_generation_router.errors import UnknownModelError, UnsupportedParameterError
from text_generation_router.http.answer_headers import add_header
from text_generation_router.metrics.metrics import Metrics

logger = logging.getLogger(__name__)

HEADER = "x-ignored-parameters"
# Maximum number of names of fields that get a log line and a count of their own; clients choose the names.
MAX_NAMES = 64
UNPRINTABLE = re.compile(r"[^!-+.-~-]")


class IgnoredParameters:
    def __init__(self, metrics: Metrics, is_strict: bool, adapters: ServedAdapters) -> None:
        """`is_strict`: requests with unknown fields are refused."""
        self._adapters = adapters
        self._counter = metrics.ignored_parameters
        self._is_strict = is_strict
        self._seen: set[str] = set()

    def note(self, request: Request, unknown: Sequence[str], known: frozenset[str]) -> None:
        """`unknown`: paths of unknown fields. `known`: the names that the route knows. Raises UnknownParameterError if
        unknown fields are refused.
        """
        if not unknown:
            return
        names = [UNPRINTABLE.sub("?", path) for path in unknown]
        if self._is_strict:
            raise unknown_parameter(names[0], known)
        self._report(request, names)

    def note_left_out(self, request: Request, names: Sequence[str]) -> None:
        """Reports `names`, the parts of the request that have no effect by the route's documentation. The request is
        never refused."""
        if names:
            self._report(request, names, "requests have a part that is left out: `%s`")

    def note_model(self, request: Request, given: str | None, served: Sequence[str]) -> None:
        """Reports a model's name that is not in `served`, the names of the served model. Raises UnknownModelError if
        unknown fields are refused, or if the server has adapters: the client may mean one that it has not."""
        if given is None or given in served or given in self._adapters.digests:
            return
        if self._adapters.exist and given in ANY_MODEL:
            return
        if self._is_strict or self._adapters.exist:
            raise UnknownModelError(UNPRINTABLE.sub("?", given[:MAX_NAME_CHARS]), served[0])
        self._report(request, ["model"])

    def note_part(self, request: Request, name: str) -> None:
        """Reports `name`, a part of the request that this server cannot honour, although the answer does not depend on
        it. Raises UnsupportedParameterError if unknown fields are refused."""
        if self._is_strict:
            raise UnsupportedParameterError(name, "is not supported")
        self._report(request, [name])

    def _report(
        self, request: Request, names: Sequence[str], text: str = "requests have a field that has no effect: `%s`"
    ) -> None:
        add_header(request.scope, HEADER, ", ".join(UNPRINTABLE.sub("?", name) for name in names))
        for name in names:
            if name not in self._seen and len(self._seen) < MAX_NAMES:
                self._seen.add(name)
                logger.warning(text, name)
            self._counter.labels(name=name if name in self._seen else "other").inc()
