"""Conversions of the items of /v1/responses to messages of chats."""

import pytest

from text_generation_router.api.openai.schemas import RenderedChat
from text_generation_router.api.responses.chat import chat_of, messages_of
from text_generation_router.api.responses.schemas import RenderedResponses, ResponsesRequest
from text_generation_router.errors import ValidationError

CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "Sunny"}
CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TOLD = {"role": "tool", "content": "Sunny", "tool_call_id": "c1"}
USER = {"role": "user", "content": "Hi"}


def messages(given, **fields):
    asked = ResponsesRequest.model_validate({"input": given, **fields})
    return [
        {"role": one.role, "content": one.content, **one.others}
        for one in (body.message() for body in messages_of(asked))
    ]


def assistant(text=None, **others):
    return {"role": "assistant", "content": text, **others}


def answered(text):
    """A message item in the form that answers have."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "content": [part]}


def reasoning(text, **fields):
    return {
        "id": "rs_1",
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    } | fields


@pytest.mark.parametrize(
    "given", ["Hi", [USER], [USER | {"type": "message", "content": [{"type": "input_text", "text": "Hi"}]}]]
)
def test_a_text_is_a_message_of_the_users(given):
    assert messages(given) == [USER]
    assert messages(given, instructions="Be short.") == [{"role": "system", "content": "Be short."}, USER]


CUSTOM_CALL = {"type": "custom_tool_call", "call_id": CALL["call_id"], "name": "patch", "input": 'a "b"'}
CUSTOM_CALLED = CALLED | {"function": {"name": "patch", "arguments": {"input": 'a "b"'}}}
CONVERSATIONS = {
    "text": ([USER, answered("Ho"), USER], [USER, assistant("Ho"), USER]),
    "a call": ([USER, CALL, RESULT], [USER, assistant(tool_calls=[CALLED]), TOLD]),
    "a custom call": (
        [USER, CUSTOM_CALL, RESULT | {"type": "custom_tool_call_output"}],
        [USER, assistant(tool_calls=[CUSTOM_CALLED]), TOLD],
    ),
    "a call of a namespace": (
        [CALL | {"namespace": "n"}],
        [assistant(tool_calls=[CALLED | {"function": CALLED["function"] | {"name": f"n__{CALL['name']}"}}])],
    ),
    "a search of another server": ([USER, {"type": "web_search_call", "id": "x", "action": {}}], [USER]),
    "a call behind a text": ([answered("a"), CALL, RESULT], [assistant("a", tool_calls=[CALLED]), TOLD]),
    "a text behind a call": ([CALL, answered("a"), RESULT], [assistant("a", tool_calls=[CALLED]), TOLD]),
    "two calls": (
        [CALL, CALL | {"call_id": "c2"}, RESULT, RESULT | {"call_id": "c2"}],
        [assistant(tool_calls=[CALLED, CALLED | {"id": "c2"}]), TOLD, TOLD | {"tool_call_id": "c2"}],
    ),
    "call after call": ([CALL, RESULT, CALL, RESULT], [assistant(tool_calls=[CALLED]), TOLD] * 2),
    "reasoning": (
        [reasoning("x"), answered("a"), reasoning("y"), CALL, RESULT],
        [assistant("a", reasoning_content="x"), assistant(reasoning_content="y", tool_calls=[CALLED]), TOLD],
    ),
    "a summary": (
        [reasoning("", content=None, summary=[{"type": "summary_text", "text": "s"}]), answered("a")],
        [assistant("a", reasoning_content="s")],
    ),
    "encrypted": ([reasoning("", content=None, encrypted_content="x"), answered("a")], [assistant("a")]),
    "two texts": ([answered("a"), answered("b")], [assistant("a"), assistant("b")]),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_turn_of_the_model_is_one_message(name):
    items, told = CONVERSATIONS[name]
    assert messages(items) == told


def test_a_result_may_be_a_list_of_parts():
    parts = [{"type": "input_text", "text": "Sun"}, {"type": "input_text", "text": "ny"}]
    assert messages([RESULT | {"output": parts}]) == [TOLD]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (
            {"type": "item_reference", "id": "msg_1"},
            "`item_reference` in `input` is not supported: answers are not stored",
        ),
        ({"type": "file_search_call", "id": "x"}, "`file_search_call` in `input` is not supported yet"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "`input_image` in `input` is not supported yet"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "`input_file` in `input` is not supported yet"),
        (RESULT | {"output": [{"type": "input_image"}]}, "`input_image` in `input` is not supported yet"),
    ],
)
def test_other_items_and_parts_are_refused_by_their_kind(item, text):
    with pytest.raises(ValidationError, match=text):
        messages([item])


def test_parameters_have_their_names_in_chats():
    include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    body = {"max_output_tokens": 5, "temperature": 0.5, "top_logprobs": 2, "include": include, "seed": 2}
    chat = chat_of(ResponsesRequest.model_validate(body | {"input": "Hi"}))
    assert (chat.max_tokens, chat.temperature, chat.logprobs, chat.top_logprobs, chat.seed) == (5, 0.5, True, 2, 2)
    large = chat_of(RenderedResponses.model_validate(body | {"prompt": "Hi"}))
    assert isinstance(large, RenderedChat) and large.prompt == "Hi"
    assert large.model_dump(exclude={"prompt", "prompt_without_tools"}) == chat.model_dump(
        exclude={"messages", "documents"}
    )
    with pytest.raises(ValidationError, match="`top_logprobs` is allowed only if `include`"):
        chat_of(ResponsesRequest.model_validate(body | {"input": "Hi", "include": []}))


def test_an_input_that_makes_no_message_is_refused():
    empty = ResponsesRequest.model_validate({"input": [{"type": "reasoning", "id": "r", "summary": []}]})
    with pytest.raises(ValidationError, match="`input` must have a message"):
        chat_of(empty)
