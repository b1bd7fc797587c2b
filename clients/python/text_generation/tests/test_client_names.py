"""Programs written for PyPI's text-generation 0.7.0 find every public name, field and parameter here."""

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from text_generation import Client, errors, inference_api, types
from text_generation.inference_api import InferenceAPIAsyncClient, InferenceAPIClient

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

NAMES = TABLES["names"]
FIELDS = TABLES["fields"]


@pytest.mark.parametrize("module", NAMES)
def test_every_name_can_be_imported(module: str) -> None:
    missing = [name for name in NAMES[module].split() if not hasattr(importlib.import_module(module), name)]
    assert missing == []


@pytest.mark.parametrize("name", FIELDS)
def test_every_value_has_its_fields(name: str) -> None:
    assert set(FIELDS[name].split()) <= set(getattr(types, name).model_fields)


def test_the_members_of_both_enumerations_are_there() -> None:
    assert {"Json", "Regex"} <= set(types.GrammarType.__members__)
    assert {"Length", "EndOfSequenceToken", "StopSequence"} <= set(types.FinishReason.__members__)


def test_an_error_is_made_of_its_message() -> None:
    for name in NAMES["text_generation.errors"].split():
        kind = getattr(errors, name)
        if isinstance(kind, type):
            assert "message" in str(kind("message"))


@pytest.mark.parametrize("client", [InferenceAPIClient, InferenceAPIAsyncClient])
def test_the_hosted_clients_take_a_model_a_token_and_a_timeout(client: Any) -> None:
    assert list(inspect.signature(client).parameters) == ["repo_id", "token", "timeout"]


def answer(status: int, payload: Any) -> bytes:
    body = json.dumps(payload).encode()
    return b"HTTP/1.1 %d X\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body


@pytest.mark.parametrize("client", [InferenceAPIClient, InferenceAPIAsyncClient])
def test_a_hosted_model_is_asked_for_before_its_client_is_made(
    client: Any, play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = play(answer(200, {"framework": "text-generation-inference"}))
    monkeypatch.setattr(inference_api, "INFERENCE_ENDPOINT", server.url)
    made = client("a/b", token="secret")
    assert made.base_url == f"{server.url}/models/a/b" and "secret" not in repr(made)
    assert server.heads[0].startswith(b"GET /status/a/b HTTP/1.1\r\n")
    assert b"authorization: Bearer secret\r\n" in server.heads[0].replace(b"Authorization", b"authorization")


@pytest.mark.parametrize(
    ("status", "payload", "kind"),
    [
        (200, {"framework": "transformers"}, errors.NotSupportedError),
        (200, [], errors.NotSupportedError),
        (404, {"error": "no such model"}, errors.NotFoundError),
        (503, {"error": "loading"}, errors.UnknownError),
        (200, None, errors.NotSupportedError),
    ],
)
def test_a_hosted_model_that_is_not_served_is_an_error(
    play: Any, monkeypatch: pytest.MonkeyPatch, status: int, payload: Any, kind: type[Exception]
) -> None:
    monkeypatch.setattr(inference_api, "INFERENCE_ENDPOINT", play(answer(status, payload)).url)
    with pytest.raises(kind):
        InferenceAPIClient("a/b")


def test_deployed_models_are_listed(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = play(answer(200, [{"model_id": "a/b", "sha": "c", "task": "d"}]))
    monkeypatch.setattr(inference_api, "INFERENCE_ENDPOINT", server.url)
    assert inference_api.deployed_models() == [types.DeployedModel(model_id="a/b", sha="c")]
    assert server.heads[0].startswith(b"GET /framework/text-generation-inference HTTP/1.1\r\n")
    monkeypatch.setattr(inference_api, "INFERENCE_ENDPOINT", play(answer(200, [{"model_id": 3}])).url)
    with pytest.raises(errors.UnknownError, match="not a valid DeployedModel"):
        inference_api.deployed_models()


def test_the_hosted_client_is_a_client() -> None:
    assert issubclass(InferenceAPIClient, Client)
