import re
from dataclasses import replace

import pytest

from text_generation_router.http import encoding
from text_generation_router.http.encoding import ROWS_PER_PIECE


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "a", "parameters": {"details": True, "top_n_tokens": 2}}),
        ("/generate", {"inputs": "a", "parameters": {"details": True, "best_of": 2, "do_sample": True}}),
        ("/v1/completions", {"prompt": "a", "logprobs": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "u", "content": "a"}], "logprobs": True, "top_logprobs": 2}),
    ],
)
def test_an_answers_bytes_do_not_depend_on_its_pieces(server, monkeypatch, path, body):
    length = 2 * ROWS_PER_PIECE + 1
    texts = tuple(f"{number} é" for number in range(length))
    server.engine.script = replace(server.engine.script, texts=texts, logprobs=(-0.5,) * length)

    def ask() -> bytes:
        answer = server.post(path, body)
        assert answer.status == 200
        return re.sub(rb'"(seed|created)":[0-9]+', b"", answer.body)

    in_pieces = ask()
    monkeypatch.setattr(encoding, "ROWS_PER_PIECE", length)
    assert ask() == in_pieces and texts[-1].encode() in in_pieces
