"""API keys given to the launcher by flag, by environment, or as digests in a file."""

import hashlib
from collections.abc import Iterator

import httpx
import processes
import psutil
import pytest
from board import check_answer, queries, series_of
from server_process import ServerProcess

from text_generation_common.secret_values import is_secret


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# of the batch job\nsha256:{hashlib.sha256(b'third-key').hexdigest()}\n")
    keys = [word for key in ("first-key", "second-key", "one", "two") for word in ("--api-key", key)]
    flags = (*keys, "--api-key-file", str(file), "--closed-routes")
    environ = {"HF_TOKEN": "first-key of the hub", "HUGGING_FACE_HUB_TOKEN": "first-key of the hub"}
    with ServerProcess(*flags, "--max-total-tokens", "256", environ=environ, by_command=True) as server:
        yield server


def test_keys_close_every_route_but_the_open_ones_and_stand_on_no_command_line(server: ServerProcess) -> None:
    body = {"inputs": "Once", "parameters": {"max_new_tokens": 2}}
    with httpx.Client(base_url=server.url) as client:
        for key in ("first-key", "second-key", "third-key"):
            headers = {"authorization": f"Bearer {key}"}
            assert client.post("/generate", json=body, headers=headers, timeout=60).status_code == 200
            assert client.get("/info", headers=headers).status_code == 200
        series = series_of(client.get("/metrics", headers=headers).text)
        for query in (query for query in queries() if "tgi_key_" in query[0]):
            check_answer(series, query)
        for headers in ({}, {"authorization": "Bearer FIRST-KEY"}, {"authorization": "Bearer first"}):
            for path in ("/", "/generate", "/generate_stream", "/tokenize", "/v1/completions", "/v1/chat/completions"):
                refused = client.post(path, json=body, headers=headers)
                assert (refused.status_code, refused.json()["error_type"]) == (401, "unauthorized")
            for path in ("/info", "/metrics", "/v1/models", "/docs", "/api-doc/openapi.json"):
                assert client.get(path, headers=headers).status_code == 401
        assert all(client.get(path).status_code == 200 for path in ("/", "/health", "/ping", "/live", "/ready"))
        everything = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        assert not any("first-key" in word for process in everything for word in process.cmdline())
        assert "A key was on the command line" in server.log()
        readers = [process for process in everything if any("offload.child" in word for word in process.cmdline())]
        assert readers and not any(map(is_secret, [name for reader in readers for name in reader.environ()]))
        shards = processes.shards(server.pid).values()
        children = [processes.router(server.pid), *shards]
        assert not any("-key" in word for child in children for word in child.cmdline() if "api-key-file" not in word)
        assert not any("API_KEY" in shard.environ() for shard in shards)
        assert "first-key" not in server.log()


def test_cached_tokens_do_not_reveal_prompts_of_another_key(server: ServerProcess) -> None:
    """A secret in a prompt of one key cannot be guessed piece by piece from `cached_tokens` of another key."""
    secret = "The door opens with the number 4927, as it did last year and the year before. It has not changed since."

    def cached(client: httpx.Client, key: str) -> int:
        body = {"inputs": secret, "parameters": {"max_new_tokens": 1, "details": True}}
        answer = client.post("/generate", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)
        return int(answer.json()["details"]["cached_tokens"])

    with httpx.Client(base_url=server.url) as client:
        first, again, other, other_again = (cached(client, key) for key in ("one", "one", "two", "two"))
        assert first == other == 0 and again == other_again > 10
