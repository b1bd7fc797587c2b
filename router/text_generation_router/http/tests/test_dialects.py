"""The path alone decides how an error is told, and `--tgi-dialect` for the routes that TGI has."""

import json

import pytest

from text_generation_router.errors import InvalidRequestError, OverloadedError
from text_generation_router.http.dialects import ANTHROPIC, NATIVE, OPENAI, TGI_OPENAI, ErrorDialects
from text_generation_router.http.errors import error_bytes


@pytest.mark.parametrize(
    ("path", "dialect", "with_tgis"),
    [
        ("", NATIVE, NATIVE),
        ("/generate", NATIVE, NATIVE),
        ("/v1/chat/completions", OPENAI, TGI_OPENAI),
        ("/v1/models", OPENAI, TGI_OPENAI),
        ("/v1/responses", OPENAI, OPENAI),
        ("/v1/responses/resp_1?include=x", OPENAI, OPENAI),
        ("/v1/responsesx", OPENAI, TGI_OPENAI),
        ("/v1/messages", ANTHROPIC, ANTHROPIC),
        ("/v1/messages?beta=true", ANTHROPIC, ANTHROPIC),
        ("/v1/messages/count_tokens?beta=true", ANTHROPIC, ANTHROPIC),
        ("/v1/messages/batches", ANTHROPIC, ANTHROPIC),
        ("/v1/messagesx", OPENAI, TGI_OPENAI),
        ("/v2/messages", NATIVE, NATIVE),
    ],
)
def test_the_path_decides(path, dialect, with_tgis):
    assert ErrorDialects(is_tgis=False).of(path) is dialect
    assert ErrorDialects(is_tgis=True).of(path) is with_tgis


def test_the_parser_tells_anthropics_clients_in_their_form():
    head, _, body = error_bytes(InvalidRequestError("no host"), ANTHROPIC).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "Invalid HTTP request: no host"},
        "request_id": None,
        "error_type": "invalid_request",
    }


def test_an_error_in_a_stream_is_a_named_event():
    name, _, data = ANTHROPIC.event(OverloadedError()).partition(b"\n")
    assert name == b"event: error" and json.loads(data.removeprefix(b"data: "))["error"]["type"] == "rate_limit_error"
