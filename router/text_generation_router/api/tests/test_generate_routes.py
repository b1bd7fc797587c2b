import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from text_generation_common.sampling import Sampling
from text_generation_router.engine.protocol import Ended
from text_generation_router.errors import OverloadedError, Refusal, RefusedError
from text_generation_router.http.dialects import NATIVE
from text_generation_router.http.errors import error_headers
from text_generation_router.scheduling.request import EndReason

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

MUST_SAMPLE = {"best_of": 2, "do_sample": True}


def test_generate_answers_with_the_text_alone(server):
    answer = server.post("/generate", {"inputs": "Hi", "parameters": {"max_new_tokens": 2}})
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.body == b'{"generated_text":" there!"}'


def test_details_have_the_bytes_of_the_contract(server):
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 2, "details": True, "top_n_tokens": 1}}
    there = '{"id":700,"text":" there","logprob":-0.5,"special":false}'
    bang = '{"id":701,"text":"!","logprob":-0.25,"special":false}'
    expected = (
        '{"generated_text":" there!","details":{"finish_reason":"length","generated_tokens":2,"seed":null,'
        f'"cached_tokens":0,"prefill":[],"tokens":[{there},{bang}],"top_tokens":[[{there}],[{bang}]]}}}}'
    )
    assert server.post("/generate", body).body.decode() == expected


def test_compat_route_answers_with_a_list_and_the_full_text(server):
    assert server.post("/", {"inputs": "Hi", "parameters": {}}).body == b'[{"generated_text":"Hi there!"}]'
    explicit = {"inputs": "Hi", "parameters": {"return_full_text": False}}
    assert server.post("/", explicit).json == [{"generated_text": " there!"}]


def test_stream_has_the_bytes_of_the_contract(server):
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 2, "details": True}}
    answer = server.post("/generate_stream", body)
    first = (
        '{"index":1,"token":{"id":700,"text":" there","logprob":-0.5,"special":false},'
        '"generated_text":null,"details":null}'
    )
    last = (
        '{"index":2,"token":{"id":701,"text":"!","logprob":-0.25,"special":false},"generated_text":" there!",'
        '"details":{"finish_reason":"length","generated_tokens":2,"seed":null,"cached_tokens":0,"input_length":2}}'
    )
    assert [chunk.decode() for chunk in answer.chunks] == [f"data: {first}\n\n", f"data: {last}\n\n"]
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-compute-characters"] == "2"


def test_compat_route_streams_on_demand(server):
    events = server.post("/", {"inputs": "Hi", "stream": True}).events
    assert [event["index"] for event in events] == [1, 2]
    assert events[-1]["generated_text"] == "Hi there!" and events[-1]["details"] is None


def test_logprobs_print_as_float32_and_nan_as_null(server):
    server.engine.script.logprobs = (-2.5839843750931323, float("nan"))
    body = {"inputs": "Hi", "parameters": {"details": True}}
    assert b'"logprob":-2.5839844' in server.post("/generate", body).body
    assert server.post("/generate", body).json["details"]["tokens"][1]["logprob"] is None


def test_absent_parameters_sample_and_empty_ones_do_not(server):
    server.post("/generate", {"inputs": "Hi"})
    server.post("/generate", {"inputs": "Hi", "parameters": {}})
    assert [asked.request.sampling.do_sample for asked in server.engine.asked] == [True, False]


def test_parameters_reach_the_engine(server):
    parameters = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.25, "typical_p": 0.75, "repetition_penalty": 1.5,
        "frequency_penalty": -1, "seed": 2**64 - 1, "stop": ["a", "b"], "watermark": True, "ignore_eos_token": True,
        "max_new_tokens": 7, "top_n_tokens": 2,
    }  # fmt: skip
    server.post("/generate", {"inputs": "hello", "parameters": parameters})
    request = server.engine.asked[0].request
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.typical_p) == (0.5, 3, 0.25, 0.75)
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.seed) == (1.5, -1.0, 2**64 - 1)
    assert (sampling.watermark, sampling.top_n_tokens) == (True, 2)
    assert (request.ignore_eos, request.max_new_tokens) == (True, 7)


def test_parameters_that_name_tokens_reach_the_engine(server):
    parameters = {
        "min_p": 0.25, "presence_penalty": 0.5, "logit_bias": {"3": -100, "0": 1.5}, "allowed_token_ids": [5, 0, 999],
        "stop_token_ids": [7, 3], "min_new_tokens": 4, "ignore_eos_token": True, "max_new_tokens": 9,
    }  # fmt: skip
    assert server.post("/generate", {"inputs": "hello", "parameters": parameters}).status == 200
    request = server.engine.asked[0].request
    sampling = request.sampling
    assert (sampling.min_p, sampling.presence_penalty, sampling.do_sample) == (0.25, 0.5, True)
    assert sampling.logit_bias == ((3, -100.0), (0, 1.5)) and sampling.allowed_token_ids == (5, 0, 999)
    assert (sampling.min_new_tokens, sampling.end_token_ids) == (4, (3, 7))
    assert request.stop_token_ids == {3, 7} and request.ignore_eos


def test_bad_words_reach_the_engine_as_tokens_with_and_without_a_space(server):
    assert server.post("/generate", {"inputs": "Hi", "parameters": {"bad_words": ["fox", " dog"]}}).status == 200
    tokenizer = server.tokenizer.tokenizer
    words = server.engine.asked[0].request.sampling.bad_words_ids
    assert words == tuple(tuple(tokenizer.encode(text).ids) for text in ("fox", "dog", " fox", " dog"))


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        *TABLES["token_lists"],
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"allowed_token_ids": [1] * 1025}, "allowed_token_ids"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        ({"bad_words": ["x"] * 1025}, "bad_words"),
        ({"bad_words": ["x" * 1025]}, "bad_words"),
        ({"bad_words": ["x" * 20_000]}, "bad_words"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_lists_of_tokens_that_cannot_be_served_are_refused_by_their_field(make_server, parameters, field):
    server = make_server(payload_limit=60_000)
    answer = server.post("/generate", {"inputs": "Hi", "parameters": parameters})
    assert answer.status == 422 and field in answer.json["error"] and not server.engine.asked


def test_lists_that_ask_for_nothing_are_served(server):
    nothing = {"logit_bias": [], "stop_token_ids": [], "bad_words": [], "min_p": 0, "presence_penalty": 0}
    assert server.post("/generate", {"inputs": "Hi", "parameters": nothing}).status == 200
    assert replace(server.engine.asked[0].request.sampling, seed=0) == Sampling()


def test_max_new_tokens_null_means_as_many_as_fit(server):
    server.post("/generate", {"inputs": "Hi", "parameters": {"max_new_tokens": None}})
    request = server.engine.asked[0].request
    assert request.max_new_tokens == server.engine.limits.max_total_tokens - len(request.input_ids)


def test_truncate_keeps_the_tail(server):
    server.post("/generate", {"inputs": "xyz", "parameters": {"truncate": 2}})
    tokenizer = server.tokenizer.tokenizer
    assert tokenizer.decode(list(server.engine.asked[0].request.input_ids)) == "yz"


def test_best_of_picks_the_highest_mean_logprob_and_shows_the_others(server):
    script = type(server.engine.script)
    server.engine.scripts = [script(texts=("worse",), logprobs=(-2.0,)), script(texts=("better",), logprobs=(-1.0,))]
    body = {"inputs": "Hi", "parameters": MUST_SAMPLE | {"details": True}}
    answer = server.post("/generate", body).json
    assert answer["generated_text"] == "better"
    [other] = answer["details"]["best_of_sequences"]
    assert other["generated_text"] == "worse"
    seeds = [asked.request.sampling.seed for asked in server.engine.asked]
    assert len(set(seeds)) == 2 and answer["details"]["seed"] == seeds[1]
    assert server.metric("tgi_request_count_total") == 1 and server.metric("tgi_request_success_total") == 2


def test_best_of_takes_a_permit_for_each_generation(make_server):
    answer = make_server(max_concurrent_requests=1).post("/generate", {"inputs": "Hi", "parameters": MUST_SAMPLE})
    assert answer.status == 429


def test_timing_headers_are_on_success_only(server):
    headers = server.post("/generate", {"inputs": "Hi"}).headers
    assert headers["x-compute-type"] == "2-test-card"
    assert (headers["x-queue-time"], headers["x-inference-time"], headers["x-time-per-token"]) == ("250", "500", "250")
    assert (headers["x-prompt-tokens"], headers["x-generated-tokens"], headers["x-compute-characters"]) == (
        "2",
        "2",
        "2",
    )
    assert float(headers["x-compute-time"]) > 0 and headers["x-total-time"].isdigit()
    refused = server.post("/generate", {"inputs": ""}).headers
    assert [name for name in refused if name.startswith("x-")] == ["x-request-id"]


@pytest.mark.parametrize(("path", "stream"), [("/generate_stream", False), ("/", True)])
def test_a_streams_validation_error_is_one_event_with_status_200(server, path, stream):
    answer = server.post(path, {"inputs": "", "stream": stream})
    error = {"error": "Input validation error: `inputs` cannot be empty", "error_type": "validation"}
    assert (answer.status, answer.events) == (200, [error])
    assert server.failures("validation") == 1


def test_overload_is_429_or_an_event(make_server):
    server = make_server(max_concurrent_requests=0)
    error = {"error": "Model is overloaded", "error_type": "overloaded"}
    answer = server.post("/generate", {"inputs": ""})  # before validation
    assert (answer.status, answer.json, answer.headers["retry-after"]) == (429, error, "1")
    server.engine.pause_s = 7
    assert server.post("/generate", {"inputs": "Hi"}).headers["retry-after"] == "7"
    assert server.post("/generate_stream", {"inputs": "Hi"}).events == [error]
    assert server.failures("overloaded") == 3


@pytest.mark.parametrize("answers_after", [None, 0.01])
def test_a_refusal_by_the_engine_is_429_or_an_event(server, answers_after):
    server.engine.refusal, server.engine.answers_after = RefusedError(Refusal.OVERLOADED, 30), answers_after
    for path in ("/generate", "/v1/completions"):
        answer = server.post(path, {"inputs": "Hi"} if path == "/generate" else {"prompt": "Hi"})
        assert (answer.status, answer.headers["retry-after"]) == (429, "30")
    assert server.permits.left == 4 and server.failures("overloaded") == 2
    assert not server.failures("dropped")
    assert error_headers(OverloadedError(retry_after_s=0), NATIVE) == {"retry-after": "1"}


def test_a_failure_of_the_shards_is_424_or_the_last_event(server):
    server.engine.script.ends_after = (1, Ended(EndReason.FAILED, cause="Server error: boom"))
    error = {"error": "Request failed during generation: Server error: boom", "error_type": "generation"}
    answer = server.post("/generate", {"inputs": "Hi"})
    assert (answer.status, answer.json) == (424, error)
    events = server.post("/generate_stream", {"inputs": "Hi"}).events
    assert len(events) == 2 and events[1] == error
    assert server.permits.left == 4 and server.failures("generation") == 2


def test_a_generation_is_incomplete_when_the_engine_is_closed(server):
    server.engine.script.ends_after = (1, Ended(EndReason.CLOSED))
    answer = server.post("/generate", {"inputs": "Hi"})
    assert (answer.status, answer.json["error_type"]) == (500, "incomplete_generation")
    events = server.post("/generate_stream", {"inputs": "Hi"}).events
    assert events[1] == {"error": "Incomplete generation stream", "error_type": "incomplete_generation_stream"}
    assert server.permits.left == 4


def test_a_late_refusal_by_the_engine_is_the_status_of_a_stream(server, route):
    server.engine.refusal, server.engine.answers_after = RefusedError(Refusal.OVERLOADED, 30), 0.01
    answer = server.ask(route, **({} if route.path in ("/", "/generate", "/generate_stream") else {"stream": True}))
    assert answer.status == (200 if route.fails_as_event else 429) and answer.told["error_type"] == "overloaded"
    assert server.permits.left == 4 and server.failures("overloaded") == 1


def test_an_answer_begins_when_the_engine_has_accepted_every_prompt(server, route):
    server.engine.answers_after = 0.01
    assert server.ask(route).status == 200
    answer = server.post("/v1/completions", {"prompt": ["a", "b"], "n": 1})
    assert answer.status == 200 and len(answer.json["choices"]) == 2 and server.permits.left == 4


def test_a_client_that_leaves_before_the_engine_has_accepted_its_request_ends_it(server):
    server.engine.answers_after = 60.0
    asyncio.run(server.call("POST", "/generate", b'{"inputs": "Hi"}', leave_after=0))
    assert [asked.cancelled for asked in server.engine.asked] == [True] and server.permits.left == 4


@pytest.mark.parametrize(("refusal", "status"), [(Refusal.CLOSED, 500), (Refusal.TOO_LONG, 422)])
@pytest.mark.parametrize("answers_after", [None, 0.01])
def test_a_request_that_the_engine_cannot_take_is_refused_by_its_reason(server, refusal, status, answers_after):
    server.engine.refusal, server.engine.answers_after = RefusedError(refusal), answers_after
    answer = server.post("/generate", {"inputs": "Hi", "parameters": {"max_new_tokens": 3}})
    errors = {
        500: {"error": "Incomplete generation", "error_type": "incomplete_generation"},
        422: {
            "error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 300. Given: 2 `inputs`"
            " tokens and 3 `max_new_tokens`",
            "error_type": "validation",
        },
    }
    assert (answer.status, answer.json) == (status, errors[status])
    assert server.permits.left == 4 and server.failures("incomplete" if status == 500 else "validation") == 1


def test_a_stop_string_ends_the_request_in_the_engine(server):
    server.engine.script.texts, server.engine.script.logprobs = ("one", " two", " three"), (0.0,) * 3
    body = {"inputs": "Hi", "parameters": {"details": True, "stop": ["e t"]}}
    answer = server.post("/generate", body).json
    details = answer["details"]
    assert (answer["generated_text"], details["finish_reason"]) == ("one t", "stop_sequence")
    assert details["generated_tokens"] == len(details["tokens"]) == 2
    assert server.engine.asked[0].num_kept == 2 and server.metric("tgi_request_success_total") == 1


def test_a_client_that_leaves_cancels_its_generation(server):
    server.engine.script.hang_after = 1
    for path, leave_after in (("/generate", 0), ("/generate_stream", 0), ("/generate_stream", 1)):
        body = json.dumps({"inputs": "Hi"}).encode()
        answer = asyncio.run(server.call("POST", path, body, leave_after=leave_after))
        assert server.engine.asked[-1].cancelled, (path, leave_after)
        assert b"error" not in answer.body
    assert server.failures("dropped") == 3
    assert server.permits.left == 4 and len(server.engine.asked) == 3


def test_every_generation_gives_back_its_permit(server):
    for body in ({"inputs": "Hi"}, {"inputs": ""}, {"inputs": "Hi", "parameters": MUST_SAMPLE}):
        server.post("/generate", body)
        server.post("/generate_stream", body)
    assert server.permits.left == 4


def test_finish_reasons_are_tgis(server):
    server.engine.script.reason = EndReason.EOS_TOKEN
    body = {"inputs": "Hi", "parameters": {"details": True}}
    assert server.post("/generate", body).json["details"]["finish_reason"] == "eos_token"


@pytest.mark.parametrize(("parameters", "text"), TABLES["refused"])
def test_refusals_name_the_parameter(server, parameters, text):
    answer = server.post("/generate", {"inputs": "Hi", "parameters": parameters})
    assert answer.status == 422
    assert answer.json == {"error": f"Input validation error: {text}", "error_type": "validation"}
    assert not server.engine.asked


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"best_of": 2, "do_sample": True}, "`best_of` != 1 is not supported when streaming tokens"),
        ({"best_of": 0}, "`best_of` != 1 is not supported when streaming tokens"),
        ({"decoder_input_details": True}, "`decoder_input_details` == true is not supported when streaming tokens"),
    ],
)
def test_parameters_that_cannot_be_streamed_are_refused_by_name(server, parameters, text):
    [event] = server.post("/generate_stream", {"inputs": "Hi", "parameters": parameters}).events
    assert event == {"error": f"Input validation error: {text}", "error_type": "validation"}


def test_the_official_clients_nulls_are_accepted(server):
    nullable = ("best_of", "temperature", "repetition_penalty", "frequency_penalty", "top_k", "top_p", "typical_p")
    nullable += ("max_new_tokens", "return_full_text", "truncate", "seed", "top_n_tokens", "grammar", "adapter_id")
    body = {"inputs": "Hi", "parameters": dict.fromkeys(nullable), "unknown": 1}
    assert server.post("/", body).status == 200
