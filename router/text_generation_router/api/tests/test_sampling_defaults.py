"""generation_config.json's sampling parameters count where a request leaves the field out, and nowhere else."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from text_generation_router.errors import StartError
from text_generation_router.text.model_files import read_defaults
from text_generation_router.text.validation import AskedSampling

FILE = {
    "do_sample": True,
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 20,
    "repetition_penalty": 1.25,
    "eos_token_id": 2,
}
ALL = {"do_sample": True, "temperature": 0.5, "top_p": 0.75, "top_k": 20, "repetition_penalty": 1.25}
GREEDY = {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.25}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "model": "m", "max_tokens": 2}
RESPONSE = {"input": "a", "max_output_tokens": 16, "model": "m"}


def read(folder: Path, **content: Any) -> dict[str, Any]:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return read_defaults(folder)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/generate", {"inputs": "a"}, ALL),
        ("/generate", {"inputs": "a", "parameters": {"top_p": 0.5}}, ALL | {"top_p": 0.5}),
        ("/generate", {"inputs": "a", "parameters": {"do_sample": False}}, GREEDY),
        ("/v1/completions", {"prompt": "a", "model": "m", "max_tokens": 2}, ALL),
        ("/v1/chat/completions", CHAT, ALL),
        ("/v1/chat/completions", CHAT | {"temperature": 1.0, "top_p": 1.0}, ALL | {"temperature": 1.0, "top_p": 1.0}),
        ("/v1/chat/completions", CHAT | {"temperature": 0}, GREEDY),
        ("/v1/chat/completions", CHAT | {"repetition_penalty": 1.0}, ALL | {"repetition_penalty": 1.0}),
        ("/v1/responses", RESPONSE, ALL),
        ("/v1/responses", RESPONSE | {"temperature": 0.25}, ALL | {"temperature": 0.25}),
        ("/v1/messages", CHAT, ALL),
        ("/v1/messages", CHAT | {"top_k": 5}, ALL | {"top_k": 5}),
    ],
)
def test_a_field_that_a_request_leaves_out_is_the_files(
    make_server: Any, tmp_path: Path, path: str, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    server = make_server(defaults=read(tmp_path, **FILE))
    answer = server.post(path, body)
    assert answer.status == 200, answer
    used = asdict(server.engine.asked[-1].request.sampling)
    assert {name: used[name] for name in expected} == expected
    assert json.loads(server.get("/info").body)["sampling_defaults"] == ALL


def test_without_do_sample_in_the_file_its_values_count_for_requests_that_sample(tmp_path: Path) -> None:
    defaults = read(tmp_path, temperature=0.5)
    assert AskedSampling().filled(defaults).values.temperature == 1.0
    assert AskedSampling.of({"do_sample": True}).filled(defaults).values.temperature == 0.5
    assert AskedSampling.of({"top_p": 0.5}).filled(defaults).values.temperature == 0.5
    assert read(tmp_path, temperature=0, do_sample=True) == {}
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0, "typical_p": 1, "repetition_penalty": 1.0, "do_sample": False}
    assert read(tmp_path, **neutral) == {}
    assert read_defaults(tmp_path / "nowhere") == {}


@pytest.mark.parametrize(
    ("path", "body", "is_greedy"),
    [
        ("/generate", {"inputs": "a"}, True),
        ("/generate", {"inputs": "a", "parameters": {"temperature": 0.5}}, True),
        ("/generate", {"inputs": "a", "parameters": {"top_p": 0.5}}, False),
        ("/v1/chat/completions", CHAT | {"temperature": 0.5}, True),
        ("/v1/chat/completions", CHAT | {"top_p": 1}, False),
    ],
)
def test_a_top_p_of_0_in_the_file_leaves_the_most_likely_token_alone(
    make_server: Any, tmp_path: Path, path: str, body: dict[str, Any], is_greedy: bool
) -> None:
    server = make_server(defaults=read(tmp_path, do_sample=True, top_p=0, repetition_penalty=1.25))
    assert server.post(path, body).status == 200
    used = server.engine.asked[-1].request.sampling
    assert (used.do_sample, used.repetition_penalty) == (not is_greedy, 1.25)
    assert json.loads(server.get("/info").body)["sampling_defaults"]["top_p"] == 0


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 2}, {"typical_p": 0}, {"top_k": 1.5}, {"do_sample": "yes"}]
)
def test_a_wrong_value_stops_the_start_in_one_line_that_names_it(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(StartError, match=f"generation_config.json: {next(iter(wrong))} is") as refused:
        read(tmp_path, **wrong)
    assert "\n" not in str(refused.value)
