"""The examples of the client's README run as they stand, against a server that answers every route."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[2] / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README.read_text(), flags=re.DOTALL | re.MULTILINE)
URL = "http://127.0.0.1:3000"

TOKENS = [{"id": 1, "text": text, "logprob": -0.5, "special": False} for text in (" a", " b.")]
DETAILS = {"finish_reason": "length", "generated_tokens": 2, "seed": None}
HEAD = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": " a b."}, "finish_reason": "stop"}
ANSWERS: dict[str, Any] = {
    "/": [{"generated_text": " a b.", "details": DETAILS | {"prefill": [], "tokens": TOKENS}}],
    "/v1/chat/completions": HEAD | {"choices": [CHOICE], "usage": {}},
}
STREAMS: dict[str, list[Any]] = {
    "/": [{"token": TOKENS[0]}, {"token": TOKENS[1], "generated_text": " a b.", "details": DETAILS}],
    "/v1/chat/completions": [
        HEAD | {"choices": [{"index": 0, "delta": {"content": text}}]} for text in (" a", " b.")
    ],
}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        content = json.dumps(ANSWERS[self.path])
        if body["stream"]:
            content = "".join(f"data: {json.dumps(event)}\n\n" for event in STREAMS[self.path]) + "data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *arguments: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 64  # with the default of 5, connections of `map` are dropped and wait a second


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_runs_and_prints_the_servers_text(
    example: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert URL in example
    names: dict[str, Any] = {}
    exec(example.replace(URL, url), names)
    if "client" in names:
        names["client"].close()
    printed = capsys.readouterr().out
    assert " a b." in printed or "ValidationError `temperature` must be strictly positive" in printed


def test_the_readme_has_examples() -> None:
    assert len(EXAMPLES) == 6
