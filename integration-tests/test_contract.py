"""The behaviour that clients see: texts, ends, errors, and the effect of a misbehaving client on others."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from calls import at_once, client_of, events_of, generate, metric, settled_metric, settled_metrics, stream, tokenizer
from server_process import ServerProcess

from text_generation.types import Parameters
from text_generation_router.api.tgi.schemas import GenerateParameters

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

QUESTION = "<|user|>What is 2 + 3?</s><|assistant|>"


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}


def wait_for(condition: Any, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_the_demo_model_answers_and_stops_by_itself(server: ServerProcess) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat("What is 2 + 3?")).json()
    assert answer["choices"][0]["message"]["content"] == "2 + 3 = 5"
    assert answer["choices"][0]["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def cached(usage: dict[str, Any]) -> int:
    """Removes `prompt_tokens_details` from `usage` and returns its `cached_tokens`."""
    return int(usage.pop("prompt_tokens_details")["cached_tokens"])


def test_the_chat_stream_is_the_chat_answer(server: ServerProcess) -> None:
    body = chat("Tell me a story about a fox.", max_tokens=50, stream=True, stream_options={"include_usage": True})
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    *chunks, usage = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    del body["stream"], body["stream_options"]
    whole = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    # The second request finds more of its prompt in the cache.
    assert cached(usage["usage"]) < cached(whole["usage"])
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]


@pytest.mark.parametrize("word", ["sun", "smile", "tree"])
def test_a_character_of_several_tokens_arrives_whole(server: ServerProcess, word: str) -> None:
    events = at_once(server.url, stream(f"<|user|>Show me the emoji for {word}.</s><|assistant|>"))[0]
    texts = [event["token"]["text"] for event in events]
    assert "" in texts and not any("�" in text for text in texts)
    assert "".join(texts[:-1]) == events[-1]["generated_text"]
    assert ord(max(events[-1]["generated_text"])) > 0x2000


def test_a_stop_string_ends_the_text_and_is_part_of_it(server: ServerProcess) -> None:
    prompt = "<|user|>Count from 3 to 9.</s><|assistant|>"
    answer, events = at_once(server.url, generate(prompt, stop=["x", "5, 6"]), stream(prompt, stop=["5, 6"]))
    assert answer["generated_text"] == "3, 4, 5, 6"
    assert answer["details"]["finish_reason"] == "stop_sequence"
    assert "".join(event["token"]["text"] for event in events) == "3, 4, 5, 6"


def test_more_tokens_than_fit_may_be_asked_for(server: ServerProcess) -> None:
    prompt = "Once upon a time " * 300
    length = len(httpx.post(f"{server.url}/tokenize", json={"inputs": prompt}).json())
    asked = {"max_new_tokens": 100_000, "ignore_eos_token": True, "details": True}
    refused = httpx.post(f"{server.url}/generate", json={"inputs": prompt, "parameters": asked})
    assert length > 1024 and "`max_new_tokens` must be <= 2048. Given" in refused.json()["error"]
    body = {"inputs": prompt, "parameters": asked | {"truncate": 1024}}
    details = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()["details"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("length", 1024)


def test_length_goes_before_the_end_of_text(server: ServerProcess) -> None:
    whole = at_once(server.url, generate(QUESTION))[0]["details"]
    assert whole["finish_reason"] == "eos_token" and whole["tokens"][-1]["special"]
    cut = at_once(server.url, generate(QUESTION, max_new_tokens=whole["generated_tokens"]))[0]["details"]
    assert cut["finish_reason"] == "length"


def test_best_of_returns_the_others_with_their_seeds(server: ServerProcess) -> None:
    answer = at_once(server.url, generate("Once upon a time", best_of=2, do_sample=True, max_new_tokens=8))[0]
    (other,) = answer["details"]["best_of_sequences"]
    assert other["seed"] is not None and other["seed"] != answer["details"]["seed"]


BAD_PARAMETERS: list[tuple[dict[str, Any], str]] = [
    *TABLES["bad_parameters"],
    ({"stop": ["a"] * 5}, "`stop` supports up to 4 stop sequences. Given: 5"),
]


@pytest.mark.parametrize(("parameters", "text"), BAD_PARAMETERS, ids=lambda value: str(value)[:40])
def test_bad_parameters_are_refused_by_name(server: ServerProcess, parameters: dict[str, Any], text: str) -> None:
    body = {"inputs": "Hi", "parameters": parameters}
    response = httpx.post(f"{server.url}/generate", json=body)
    assert response.status_code == 422 and response.json()["error_type"] == "validation"
    assert text in response.json()["error"]
    streamed = httpx.post(f"{server.url}/generate_stream", json=body)
    assert streamed.status_code == 200 and json.loads(streamed.text.removeprefix("data: ")) == response.json()


HOSTILE: list[tuple[bytes, int]] = [
    (b"", 400), (b"{", 400), (b"\xff\xfe{}", 400), (b'{"inputs": "\xff"}', 400), (b'{"inputs": "\\ud800"}', 400),
    (b"[" * 100_000, 400), (b'{"inputs": NaN}', 400), (b"null", 422), (b"[]", 422), (b"{}", 422),
    (b'{"inputs": 3}', 422), (b'{"inputs": ""}', 422), (b'{"inputs": "a", "parameters": null}', 422),
    (b'{"inputs": "a", "parameters": {"max_new_tokens": 2.5}}', 422),
    (b'{"inputs": "a", "parameters": {"max_new_tokens": -1}}', 422),
    (b'{"inputs": "a", "parameters": {"max_new_tokens": 99999999999999999999}}', 422),
    (b'{"inputs": "a", "parameters": {"temperature": 1e999}}', 422),
    (b'{"inputs": "a", "parameters": {"seed": "1"}}', 422), (b'{"inputs": "' + b"word " * 300_000 + b'"}', 422),
    (b'{"inputs": "' + b"a" * 3_000_000 + b'"}', 413),
]  # fmt: skip


@pytest.mark.parametrize("route", ["/generate", "/generate_stream", "/", "/v1/chat/completions", "/v1/completions"])
def test_hostile_bodies_are_4xx_json_and_no_other_request_notices(server: ServerProcess, route: str) -> None:
    steps = settled_metric(server.url, 'tgi_batch_inference_count{method="prefill"}')

    async def throw_everything(client: httpx.AsyncClient) -> None:
        for body, status in HOSTILE:
            response = await client.post(route, content=body, headers={"content-type": "application/json"})
            error = response.text.removeprefix("data: ")
            if response.status_code != 200:  # in TGI's streams a validation error comes under status 200
                accepted = (400, 422) if status in (400, 422) else (status,)
                assert response.status_code in accepted, (route, body[:60], response.text[:200])
            parsed = json.loads(error)
            assert parsed["error"] and parsed["error_type"], (route, body[:60])

    running = stream("Once upon a time", max_new_tokens=100, ignore_eos_token=True)
    events, _ = at_once(server.url, running, throw_everything)
    assert len(events) == 100
    assert settled_metric(server.url, 'tgi_batch_inference_count{method="prefill"}') == steps + 1


def test_overload_is_429_and_an_event_in_streams(server: ServerProcess) -> None:
    permits, told = 64, asyncio.Event()  # requests at a time, by conftest.py

    async def busy(client: httpx.AsyncClient) -> list[Any]:
        events: list[Any] = await stream("Once", max_new_tokens=240, ignore_eos_token=True)(client)
        assert told.is_set(), "a stream ended before the others were answered"
        return events

    async def one_too_many(client: httpx.AsyncClient) -> list[httpx.Response]:
        while await asyncio.to_thread(metric, server.url, "tgi_batch_current_size") < permits:
            await asyncio.sleep(0.02)
        body = {"inputs": "Hi"}
        answers = await asyncio.gather(
            client.post("/generate", json=body),
            client.post("/generate_stream", json=body),
            client.post("/v1/chat/completions", json=chat("Hi", stream=True)),
        )
        told.set()
        return answers

    *streams, (plain, streamed, openai) = at_once(server.url, *[busy] * permits, one_too_many)
    expected = {"error": "Model is overloaded", "error_type": "overloaded"}
    assert plain.status_code == 429 and plain.json() == expected
    assert streamed.status_code == 200 and json.loads(streamed.text.removeprefix("data: ")) == expected
    assert openai.status_code == 429
    assert all(len(events) == 240 for events in streams)


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
def test_a_client_that_goes_away_frees_its_slots(server: ServerProcess, route: str) -> None:
    body = {"inputs": "Once upon", "parameters": {"max_new_tokens": 1900, "ignore_eos_token": True}}
    dropped = settled_metric(server.url, 'tgi_request_failure{err="dropped"}')

    async def leave() -> None:
        async with client_of(server.url) as client:
            calls = [asyncio.create_task(client.post(route, json=body)) for _ in range(8)]
            while metric(server.url, "tgi_batch_current_size") < 8:  # waits until all eight requests run
                await asyncio.sleep(0.02)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(leave())
    wait_for(lambda: metric(server.url, "tgi_slots_used") == 0)
    assert settled_metric(server.url, 'tgi_request_failure{err="dropped"}') == dropped + 8


def test_metrics_move_with_a_request(server: ServerProcess) -> None:
    names = [f"tgi_{name}" for name in ("request_count", "request_success", "request_generated_tokens_sum")]
    names.append("tgi_batch_next_size_count")
    before = settled_metrics(server.url, *names)
    at_once(server.url, generate("Hello", max_new_tokens=5, ignore_eos_token=True))
    after = settled_metrics(server.url, *names)
    assert [a - b for a, b in zip(after, before, strict=True)] == [1, 1, 5, 1]


def test_info_health_tokenize_models_and_docs(server: ServerProcess) -> None:
    info = httpx.get(f"{server.url}/info").json()
    assert info["max_total_tokens"] == 2048 and info["model_dtype"] == "torch.float32"
    assert httpx.get(f"{server.url}/health").status_code == httpx.get(f"{server.url}/ping").status_code == 200
    tokens = httpx.post(f"{server.url}/tokenize", json={"inputs": "a fox"}).json()
    assert [token["id"] for token in tokens] == tokenizer().encode_batch(["a fox"])[0].ids
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert (model["object"], model["id"]) == ("model", "demo")
    assert "swagger" in httpx.get(f"{server.url}/docs").text.lower()


def test_openai_routes_refuse_missing_features_and_accept_neutral_values(server: ServerProcess) -> None:
    url = f"{server.url}/v1/chat/completions"
    neutral = {"n": 1, "presence_penalty": 0, "top_p": 1, "tools": [], "logit_bias": {}, "model": "x", "novel": 1}
    assert httpx.post(url, json=chat("Hi", max_tokens=3, **neutral)).status_code == 200
    for field, value in {"audio": {"voice": "a"}, "guided_json": {"not": {}}}.items():
        response = httpx.post(url, json=chat("Hi", **{field: value}))
        assert response.status_code == 400 and response.json()["error"]["param"] == field


def test_streams_are_framed_as_tgi_frames_them(server: ServerProcess) -> None:
    async def raw(client: httpx.AsyncClient) -> tuple[httpx.Headers, list[Any], bytes]:
        body = {"inputs": "Hi", "parameters": {"max_new_tokens": 3, "ignore_eos_token": True}}
        async with client.stream("POST", "/generate_stream", json=body) as response:
            content = await response.aread()
        return response.headers, [event async for event in events_of(response)], content

    headers, events, content = at_once(server.url, raw)[0]
    assert headers["content-type"] == "text/event-stream" and headers["x-accel-buffering"] == "no"
    assert [event["index"] for event in events] == [1, 2, 3]
    assert content.startswith(b'data: {"index":1,"token":{"id":') and content.endswith(b"}\n\n")


def test_every_parameter_of_the_client_is_one_of_the_router() -> None:
    assert set(Parameters.model_fields) <= set(GenerateParameters.model_fields)
