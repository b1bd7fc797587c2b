"""Tests which class a client raises for each error of the server."""

import pytest

from text_generation import errors
from text_generation.parse import MAX_QUOTED_CHARACTERS, answer_error, parse_event
from text_generation.types import StreamResponse


@pytest.mark.parametrize(
    ("status", "error_type", "kind"),
    [
        (424, "generation", errors.GenerationError),
        (500, "incomplete_generation", errors.IncompleteGenerationError),
        (429, "overloaded", errors.OverloadedError),
        (504, "deadline", errors.ShardTimeoutError),
        (422, "validation", errors.ValidationError),
        (400, "template_error", errors.BadRequestError),
        (422, "template_error", errors.UnknownError),
        (422, "tool_error", errors.UnknownError),
        (200, "incomplete_generation_stream", errors.UnknownError),
        (400, None, errors.BadRequestError),
        (403, None, errors.ShardNotReadyError),
        (424, None, errors.ShardNotReadyError),
        (504, None, errors.ShardTimeoutError),
        (404, None, errors.NotFoundError),
        (429, None, errors.RateLimitExceededError),
        (500, None, errors.UnknownError),
    ],
)
def test_error_type_decides_before_status(status: int, error_type: str | None, kind: type[Exception]) -> None:
    error = errors.parse_error(status, {"error": "what happened", "error_type": error_type})
    assert type(error) is kind and str(error) == "what happened"


@pytest.mark.parametrize(
    ("status", "body", "kind", "text"),
    [
        (422, b"Failed to deserialize: missing field `inputs`", errors.UnknownError, "missing field `inputs`"),
        (404, b"", errors.NotFoundError, "HTTP 404"),
        (400, b"<html>bad gateway", errors.BadRequestError, "<html>bad gateway"),
        (502, b"\xff\xfe", errors.UnknownError, "HTTP 502"),
        (401, b'"text"', errors.UnknownError, "HTTP 401"),
        (422, b'{"detail": [1]}', errors.UnknownError, '"detail"'),
    ],
)
def test_the_text_of_a_body_without_a_json_error_is_kept(
    status: int, body: bytes, kind: type[Exception], text: str
) -> None:
    error = answer_error(status, body)
    assert type(error) is kind and text in str(error)


def test_a_huge_body_is_quoted_in_part() -> None:
    assert len(str(answer_error(500, "ö".encode() * 10**6))) < MAX_QUOTED_CHARACTERS + 20


def test_an_openai_error_is_read_by_its_message_and_its_own_status() -> None:
    body = b'{"error":{"message":"too many","type":"overloaded","http_status_code":429}}'
    assert type(answer_error(429, body)) is errors.OverloadedError
    for code, kind in ((429, errors.RateLimitExceededError), (422, errors.UnknownError)):
        with pytest.raises(kind, match=r"^too many$"):
            parse_event(StreamResponse, f'{{"error":{{"message":"too many","http_status_code":{code}}}}}')


@pytest.mark.parametrize("data", ["no json", "[]", "3", '{"index":1}', '{"token":null}'])
def test_an_event_of_an_unknown_shape_is_an_unknown_error(data: str) -> None:
    with pytest.raises(errors.UnknownError):
        parse_event(StreamResponse, data)


def test_every_error_is_a_text_generation_error_and_two_are_builtin_errors() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert all(issubclass(kind, errors.TextGenerationError) for kind in kinds)
    assert errors.UnknownError in kinds and len(kinds) > 10
    assert issubclass(errors.TimeoutExceededError, TimeoutError)
    assert issubclass(errors.ServerConnectionError, ConnectionError)
