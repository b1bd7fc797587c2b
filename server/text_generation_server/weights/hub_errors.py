"""Conversion of the hub's errors into ours, and a line in the log while the hub does not answer."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from text_generation_common.errors import WeightsError
from text_generation_server.errors import NetworkError
from text_generation_server.weights.access import described
from text_generation_server.weights.transfer import TRANSIENT_STATUS

logger = logging.getLogger(__name__)

SLOW_S = 2.0

# huggingface_hub uses requests (0.x), httpx (1.x) or httpx2 (2.x). Its HTTP error is derived from that library's HTTP
# error. The outermost class above it is the base of the library's connection errors too.
_TRANSPORT_ERROR: type[Exception] = [base for base in HfHubHTTPError.__mro__ if base.__module__ != "builtins"][-1]


@contextmanager
def hub_errors(model_id: str, revision: str | None) -> Iterator[None]:
    """Turns huggingface_hub's errors into WeightsError, or into NetworkError if trying again may help."""
    try:
        yield
    except GatedRepoError as error:
        raise WeightsError(
            f"{model_id} is gated: ask for access on its page, then set HF_TOKEN to a token of yours"
        ) from error
    except RepositoryNotFoundError as error:
        raise WeightsError(
            f"{model_id} was not found at {constants.ENDPOINT}, or is private: check the name, or set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise WeightsError(f"{model_id} has no revision {revision}") from error
    except HFValidationError as error:
        raise WeightsError(f"{model_id!r} is not a valid model id: {_line(error)}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        text = f"{constants.ENDPOINT} answered {status} for {described(model_id, revision)}"
        raise (NetworkError if status in TRANSIENT_STATUS else WeightsError)(text) from error
    except (LocalEntryNotFoundError, _TRANSPORT_ERROR) as error:
        raise NetworkError(
            f"{constants.ENDPOINT} cannot be reached for {described(model_id, revision)} ({_line(error)}): "
            "check the connection, then run the same command again"
        ) from error


@contextmanager
def mentioned_if_slow(model: str) -> Iterator[None]:
    """A context in which the hub is asked about `model`. Logs a line if there is no answer within SLOW_S."""
    timer = threading.Timer(SLOW_S, logger.info, ("No answer from %s about %s yet", constants.ENDPOINT, model))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
