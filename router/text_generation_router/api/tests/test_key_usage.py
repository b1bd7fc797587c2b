"""The metrics of each API key: the sums over all keys are the totals, however texts end."""

import asyncio
import json
from collections import Counter
from hashlib import sha256

import pytest

from text_generation_router.api.tests.conftest import HEADERS, ROUTES, Route, Script
from text_generation_router.engine.protocol import Ended, EndReason
from text_generation_router.metrics.key_usage import COUNTERS, MAX_NAMES, OTHER, labels_of, salt_of
from text_generation_router.metrics.metrics import Metrics
from text_generation_router.metrics.page import render

ALL_ROUTES = (*ROUTES, Route("/invocations", {"inputs": "Hi"}), Route("/vertex", {"instances": [{"inputs": "Hi"}] * 2}))
WEIGHTS = {"one": 1, "two": 2}  # how often a key sends each request
NAMES = {sha256(key.encode()).digest(): f"team-{key}" for key in WEIGHTS}
# For each end of a text, what the engine does and how many tokens it makes: complete, client gone, failed, never begun.
ENDS = {
    "whole": (Script(cached_tokens=1), 2),
    "cancelled": (Script(hang_after=1, cached_tokens=1), 1),
    "failed": (Script(ends_after=(1, Ended(EndReason.FAILED, 0.5)), cached_tokens=1), 1),
    "waiting": (Script(hang_after=0, begins=False), 0),
}


def used(metrics: Metrics, name: str) -> dict[str, float]:
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    return {sample.labels["key"]: sample.value for sample in samples if sample.name == f"{name}_total"}


async def send_all(server, end: str, **fields) -> None:
    asked = server.engine.asked
    num_texts = sum(WEIGHTS.values()) * (len(ALL_ROUTES) + 1)  # /vertex has two
    leave_when = None
    if ENDS[end][0].hang_after is not None:
        leave_when = lambda: len(asked) == num_texts and all(one.hangs for one in asked)  # noqa: E731
    calls = [
        server.call("POST", route.path, json.dumps(route.body | fields).encode(), headers, leave_when=leave_when)
        for route in ALL_ROUTES
        for key, weight in WEIGHTS.items()
        for headers in [HEADERS | {"authorization": f"Bearer {key}"}] * weight
    ]
    await asyncio.gather(*calls)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_the_sums_over_the_names_are_the_totals_on_every_route(make_server, end, stream):
    server = make_server(api_keys=NAMES, max_concurrent_requests=200)
    server.engine.script, num_tokens = ENDS[end]
    asyncio.run(send_all(server, end, stream=stream))
    requests = used(server.metrics, "tgi_key_requests")
    assert sum(requests.values()) == server.metric("tgi_request_count_total")
    assert requests["team-two"] == 2 * requests["team-one"] > 0
    prompts, texts = Counter[str](), Counter[str]()
    for asked in server.engine.asked:
        digest = next(digest for digest in NAMES if asked.request.share.owner.endswith(digest.hex()[:16]))
        prompts[NAMES[digest]] += len(asked.request.input_ids)
        texts[NAMES[digest]] += 1
    assert set(texts) == set(NAMES.values())
    begun = bool(num_tokens)
    assert used(server.metrics, "tgi_key_prompt_tokens") == {name: prompts[name] * begun for name in texts}
    assert used(server.metrics, "tgi_key_cached_tokens") == {name: texts[name] * begun for name in texts}
    assert used(server.metrics, "tgi_key_output_tokens") == {name: texts[name] * num_tokens for name in texts}
    if end == "whole":
        assert sum(prompts.values()) == server.metric("tgi_request_input_length_sum")
        assert sum(texts.values()) * num_tokens == server.metric("tgi_request_generated_tokens_sum")


def test_refused_requests_count_and_those_without_a_key_do_not(make_server):
    server = make_server(api_keys=NAMES)
    for key in ("one", "none"):
        server.post(
            "/generate", {"inputs": "Hi", "parameters": {"top_p": 7}}, HEADERS | {"authorization": f"Bearer {key}"}
        )
    assert used(server.metrics, "tgi_key_requests") == {"team-one": 1, "team-two": 0}
    assert server.metric("tgi_request_count_total") == 1


def test_the_series_are_there_from_the_start_and_only_with_keys(make_server):
    many = {bytes([number]) * 32: f"n{number}" if number % 2 else "" for number in range(60)}
    page = render(make_server(api_keys=many).metrics.registry)
    assert page.count("{key=") == len(COUNTERS) * (MAX_NAMES + 1)
    assert len([line for line in page.splitlines() if line and line[0] != "#"]) <= 1000
    assert "tgi_key" not in render(make_server().metrics.registry)


def test_names_come_before_digests_and_what_is_beyond_the_limit_is_other():
    keys = {bytes([number]) * 32: f"n{number}" if number >= 20 else "" for number in range(40)}
    labels = labels_of(keys, b"salt")
    assert all(labels[digest] == name for digest, name in keys.items() if name)
    assert len(set(labels.values()) - {OTHER}) == MAX_NAMES and list(labels.values()).count(OTHER) == 15
    assert set(labels_of(dict.fromkeys(keys, "team"), b"salt").values()) == {"team"}


def test_fronts_agree_on_digests_that_do_not_show_the_keys():
    digest = sha256(b"one").digest()
    first, second = (labels_of({digest: ""}, salt_of(b"k" * 32, is_alone=alone))[digest] for alone in (True, False))
    assert first == second and first not in (OTHER, digest.hex()[: len(first)])
    alone = {labels_of({digest: ""}, salt_of(b"", is_alone=True))[digest] for _ in range(2)}
    assert len(alone) == 2 and first not in alone
    assert labels_of({digest: ""}, salt_of(b"", is_alone=False)) == {digest: OTHER}
