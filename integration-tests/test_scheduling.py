"""The scheduler in whole servers: it never changes a text, computes shared prompts once, and divides the server fairly
between clients."""

import asyncio
import random
import statistics
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asks as streams_of
import hostile
import httpx
import pytest
from asks import WORDS, Ask
from calls import (
    METRICS_AGE_S,
    at_once,
    events_of,
    generate,
    metric,
    metrics,
    settled_metrics,
    stream,
    token_ids,
    tokenizer,
)
from scale import MANY_SLOTS
from server_process import ServerProcess, wait_until
from tenants import body_of, greedy_answers_meanwhile

from text_generation_common.tests.slowness import slowness

BASE = ("--dtype", "float32", "--max-concurrent-requests", "320")
Said = tuple[list[int], list[float], str]  # an answer: ids, log-probabilities, text
PREFIX_TOKENS = 1500
BUDGET, ROWS = 48, 64  # limits of the narrow server: prompt tokens in one step, and running requests
# A prompt after which the model ends its text by itself after a few tokens.
QUESTION = "<|user|>What is 2 + 3?</s><|assistant|>"
BY_QUEUE = pytest.mark.skipif(
    METRICS_AGE_S > 0, reason="waits for a queue that is gone before /metrics shows it: run it without API_WORKERS"
)


@pytest.fixture(scope="module")
def plain() -> Iterator[ServerProcess]:
    with ServerProcess(*BASE, "--no-prefix-caching") as server:
        yield server


@pytest.fixture
def caching(server: ServerProcess) -> ServerProcess:
    return server


@pytest.fixture(scope="module")
def narrow() -> Iterator[ServerProcess]:
    """A server with small steps, few rows and a short queue."""
    steps = ("--max-batch-prefill-tokens", str(BUDGET), "--max-batch-size", str(ROWS))
    with ServerProcess(*BASE, *steps, "--max-queued-tokens", "8000", *MANY_SLOTS) as server:
        yield server


@pytest.fixture(scope="module")
def tight() -> Iterator[ServerProcess]:
    """A server with fewer token slots than its requests need."""
    with ServerProcess(*BASE, "--max-total-tokens", "512", "--max-batch-total-tokens", "1280") as server:
        yield server


def asks() -> list[Ask]:
    """40 requests. Every second request is sampled with its own seed; every fifth prompt begins with a shared
    prefix."""
    rng = random.Random(5)
    shared = " ".join(rng.choice(WORDS) for _ in range(60))
    prompts = [" ".join(rng.choice(WORDS) for _ in range(1 + 2 * i)) for i in range(40)]
    prompts = [f"{shared} {prompt}" if i % 5 == 0 else prompt for i, prompt in enumerate(prompts)]
    return [
        streams_of.plain(prompt, i if i % 2 else None, rng.choice((16, 32, 64))) for i, prompt in enumerate(prompts)
    ]


def growth_of(server: ServerProcess, *names: str) -> Callable[[], list[float]]:
    """A function that returns the growth of each metric since this call."""
    before = settled_metrics(server.url, *names)
    return lambda: [now - was for now, was in zip(settled_metrics(server.url, *names), before, strict=True)]


def call(ask: Ask) -> Any:
    return stream(ask.body["inputs"], **ask.body["parameters"])


def text_and_ids(events: list[Any]) -> Said:
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    tokens = [event["token"] for event in events]
    return [token["id"] for token in tokens], [token["logprob"] for token in tokens], events[-1]["generated_text"]


def cached_tokens(events: list[Any]) -> int:
    return int(events[-1]["details"]["cached_tokens"])


def leavers() -> list[Any]:
    """Requests of clients that leave at different times. Their cached tokens are used by later requests with the same
    prompts."""
    rng = random.Random(6)

    def leaver(ask: Ask, num_events: int) -> Any:
        async def listen(client: httpx.AsyncClient) -> None:
            async with client.stream("POST", "/generate_stream", json=ask.body) as response:
                async for event in events_of(response):
                    if event["index"] >= num_events:
                        return

        return listen

    return [
        leaver(streams_of.plain(ask.body["inputs"], rng.randint(50, 99), 100), rng.randint(0, 40))
        for ask in asks()[::2]
    ]


def answers_among_leavers(server: ServerProcess) -> list[list[Any]]:
    """The events of all 40 requests, sent at once while other clients leave."""
    asked, others = list(map(call, asks())), leavers()
    mixed = [*others[:10], *asked, *others[10:]]
    answers: list[list[Any]] = at_once(server.url, *mixed)[10:-10]
    return answers


@pytest.fixture(scope="module")
def cold(plain: ServerProcess) -> list[Said]:
    """The answers to the 40 requests, sent one at a time to a server without a prefix cache."""
    answers = [at_once(plain.url, call(ask))[0] for ask in asks()]
    assert all(cached_tokens(events) == 0 for events in answers)
    return [text_and_ids(events) for events in answers]


def test_batched_texts_equal_texts_computed_one_at_a_time(plain: ServerProcess, cold: list[Said]) -> None:
    assert len(cold) == 40
    assert list(map(text_and_ids, answers_among_leavers(plain))) == cold


def test_texts_with_a_cached_prefix_equal_texts_without_cache(caching: ServerProcess, cold: list[Said]) -> None:
    assert list(map(text_and_ids, answers_among_leavers(caching))) == cold
    warm = at_once(caching.url, *map(call, asks()))
    assert list(map(text_and_ids, warm)) == cold
    assert all(cached_tokens(events) >= events[-1]["details"]["input_length"] - 1 > 0 for events in warm)


def test_texts_of_chunked_prompts_equal_texts_of_whole_prompts(narrow: ServerProcess, cold: list[Said]) -> None:
    grown = growth_of(narrow, 'tgi_batch_inference_count{method="prefill"}', "tgi_prefilled_tokens")
    assert list(map(text_and_ids, answers_among_leavers(narrow))) == cold
    steps, tokens = grown()
    assert tokens / BUDGET <= steps


def test_preempted_texts_equal_texts_without_preemption(tight: ServerProcess, cold: list[Said]) -> None:
    for number in range(6):
        # The server predicts text lengths from earlier ones. After short texts come long texts, so it admits too many
        # requests and preempts some.
        at_once(tight.url, *[generate(QUESTION) for _ in range(64)])
        assert list(map(text_and_ids, answers_among_leavers(tight))) == cold
        preemptions, recomputed = metrics(tight.url, "tgi_request_preemptions", "tgi_recomputed_tokens")
        if number and preemptions:
            break
    print(f"{preemptions:.0f} preemptions, {recomputed:.0f} tokens computed again")
    assert preemptions > 0


def one_token_words() -> list[str]:
    vocabulary = tokenizer().get_vocab()
    return sorted(word.replace("Ġ", " ") for word in vocabulary if word[0] == "Ġ" and word[1:].isalpha())


def prompts_with_shared_prefix(seed: int) -> tuple[list[str], int]:
    """32 prompts with a common prefix, each with a different token after it, and the number of tokens of all prompts
    outside the prefix."""
    rng, words = random.Random(seed), one_token_words()
    # -1 for the first token, which the tokenizer adds to every prompt
    prefix = "".join(rng.choice(words) for _ in range(PREFIX_TOKENS - 1))
    firsts = rng.sample(words, 32)
    tails = [first + "".join(rng.choice(words) for _ in range(i % 7)) for i, first in enumerate(firsts)]
    prompts = [prefix + tail for tail in tails]
    num_tokens = sum(len(encoding.ids) for encoding in tokenizer().encode_batch(prompts))
    return prompts, num_tokens - 32 * PREFIX_TOKENS


@pytest.mark.parametrize("num_first", [0, 1], ids=["all at once", "one before the others"])
def test_a_shared_prefix_is_computed_once(caching: ServerProcess, num_first: int) -> None:
    prompts, num_private = prompts_with_shared_prefix(num_first)
    asked = [generate(prompt, max_new_tokens=4, ignore_eos_token=True) for prompt in prompts]
    grown = growth_of(caching, "tgi_prefilled_tokens", "tgi_prefix_hit_tokens")
    answers = [*at_once(caching.url, *asked[:num_first]), *at_once(caching.url, *asked[num_first:])]
    computed, hit = grown()
    found = sorted(answer["details"]["cached_tokens"] for answer in answers)
    # The cache may hold the token that every prompt begins with, from earlier tests.
    assert found[0] in (0, 1) and found[1:] == [PREFIX_TOKENS] * 31
    assert computed == PREFIX_TOKENS - found[0] + num_private
    assert hit == sum(found)


def test_a_request_with_another_salt_finds_nothing_in_the_cache(caching: ServerProcess) -> None:
    def found(salt: str) -> int:
        answer = at_once(caching.url, generate(prompt, max_new_tokens=1, cache_salt=salt))[0]
        return int(answer["details"]["cached_tokens"])

    prompt = "".join(one_token_words()[:50])
    assert [found("mine"), found("yours"), found("mine"), found("yours")] == [0, 0, 50, 50]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


async def left(calls: Sequence["asyncio.Task[httpx.Response]"]) -> None:
    """The clients of the calls leave."""
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


@asynccontextmanager
async def all_rows_taken(
    server: ServerProcess, client: httpx.AsyncClient, prompts: Sequence[str]
) -> AsyncIterator[None]:
    """Inside this context, texts that need a quarter of a minute have all rows."""
    calls = [asyncio.create_task(client.post("/generate", json=body_of(prompt, 2000))) for prompt in prompts]
    await until(lambda: metric(server.url, "tgi_batch_current_size") == ROWS)
    try:
        yield
    finally:
        await left(calls)


@BY_QUEUE
def test_a_client_with_many_requests_does_not_crowd_out_another(narrow: ServerProcess) -> None:
    """The modest client's request is next in the queue, whatever the machine's speed."""
    num_queued = 200

    def is_crowded() -> bool:
        return metric(narrow.url, "tgi_queue_size") >= num_queued * 3 / 4

    counts = asyncio.run(greedy_answers_meanwhile(narrow.url, num_queued + ROWS, is_crowded))
    print(f"answers to the greedy client while the modest one waits: {counts}")
    assert statistics.median(counts) < num_queued / 10
    wait_until(lambda: is_idle(narrow), 60, "idle again")


@BY_QUEUE
def test_at_its_deadline_a_text_ends_and_no_prompt_is_computed_in_vain(narrow: ServerProcess) -> None:
    """Not that of a queued request whose deadline comes, nor those of queued requests whose clients leave."""
    failures = (f'tgi_request_failure{{err="{reason}"}}' for reason in ("deadline", "dropped"))
    grown = growth_of(narrow, "tgi_prefilled_tokens", *failures)
    body, num_leaving = {"inputs": "One that never begins", "parameters": {"max_new_tokens": 4}}, 10

    async def in_vain(client: httpx.AsyncClient) -> httpx.Response:
        async with all_rows_taken(narrow, client, prompts):
            leaving = [asyncio.create_task(client.post("/generate", json=body)) for _ in range(num_leaving)]
            await until(lambda: metric(narrow.url, "tgi_queue_size") == num_leaving)
            await left(leaving)
            return await client.post("/generate", json=body, headers={"X-Request-Timeout": "0.3"})

    prompts = [f"{i}" for i in range(ROWS)]
    (late,) = at_once(narrow.url, in_vain)
    assert late.status_code == 504 and late.json()["error_type"] == "deadline"
    wait_until(lambda: is_idle(narrow), 60, "idle again")
    computed, failed, dropped = grown()
    assert (failed, dropped) == (1, num_leaving + ROWS)
    assert computed <= sum(len(encoding.ids) for encoding in tokenizer().encode_batch(prompts))
    limit_s = min(2 * slowness().clock, 8)  # long enough for the first token, and too short for the last one
    busy = [generate(prompt, max_new_tokens=2000, ignore_eos_token=True, timeout=limit_s) for prompt in prompts]
    texts = at_once(narrow.url, *busy)
    assert {text["details"]["finish_reason"] for text in texts} == {"deadline"}
    wholes = at_once(narrow.url, *[generate(p, max_new_tokens=8, ignore_eos_token=True) for p in prompts])
    for text, whole in zip(texts, wholes, strict=True):
        assert 8 < text["details"]["generated_tokens"] < 2000 and token_ids(text)[:8] == token_ids(whole)


def test_a_flood_is_refused_with_retry_after_and_accepted_requests_are_served(narrow: ServerProcess) -> None:
    async def flood(client: httpx.AsyncClient) -> list[httpx.Response]:
        async with all_rows_taken(narrow, client, [f"{i}" for i in range(ROWS)]):
            calls = [asyncio.create_task(client.post("/generate", json=body_of(prompt, 48))) for _ in range(count)]
            await until(lambda: sum(call.done() for call in calls) >= count - 8)
        return await asyncio.gather(*calls)

    prompt = "".join(one_token_words()[:999])  # a prompt of 1,000 tokens; the queue holds eight such prompts
    count = 250  # with all rows fewer than there are permits
    (responses,) = at_once(narrow.url, flood)
    served = [response for response in responses if response.status_code == 200]
    refused = [response for response in responses if response.status_code == 429]
    print(f"{len(served)} served, {len(refused)} refused")
    assert len(served) >= 8 and len(refused) >= 50 and len(served) + len(refused) == count
    assert {response.headers["x-generated-tokens"] for response in served} == {"48"}
    assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
    assert {response.json()["error_type"] for response in refused} == {"overloaded"}


def test_hostile_headers_are_refused_or_of_no_effect(narrow: ServerProcess) -> None:
    async def throw(client: httpx.AsyncClient) -> list[int]:
        body = {"inputs": "Hi", "parameters": {"max_new_tokens": 1}}
        return [(await client.post("/generate", json=body, headers=case.headers)).status_code for case in cases]

    cases = [*hostile.headers()]
    for case, status in zip(cases, at_once(narrow.url, throw)[0], strict=True):
        assert status == 422 if case.refused else status < 500, f"{case.name}: {status}"


def is_idle(server: ServerProcess) -> bool:
    return metrics(server.url, "tgi_slots_used", "tgi_queue_size", "tgi_batch_current_size") == [0, 0, 0]


def test_idle_servers_have_only_free_and_cached_slots(
    plain: ServerProcess, caching: ServerProcess, narrow: ServerProcess, tight: ServerProcess
) -> None:
    servers: Sequence[ServerProcess] = (plain, caching, narrow, tight)
    for server in servers:
        wait_until(lambda server=server: is_idle(server), 60, "idle again")
        names = ("tgi_slots_cached", "tgi_slots_free", "tgi_batch_max_total_tokens", "tgi_books_errors")
        cached, free, capacity, errors = metrics(server.url, *names)
        assert cached + free == capacity and errors == 0
        assert (cached > 0) == (server is not plain)
        assert metric(server.url, 'tgi_batch_inference_failure{method="decode"}') == 0
        assert "books of the token slots" not in server.log()
