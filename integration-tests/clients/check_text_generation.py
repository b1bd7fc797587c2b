"""Checks the calls of TGI's own client, `text-generation` from PyPI, against the server at argv[1]."""

import sys
from functools import partial

from checks import (
    MESSAGES,
    PROMPT,
    SCHEMA,
    TOOLS,
    Call,
    Checks,
    async_call,
    check_arguments,
    check_usage,
    raises,
    sync_call,
    text_of,
)

from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError
from text_generation.types import Grammar, GrammarType, Message, Tool

SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "typical_p": 0.9, "seed": 7}


def generate(call: Call) -> None:
    response = call("generate", PROMPT, max_new_tokens=8)
    details = response.details
    assert response.generated_text and details.finish_reason in ("length", "eos_token")
    assert 1 <= details.generated_tokens == len(details.tokens) <= 8
    assert text_of(details.tokens) == response.generated_text
    assert details.seed is None and details.prefill == [] and details.best_of_sequences is None
    assert all(token.logprob is not None and token.logprob <= 0 for token in details.tokens)


def generate_sampled(call: Call) -> None:
    first, second = (call("generate", PROMPT, max_new_tokens=12, **SAMPLING) for _ in range(2))
    assert first.details.seed == 7 and first == second


def generate_best_of(call: Call) -> None:
    details = call("generate", PROMPT, max_new_tokens=6, do_sample=True, best_of=2).details
    (other,) = details.best_of_sequences
    assert details.seed is not None and other.seed is not None
    assert other.generated_tokens == len(other.tokens) and text_of(other.tokens) == other.generated_text


def generate_with_every_other_parameter(call: Call) -> None:
    options = {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "return_full_text": True, "watermark": True}
    response = call("generate", PROMPT, max_new_tokens=6, truncate=3, top_n_tokens=2, **options)
    assert response.generated_text.startswith(PROMPT)
    rows = response.details.top_tokens
    assert len(rows) == len(response.details.tokens) and all(len(row) >= 2 for row in rows)


def generate_stops(call: Call) -> None:
    text = call("generate", PROMPT, max_new_tokens=30).generated_text
    stop = text[4:7]
    response = call("generate", PROMPT, max_new_tokens=30, stop_sequences=[stop])
    assert response.details.finish_reason == "stop_sequence"
    assert stop in response.generated_text and text.startswith(response.generated_text)


def stream_equals_whole(call: Call) -> None:
    whole = call("generate", PROMPT, max_new_tokens=20)
    events = call("generate_stream", PROMPT, max_new_tokens=20)
    assert [event.token for event in events] == whole.details.tokens
    assert all(event.generated_text is None and event.details is None for event in events[:-1])
    assert events[-1].generated_text == whole.generated_text == text_of(event.token for event in events)
    assert events[-1].details.generated_tokens == len(events)
    assert events[-1].details.finish_reason == whole.details.finish_reason


def stream_of_one_token(call: Call) -> None:
    (event,) = call("generate_stream", PROMPT, max_new_tokens=1)
    assert event.generated_text is not None and event.details.finish_reason == "length"


def stream_sampled(call: Call) -> None:
    options = {"max_new_tokens": 12, "top_n_tokens": 2, **SAMPLING}
    first, second = (call("generate_stream", PROMPT, **options) for _ in range(2))
    assert first == second and first[-1].details.seed == 7
    # There are fewer top tokens than asked for if sampling parameters exclude the other tokens.
    assert all(1 <= len(event.top_tokens) <= 2 for event in first)


def chat(call: Call) -> None:
    answer = call("chat", [Message(**message) for message in MESSAGES], max_tokens=12, temperature=0.0, seed=3)
    (choice,) = answer.choices
    assert answer.object == "chat.completion" and choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    check_usage(answer.usage)
    assert answer.usage["completion_tokens"] <= 12


def chat_logprobs(call: Call) -> None:
    answer = call("chat", [Message(**MESSAGES[0])], max_tokens=6, logprobs=True, seed=3)
    assert len(answer.choices[0].logprobs["content"]) == answer.usage["completion_tokens"]


def grammars(call: Call) -> None:
    for kind, value in ((GrammarType.Json, SCHEMA), (GrammarType.Regex, '\\{"word": "(five|six)"\\}')):
        options = {"max_new_tokens": 60, "grammar": Grammar(type=kind, value=value)}
        whole = call("generate", PROMPT, **options)
        check_arguments("say", whole.generated_text)
        assert call("generate_stream", PROMPT, **options)[-1].generated_text == whole.generated_text
    unsupported = Grammar(type=GrammarType.Json, value={"properties": {"a": {"uniqueItems": True}}})
    raises(ValidationError, "uniqueItems", partial(call, "generate", PROMPT, grammar=unsupported))


def tools(call: Call) -> None:
    """The client takes a function's bare name; its class for the calls of a stream is not a list, as OpenAI's is."""
    for name in ("say", "count"):
        options = {"max_tokens": 100, "tools": [Tool(**tool) for tool in TOOLS], "tool_choice": name}
        (choice,) = call("chat", [Message(**MESSAGES[0])], **options).choices
        (made,) = choice.message.tool_calls
        assert made["function"]["name"] == name and choice.message.role == "assistant"
        check_arguments(name, made["function"]["arguments"])


def errors_of_the_server(call: Call) -> None:
    for method in ("generate", "generate_stream"):
        for options, text in (({"frequency_penalty": 3.0}, "frequency_penalty"), ({"truncate": 10**6}, "truncate")):
            raises(ValidationError, f"`{text}`", partial(call, method, PROMPT, **options))
    raises(
        ValidationError, "`frequency_penalty`", partial(call, "chat", [Message(**MESSAGES[0])], frequency_penalty=3.0)
    )


def main(url: str) -> None:
    checks = Checks("text_generation")
    for kind, call in (
        ("sync", sync_call(lambda: Client(url, timeout=60))),
        ("async", async_call(lambda: AsyncClient(url, timeout=60))),
    ):
        checks.run_module(globals(), kind, call=call)
    checks.exit()


if __name__ == "__main__":
    main(sys.argv[1])
