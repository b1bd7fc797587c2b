"""The log-probabilities of a prompt on TGI's routes: `decoder_input_details`."""

import asyncio
import time
from typing import Any

from text_generation_router.api.common.generation import Generation
from text_generation_router.http.caller import Caller
from text_generation_router.scheduling.request import Share
from text_generation_router.text.tokens.events import FinishReason
from text_generation_router.text.validation import AskedParameters, Prompt

DETAILS = {"inputs": "hello there", "parameters": {"decoder_input_details": True}}


def test_with_the_flag_an_answer_lists_the_prompts_tokens_and_the_first_has_no_logprob(make_server: Any) -> None:
    server = make_server(enable_prefill_logprobs=True)
    details = server.post("/generate", DETAILS).json["details"]
    (asked,) = server.engine.asked
    ids = asked.request.input_ids
    assert asked.request.prompt_logprobs == 0 and len(ids) > 1
    text_of = server.engine.vocabulary.text_of
    logprobs = [None, *(-(i + 1) / 8 for i in range(len(ids) - 1))]
    assert details["prefill"] == [
        {"id": i, "text": text_of(i), "logprob": logprob} for i, logprob in zip(ids, logprobs, strict=True)
    ]
    assert [token["text"] for token in details["tokens"]] == [" there", "!"]


def test_without_the_flag_the_list_is_empty_as_in_tgi_and_the_answer_has_details(server: Any) -> None:
    details = server.post("/generate", DETAILS).json["details"]
    assert details["prefill"] == [] and len(details["tokens"]) == 2
    assert server.engine.asked[0].request.prompt_logprobs is None


def test_details_alone_ask_for_no_logprobs(make_server: Any) -> None:
    server = make_server(enable_prefill_logprobs=True)
    body = {"inputs": "hello", "parameters": {"details": True}}
    assert server.post("/generate", body).json["details"]["prefill"] == []
    assert server.engine.asked[0].request.prompt_logprobs is None


def test_each_sequence_of_best_of_has_the_list_and_one_of_them_computes_it(make_server: Any) -> None:
    server = make_server(enable_prefill_logprobs=True)
    body = {"inputs": "hello", "parameters": {"decoder_input_details": True, "best_of": 2, "do_sample": True}}
    details = server.post("/generate", body).json["details"]
    (other,) = details["best_of_sequences"]
    assert details["prefill"] == other["prefill"] and details["prefill"][0]["logprob"] is None
    assert sorted(str(asked.request.prompt_logprobs) for asked in server.engine.asked) == ["0", "None"]


def result_of(server: Any, **parameters: Any) -> Generation:
    async def run() -> Generation:
        prompt = Prompt("hello there", AskedParameters(**parameters))
        (result,) = await server.services.inference.results([prompt], Caller(Share(), (), None), time.perf_counter())
        return result

    return asyncio.run(run())


def test_a_route_may_ask_for_the_prompt_alone(server: Any) -> None:
    """The flag `--enable-prefill-logprobs` is not needed here: it concerns TGI's routes only."""
    result = result_of(server, max_new_tokens=0, takes_no_tokens=True, prompt_logprobs=2)
    assert result.tokens == () and result.finish.reason is FinishReason.LENGTH
    assert (result.finish.generated_text, result.finish.generated_tokens) == ("", 0)
    assert result.prompt is not None
    (first, no_tops), *others = result.prompt
    assert first.logprob != first.logprob and no_tops == ()
    assert [token.logprob for token, _ in others] == [-(i + 1) / 8 for i in range(len(others))]
    assert [[top.id for top in tops] for _, tops in others] == [[0, 1]] * len(others)
    assert server.permits.left == 4


def test_a_route_that_asks_for_nothing_of_the_prompt_gets_nothing(server: Any) -> None:
    assert result_of(server, max_new_tokens=2).prompt is None
