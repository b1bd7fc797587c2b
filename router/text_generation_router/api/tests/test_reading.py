"""Large bodies are read in a child process, and get the same answers as small bodies."""

import json
from functools import partial
from pathlib import Path

import orjson
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_common.tests.examples import examples
from text_generation_router.api.anthropic.schemas import MessagesRequest
from text_generation_router.api.common.body import LARGE_BYTES
from text_generation_router.api.common.body_kinds import check, job_of, read_answer
from text_generation_router.api.common.fields import ListLimits
from text_generation_router.api.openai.fields import CHAT_BODY, COMPLETION_BODY
from text_generation_router.api.openai.schemas import ChatRequest, CompletionRequest
from text_generation_router.api.reading_child import ENTRY, make_handlers, setup_of
from text_generation_router.api.responses.fields import RESPONSES_BODY
from text_generation_router.api.responses.routes import head_json
from text_generation_router.api.responses.schemas import ResponsesRequest
from text_generation_router.api.tgi.fields import COMPAT_GENERATE_BODY, GENERATE_BODY, TOKENIZE_BODY
from text_generation_router.api.tgi.schemas import GenerateRequest
from text_generation_router.errors import InferenceError
from text_generation_router.offload.errors import BusyError, JobFailedError, JobLostError, JobTimeoutError
from text_generation_router.offload.pool import PoolLimits, ProcessPool
from text_generation_router.text.grammars.tool_grammar import CallWays
from text_generation_router.text.templates.chat_template import ChatTemplate, Conversation, Message

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

LIMITS = ListLimits(messages=40, prompts=3, stops=4)
QUESTIONS = (GENERATE_BODY, COMPAT_GENERATE_BODY, TOKENIZE_BODY, COMPLETION_BODY, CHAT_BODY)
TEMPLATE = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ eos_token }}", {"eos_token": "$"}
)
HANDLERS = make_handlers(setup_of(TEMPLATE, CallWays(), CallWays()))
PADDING = {"padding": "x" * LARGE_BYTES}


def padded(body: dict[str, object]) -> dict[str, object]:
    return body | PADDING


def test_a_large_body_is_answered_as_a_small_one(make_server, route):
    answers = []
    for body in (route.body, padded(route.body)):
        server = make_server(payload_limit=10**6)
        server.engine.script.texts = ("a", "b")
        answers.append(server.post(route.path, body))
        assert len(server.offload.done) == (len(json.dumps(body)) > LARGE_BYTES)
        assert server.metric("tgi_request_success_total") == 1
    small, large = answers
    assert small.status == large.status == 200
    assert without_clock(small.body) == without_clock(large.body)


def without_clock(body: bytes) -> bytes:
    return b",".join(part for part in body.split(b",") if b"created" not in part)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        *TABLES["statuses"],
        ("/generate_stream", {"inputs": "a", "parameters": {"stop": ["a"] * 5}}, 200),
        ("/generate", {"inputs": "a", "parameters": {"stop": ["a"] * 5}}, 422),
        ("/v1/completions", {"prompt": ["a"] * 4}, 400),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [1] * 1025}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 41}, 400),
        ("/v1/responses", {"input": [{"role": "user", "content": ""}] * 41}, 400),
    ],
)
def test_a_large_body_is_refused_as_a_small_one_and_counted_alike(make_server, path, body, status):
    seen = []
    for sent in (body, padded(body)):
        server = make_server(payload_limit=10**6)
        answer = server.post(path, sent)
        counts = [server.metric("tgi_request_count_total"), server.failures("validation"), server.failures("template")]
        seen.append((answer.status, answer.body, counts))
    assert seen[0] == seen[1] and seen[0][0] == status


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (GenerateRequest, {"inputs": "a", "parameters": {"stop": [1] * 1000}}),
        (CompletionRequest, {"prompt": [1.5] * 1000}),
        (CompletionRequest, {"prompt": "a", "stop": [{}] * 1000}),
        (ChatRequest, {"messages": [1] * 1000}),
        (ChatRequest, {"messages": [{"role": 1, "content": "a"}] * 1000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 1000}] * 1000}),
        (ResponsesRequest, {"input": [1] * 1000}),
        (ResponsesRequest, {"input": [{"type": "message", "role": "user", "content": 1}] * 1000}),
        (MessagesRequest, {"max_tokens": 1, "messages": [1] * 1000}),
        (MessagesRequest, {"max_tokens": 1, "messages": [{"role": "user", "content": [{}] * 1000}] * 1000}),
    ],
)
def test_a_list_fails_at_its_first_bad_item(schema, value):
    with pytest.raises(pydantic.ValidationError) as caught:
        schema.model_validate(value)
    assert caught.value.error_count() == 1


@pytest.mark.parametrize(
    ("schema", "value", "text"),
    [
        (
            GenerateRequest,
            {"inputs": "a", "parameters": {"stop": [1] * 5}},
            "`stop` supports up to 4 stop sequences. Given: 5",
        ),
        (CompletionRequest, {"prompt": "a", "stop": [1] * 5}, "`stop` supports up to 4 stop sequences. Given: 5"),
        (CompletionRequest, {"prompt": [1.5] * 4}, "Number of prompts exceeds the maximum allowed batch size of 3"),
        (ChatRequest, {"messages": [1] * 41}, "`messages` must have at most 40 messages"),
    ],
)
def test_a_list_that_is_too_long_is_refused_before_its_items(schema, value, text):
    with pytest.raises(InferenceError) as caught:
        check(schema, value, LIMITS)
    assert text in caught.value.text and "\n" not in caught.value.text


def test_the_models_name_in_a_request_is_bounded_since_every_event_repeats_it(server):
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "model": "m" * 513})
    assert answer.status == 400 and "model: " in answer.told["error"]


@pytest.mark.parametrize(
    ("failures", "status", "error_type"),
    [
        ([BusyError()], 429, "overloaded"),
        ([JobTimeoutError()], 422, "unprocessable"),
        ([JobFailedError("MemoryError")], 422, "unprocessable"),
        ([JobLostError(), JobLostError()], 422, "unprocessable"),
        ([JobLostError(), BusyError()], 429, "overloaded"),
    ],
)
def test_a_body_that_no_child_can_read_is_refused_by_name(make_server, failures, status, error_type):
    server = make_server(payload_limit=10**6)
    server.offload.failures = failures
    answer = server.post("/generate", padded({"inputs": "Hi"}))
    assert (answer.status, answer.json["error_type"]) == (status, error_type)
    assert "\n" not in answer.json["error"]


def test_a_body_whose_child_was_killed_is_read_by_the_next(make_server):
    server = make_server(payload_limit=10**6)
    server.offload.failures = [JobLostError()]
    assert server.post("/generate", padded({"inputs": "Hi"})).status == 200


def test_a_childs_answer_has_no_unused_nested_values_of_the_body():
    body = orjson.dumps({"inputs": "a", "parameters": {"metadata": [[[]]] * 1000}, "extra": [1] * 1000})
    assert len(HANDLERS[GENERATE_BODY.name](job_of(body, LIMITS))) < 100
    chat = orjson.dumps({"messages": [{"role": "user", "content": "a"}] * 40, "metadata": [1] * 1000})
    answer = {"asked": {"prompt": "<user>a" * 40 + "$"}, "unknown": [], "left_out": []}
    assert orjson.loads(HANDLERS[CHAT_BODY.name](job_of(chat, LIMITS))) == answer


async def test_a_child_process_reads_and_renders():
    messages = [{"role": "user", "content": "é" * 1000}] * 40
    pool = ProcessPool(ENTRY, setup_of(TEMPLATE, CallWays(), CallWays()), PoolLimits(1, 4))
    pool.start()
    try:
        job = job_of(orjson.dumps({"messages": messages, "seed": 2**64 - 1, "temperature": 0.1}), LIMITS)
        asked = read_answer(CHAT_BODY, await pool.run(CHAT_BODY.name, job, 30)).asked
    finally:
        await pool.close()
    assert asked.prompt == TEMPLATE.render(Conversation(tuple(Message(**message) for message in messages)))
    assert asked.seed == 2**64 - 1


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(
    (
        "inputs prompt messages parameters stop seed stream stream_options logprobs suffix tools max_tokens "
        "temperature top_p model cache_salt logit_bias n"
    ).split()
)
chats = st.lists(
    st.fixed_dictionaries({"role": st.text(max_size=3), "content": st.text(max_size=3) | values}), max_size=4
)
parameters = st.dictionaries(
    st.sampled_from("top_k stop seed best_of grammar temperature do_sample timeout logit_bias bad_words".split()),
    values,
)
bodies = st.dictionaries(names, values) | st.builds(
    lambda known, more: {**more, **known},
    st.fixed_dictionaries({"inputs": st.text(), "parameters": parameters, "prompt": st.text(), "messages": chats}),
    st.dictionaries(names, values, max_size=2),
)


@examples(300)
@given(body=bodies, question=st.sampled_from(QUESTIONS))
def test_a_child_reads_the_same_values_and_errors_as_the_router(body, question):
    content = orjson.dumps(body)
    try:
        read = question.read(content, LIMITS)
        text = TEMPLATE.render(read.asked.conversation(CallWays())) if question is CHAT_BODY else None
    except InferenceError as error:
        with pytest.raises(type(error)) as caught:
            read_answer(question, HANDLERS[question.name](job_of(content, LIMITS)))
        assert (caught.value.text, caught.value.param) == (error.text, error.param)
        return
    answered = read_answer(question, HANDLERS[question.name](job_of(content, LIMITS)))
    assert answered.unknown == read.unknown
    if question is CHAT_BODY:
        assert answered.asked.prompt == text
        assert answered.asked.model_dump(exclude={"prompt"}) == read.asked.model_dump(exclude={"messages"})
    else:
        assert answered.asked == read.asked


@pytest.mark.parametrize("fields", [{}, {"instructions": None}, {"instructions": "Be short."}])
def test_instructions_that_a_child_has_read_are_told_in_the_answer(fields):
    content = orjson.dumps({"input": "Hi"} | fields)
    asked = read_answer(RESPONSES_BODY, HANDLERS[RESPONSES_BODY.name](job_of(content, LIMITS))).asked
    assert head_json(asked, "m")["instructions"] == fields.get("instructions")
    assert ("Be short." in asked.prompt) == bool(fields.get("instructions"))


@examples(200)
@given(content=st.binary(max_size=200), question=st.sampled_from(QUESTIONS))
def test_a_child_answers_any_bytes_as_the_router_would(content, question):
    for body in (content, b"{" + content):
        child = partial(read_answer, question, HANDLERS[question.name](job_of(body, LIMITS)))
        try:
            question.read(body, LIMITS)
        except InferenceError as error:
            with pytest.raises(type(error)):
                child()
        else:
            child()  # reached, because hypothesis does find bytes that form a valid body


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.name)
@pytest.mark.parametrize("body", [b"", b"\xff", b"{", b"[1]", b'{"inputs"', b"\x00" * 100, b'{"inputs": "a"} x'])
def test_a_child_refuses_bytes_that_are_not_a_body(body, question):
    with pytest.raises(InferenceError):
        read_answer(question, HANDLERS[question.name](job_of(body, LIMITS)))
