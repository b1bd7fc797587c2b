"""Calls to a running server, and the comparison of its answers with transformers."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Coroutine
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import httpx
from tokenizers import Tokenizer

from text_generation_benchmark.metrics import metric as read_metric
from text_generation_common.model_files import demo_directory

# torch and transformers take seconds to load, and most tests need neither.
if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM

DEMO_MODEL = demo_directory()
NEAR_TIE = 1e-4


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@cache
def reference_model(folder: Path = DEMO_MODEL) -> "LlamaForCausalLM":
    import torch
    from transformers import LlamaForCausalLM

    from text_generation_server.device.vector_math import choose_code

    choose_code()
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def client_of(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=120, limits=limits)


def at_once(url: str, *calls: Any) -> list[Any]:
    """Results of `call(client)` for each call; all calls run at the same time."""

    async def run() -> list[Any]:
        async with client_of(url) as client:
            running: list[Coroutine[Any, Any, Any]] = [call(client) for call in calls]
            return list(await asyncio.gather(*running))

    return asyncio.run(run())


def generate(inputs: str, **parameters: Any) -> Any:
    """A call for `at_once`: the JSON of /generate with details."""

    async def call(client: httpx.AsyncClient) -> Any:
        body = {"inputs": inputs, "parameters": {"details": True, **parameters}}
        response = await client.post("/generate", json=body)
        response.raise_for_status()
        return response.json()

    return call


def stream(inputs: str, **parameters: Any) -> Any:
    """A call for `at_once`: the events of /generate_stream."""

    async def call(client: httpx.AsyncClient) -> list[Any]:
        body = {"inputs": inputs, "parameters": {"details": True, **parameters}}
        async with client.stream("POST", "/generate_stream", json=body) as response:
            return [event async for event in events_of(response)]

    return call


async def events_of(response: httpx.Response) -> AsyncIterator[Any]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def token_ids(answer: Any) -> list[int]:
    return [token["id"] for token in answer["details"]["tokens"]]


def distance_to_greedy(prompt_ids: list[int], output_ids: list[int], folder: Path = DEMO_MODEL) -> "torch.Tensor":
    """For each step: transformers' best score minus its score of our token. 0 where both choose the same token."""
    import torch

    with torch.no_grad():
        logits = reference_model(folder)(torch.tensor([prompt_ids + output_ids])).logits[0, len(prompt_ids) - 1 : -1]
    ours = logits.gather(1, torch.tensor(output_ids).unsqueeze(1)).squeeze(1)
    return logits.max(dim=1).values - ours


def prompt_logprobs(ids: list[int], folder: Path = DEMO_MODEL) -> list[float]:
    """transformers' log-probabilities of all ids but the first."""
    import torch

    with torch.no_grad():
        logprobs = reference_model(folder)(torch.tensor([ids])).logits[0, :-1].log_softmax(dim=-1)
    values: list[float] = logprobs.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).tolist()
    return values


# Seconds after which /metrics shows what the engine has done. With --api-workers, as in `make test-fronts`, the page
# is made of files that are two seconds old at most.
METRICS_AGE_S = 2.5 if os.environ.get("API_WORKERS") else 0.0


def settled_metric(url: str, name: str) -> float:
    """`metric`, with all that has happened before this call."""
    return settled_metrics(url, name)[0]


def settled_metrics(url: str, *names: str) -> list[float]:
    time.sleep(METRICS_AGE_S)
    return metrics(url, *names)


def metric(url: str, name: str) -> float:
    """The value of one series, e.g. `tgi_request_count` or `tgi_request_failure{err="dropped"}`."""
    return metrics(url, name)[0]


def metrics(url: str, *names: str) -> list[float]:
    """The values of several series at one moment; 0 for a series that is not on the page."""
    with urlopen(f"{url}/metrics", timeout=30) as answer:
        page = answer.read().decode()
    return [read_metric(page, name) for name in names]
