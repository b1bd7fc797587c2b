"""Conversions of Anthropic's conversations to conversations of chats."""

import pytest

from text_generation_router.api.anthropic.chat import chat_of, counted_chat_of, messages_of
from text_generation_router.api.anthropic.schemas import CountTokensRequest, MessagesRequest, RenderedMessages
from text_generation_router.api.openai.schemas import RenderedChat
from text_generation_router.errors import ValidationError
from text_generation_router.text.grammars.tool_grammar import CallWays

WAYS = CallWays()

CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Sunny"}


def text(content):
    return {"type": "text", "text": content}


def turn(role, *blocks):
    return {"role": role, "content": list(blocks)}


def messages(*turns, **fields):
    asked = MessagesRequest.model_validate({"max_tokens": 5, "messages": list(turns), **fields})
    return [
        {"role": one.role, "content": one.content, **one.others}
        for one in (body.message() for body in messages_of(asked))
    ]


def test_texts_and_blocks_of_text_are_the_same():
    told = [{"role": "user", "content": "What is the answer?"}]
    assert messages({"role": "user", "content": "What is the answer?"}) == told
    assert messages(turn("user", text("What is"), text(" the answer?"))) == told


@pytest.mark.parametrize("system", ["Be short.\n\nBe kind.", [text("Be short."), text("Be kind.")]])
def test_a_system_prompt_is_the_first_message(system):
    told = messages({"role": "user", "content": "Hi"}, system=system)
    assert told == [{"role": "system", "content": "Be short.\n\nBe kind."}, {"role": "user", "content": "Hi"}]
    assert messages({"role": "user", "content": "Hi"}, system=None) == told[1:]


def test_a_system_message_stands_where_it_was_sent():
    told = messages({"role": "user", "content": "Hi"}, turn("system", text("a"), text("b")))
    assert [message["role"] for message in told] == ["user", "system"] and told[1]["content"] == "a\n\nb"


def test_calls_and_thinking_belong_to_the_assistants_message():
    thinking = {"type": "thinking", "thinking": "Where?", "signature": "s"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    assert messages(turn("assistant", thinking, redacted, text("Let me"), text(" see."), CALL)) == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
            ],
            "reasoning_content": "Where?",
        }
    ]


@pytest.mark.parametrize("blocks", [(RESULT, text("Well?")), (text("Well?"), RESULT)])
def test_results_stand_right_behind_the_calls_wherever_the_text_stands(blocks):
    told = messages(turn("assistant", CALL), turn("user", *blocks))
    assert told[1:] == [
        {"role": "tool", "content": "Sunny", "tool_call_id": "toolu_1"},
        {"role": "user", "content": "Well?"},
    ]


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({}, "Sunny"),
        ({"is_error": False}, "Sunny"),
        ({"is_error": True}, "Error: Sunny"),
        ({"content": [text("Sun"), text("ny")], "is_error": None}, "Sunny"),
        ({"content": []}, ""),
    ],
)
def test_a_result_may_be_a_list_or_an_error(fields, content):
    (told,) = messages(turn("user", RESULT | fields))
    assert told == {"role": "tool", "content": content, "tool_call_id": "toolu_1"}


@pytest.mark.parametrize(
    ("role", "block"), [("user", CALL), ("system", CALL), ("system", RESULT), ("assistant", RESULT)]
)
def test_a_block_in_a_message_of_the_wrong_role_is_refused_by_its_kind(role, block):
    with pytest.raises(ValidationError, match=f"`{block['type']}` in `messages` must not stand"):
        messages(turn(role, block))


@pytest.mark.parametrize("kind", ["image", "document", "server_tool_use", "search_result"])
def test_other_blocks_are_refused_by_their_kind(kind):
    for block in ({"type": kind}, RESULT | {"content": [{"type": kind}]}):
        with pytest.raises(ValidationError, match=f"`{kind}` in `messages` is not supported yet"):
            messages(turn("user", block))


def test_parameters_have_their_names_in_chats():
    body = {"max_tokens": 5, "stop_sequences": ["x"], "temperature": 0.5, "top_k": 3, "seed": 2, "stream": True}
    asked = MessagesRequest.model_validate(body | {"messages": [{"role": "user", "content": "Hi"}]})
    chat = chat_of(asked)
    assert (chat.max_tokens, chat.stop, chat.temperature, chat.top_k, chat.seed) == (5, ["x"], 0.5, 3, 2)
    assert chat.stream and chat.include_stop_str_in_output is False
    large = chat_of(RenderedMessages.model_validate(body | {"prompt": "Hi"}))
    assert isinstance(large, RenderedChat) and large.prompt == "Hi"
    assert large.model_dump(exclude={"prompt", "prompt_without_tools"}) == chat.model_dump(
        exclude={"messages", "documents"}
    )


def test_a_count_has_the_prompt_of_the_request():
    body = {"system": "a", "messages": [{"role": "user", "content": "Hi"}]}
    counted = counted_chat_of(CountTokensRequest.model_validate(body))
    assert counted.conversation(WAYS) == chat_of(MessagesRequest.model_validate(body | {"max_tokens": 1})).conversation(
        WAYS
    )
