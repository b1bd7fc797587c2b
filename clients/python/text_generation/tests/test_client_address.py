"""The URL of a server, and what a user sees of a mistake."""

import asyncio
import inspect
import json
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, get_overloads

import pytest

from text_generation import AsyncClient, Client, errors

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

LIKE = "a URL with the scheme http or https and a host, such as 'http://127.0.0.1:3000'"


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize(("url", "given"), [*TABLES["wrong_urls"], (b"http://host", "bytes")])
def test_a_wrong_url_is_refused_when_the_client_is_made(client: Any, url: Any, given: str) -> None:
    with pytest.raises(errors.ValidationError) as caught:
        client(url)
    assert str(caught.value) == f"`base_url` must be {LIKE}. Given: {given}"


@pytest.mark.parametrize("url", ["http://h", "HTTPS://h:1/", "http://h/a/b?c=d", "http://[::1]:3000", "http://ü.de"])
@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_a_right_url_is_kept_as_it_is(client: Any, url: str) -> None:
    assert client(url).base_url == url


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_a_clients_repr_shows_its_url_and_no_secret(client: Any) -> None:
    headers = {"Authorization": "Bearer secret"}
    shown = repr(client("https://me:secret@host:3000/x?key=secret#secret", headers, {"key": "secret"}))
    assert shown == f"{client.__name__}('https://host:3000/x')"


def seen_by_a_user(error: BaseException) -> list[str]:
    return "".join(traceback.format_exception(error)).splitlines()


@pytest.mark.parametrize("name", ["generate", "generate_stream"])
def test_an_error_is_a_short_traceback_of_this_package_alone(caller: Any, fake: Any, name: str) -> None:
    refused = {"base_url": "http://127.0.0.1:1"}
    wrong = fake(422, b'{"error":"what","error_type":"validation"}').options
    strange = fake(200, b"data: [1]\n\n").options
    for client, options, text in (
        (refused, {}, "ServerConnectionError: no answer from http://127.0.0.1:1: "),
        (wrong, {}, "ValidationError: what"),
        (wrong, {"temperature": -1.0}, "ValidationError: `temperature` must be strictly positive"),
        (wrong, {"top_k": "a"}, "ValidationError: `top_k`: Input should be a valid integer"),
        (strange, {}, "UnknownError: "),
    ):
        with pytest.raises(errors.TextGenerationError) as caught:
            caller.call(name, "hi", client=client, **options)
        lines = seen_by_a_user(caught.value)
        assert lines[-1].startswith(f"text_generation.errors.{text}")
        assert not [line for line in lines if re.search(r'File ".*/(httpx|httpcore|pydantic|anyio)/', line)]
        # This test, its caller and, of an asynchronous call, asyncio take 17 lines of the traceback.
        assert len(lines) < 45


def test_a_synchronous_error_points_to_the_users_line(fake: Any) -> None:
    server = fake(422, b'{"error":"what","error_type":"validation"}')
    with Client("http://server", **server.options) as client, pytest.raises(errors.ValidationError) as caught:
        client.generate("hi")
    files = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files == [inspect.currentframe().f_code.co_name, "generate", "run"]  # type: ignore[union-attr]


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize("name", ["generate", "generate_stream", "chat", "completion"])
def test_a_wrong_keyword_names_the_public_method(client: Any, name: str) -> None:
    with pytest.raises(
        TypeError, match=rf"^{client.__name__}\.{name}\(\) got an unexpected keyword argument 'max_tokn'"
    ):
        getattr(client("http://server"), name)("hi", max_tokn=3)


@pytest.mark.parametrize("name", ["generate", "generate_stream", "chat", "completion", "map"])
def test_both_clients_have_the_same_plain_signatures(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(client, name)) for client in (Client, AsyncClient))
    assert ours.parameters == theirs.parameters
    kinds = {parameter.kind for parameter in ours.parameters.values()}
    assert inspect.Parameter.VAR_POSITIONAL not in kinds
    assert (inspect.Parameter.VAR_KEYWORD in kinds) is (name == "map")
    assert str(theirs.return_annotation).replace("Async", "") == str(ours.return_annotation)


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize("name", ["chat", "completion"])
def test_overloads_have_the_parameters_of_their_method(client: Any, name: str) -> None:
    method = getattr(client, name)
    parameters = inspect.signature(method).parameters
    overloads = get_overloads(method)
    assert len(overloads) == 2
    for overload in overloads:
        shown = inspect.signature(overload).parameters
        assert set(shown) == set(parameters)
        for key in set(shown) - {"stream"}:
            assert shown[key].annotation == parameters[key].annotation
            assert shown[key].default == parameters[key].default


def test_importing_the_package_loads_no_http_library() -> None:
    program = (
        "import sys, text_generation; print([name for name in ('httpx', 'httpcore', 'rich') if name in sys.modules])"
    )
    path = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=path)
    assert done.stdout == "[]\n", done.stderr


def test_asyncio_calls_are_coroutine_functions() -> None:
    for name in ("generate", "chat", "completion", "map"):
        assert asyncio.iscoroutinefunction(getattr(AsyncClient, name))
