"""Checks the calls of huggingface_hub's InferenceClient against the server at argv[1]."""

import sys
from functools import partial

import huggingface_hub
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
    error_of,
    raises,
    sync_call,
    text_of,
)
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError, ValidationError

try:  # version 0's asynchronous client does not wrap this error
    from aiohttp import ClientResponseError as AiohttpError
except ImportError:
    AiohttpError = HfHubHTTPError

GREEDY = {"max_new_tokens": 16, "return_full_text": False}


def text_generation_whole(call: Call) -> None:
    text = call("text_generation", PROMPT, **GREEDY)
    output = call("text_generation", PROMPT, details=True, **GREEDY)
    assert text and output.generated_text == text == text_of(output.details.tokens)
    assert output.details.generated_tokens == len(output.details.tokens) <= 16


def text_generation_stream(call: Call) -> None:
    whole = call("text_generation", PROMPT, details=True, **GREEDY)
    texts = call("text_generation", PROMPT, stream=True, **GREEDY)
    events = call("text_generation", PROMPT, stream=True, details=True, **GREEDY)
    assert texts == [event.token.text for event in events] == [token.text for token in whole.details.tokens]
    assert [event.index for event in events] == list(range(1, len(events) + 1))
    last = events[-1]
    assert last.generated_text == whole.generated_text == text_of(event.token for event in events)
    assert last.details.generated_tokens == len(events) and last.details.input_length > 0
    assert last.details.finish_reason == whole.details.finish_reason


def text_generation_bare_call_gives_the_full_text(call: Call) -> None:
    assert call("text_generation", PROMPT).startswith(PROMPT)


def text_generation_sampled(call: Call) -> None:
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "typical_p": 0.9, "seed": 7}
    first, second = (call("text_generation", PROMPT, details=True, **GREEDY, **options) for _ in range(2))
    assert first == second and first.details.seed == 7


def text_generation_other_parameters(call: Call) -> None:
    options = {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "truncate": 3, "watermark": True, "best_of": 2}
    options |= {"max_new_tokens": 6, "do_sample": True, "top_n_tokens": 2, "return_full_text": True}
    output = call("text_generation", PROMPT, details=True, **options)
    assert output.generated_text.startswith(PROMPT) and len(output.details.best_of_sequences) == 1
    assert len(output.details.top_tokens) == len(output.details.tokens)


def text_generation_stops(call: Call) -> None:
    text = call("text_generation", PROMPT, **GREEDY)
    output = call("text_generation", PROMPT, details=True, stop=[text[4:7]], **GREEDY)
    assert output.details.finish_reason == "stop_sequence" and text[4:7] in output.generated_text


def text_generation_errors(call: Call) -> None:
    for stream in (False, True):
        for options in ({"frequency_penalty": 3.0}, {"temperature": -1.0}, {"top_p": 2.0}, {"max_new_tokens": 0}):
            action = partial(call, "text_generation", PROMPT, stream=stream, **options)
            raises(ValidationError, f"`{next(iter(options))}`", action)


def chat_completion(call: Call) -> None:
    for path in ("chat_completion", "chat.completions.create"):
        answer = call(path, messages=MESSAGES, max_tokens=12, temperature=0.0, seed=3, logprobs=True, top_logprobs=2)
        (choice,) = answer.choices
        assert choice.message.role == "assistant" and choice.message.content
        assert choice.finish_reason in ("stop", "length")
        assert len(choice.logprobs.content) == answer.usage.completion_tokens <= 12
        check_usage(answer.usage)


def chat_completion_stream(call: Call) -> None:
    options = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0.0}
    whole = call("chat_completion", **options)
    chunks = call("chat_completion", stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == whole.choices[0].finish_reason


def chat_completion_stream_usage(call: Call) -> None:
    options = {"messages": MESSAGES, "max_tokens": 8, "stream_options": {"include_usage": True}}
    *chunks, last = call("chat_completion", stream=True, **options)
    assert last.choices == [] and all(chunk.usage is None for chunk in chunks)
    check_usage(last.usage)


def chat_completion_errors(call: Call) -> None:
    for stream in (False, True):
        action = partial(call, "chat_completion", messages=MESSAGES, frequency_penalty=3.0, stream=stream)
        error = error_of((HfHubHTTPError, AiohttpError), action)
        if isinstance(error, HfHubHTTPError):
            assert error.response.status_code == 400 and "frequency_penalty" in str(error), error
        else:
            assert error.status == 400 and "frequency_penalty" in str(error.response_error_payload), error


def text_generation_grammar(call: Call) -> None:
    for grammar in ({"type": "json", "value": SCHEMA}, {"type": "regex", "value": '\\{"word": "(five|six)"\\}'}):
        options = {"max_new_tokens": 60, "return_full_text": False, "grammar": grammar}
        text = call("text_generation", PROMPT, **options)
        check_arguments("say", text)
        assert "".join(call("text_generation", PROMPT, stream=True, **options)).startswith(text)
    unsupported = {"type": "json", "value": {"properties": {"a": {"uniqueItems": True}}}}
    raises(ValidationError, "uniqueItems", partial(call, "text_generation", PROMPT, grammar=unsupported))


def chat_completion_form(call: Call) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "say", "schema": SCHEMA, "strict": True}}
    for form in (named, {"type": "json", "value": SCHEMA}):  # OpenAI's and TGI's
        options = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0.0, "response_format": form}
        (choice,) = call("chat_completion", **options).choices
        check_arguments("say", choice.message.content)
        chunks = call("chat_completion", stream=True, **options)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content


def chat_completion_tools(call: Call) -> None:
    named = {"type": "function", "function": {"name": "count"}}
    for wanted, names in (("required", ("say", "count")), (named, ("count",))):
        options = {"messages": MESSAGES, "max_tokens": 100, "temperature": 0.0, "tools": TOOLS, "tool_choice": wanted}
        options["extra_body"] = {"parallel_tool_calls": False}
        (choice,) = call("chat_completion", **options).choices
        (made,) = choice.message.tool_calls
        assert made.id and made.function.name in names and choice.finish_reason == "tool_calls"
        check_arguments(made.function.name, made.function.arguments)
        chunks = call("chat_completion", stream=True, **options)
        first, *parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
        assert first.id and first.function.name == made.function.name
        assert "".join(part.function.arguments or "" for part in (first, *parts)) == made.function.arguments
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


def endpoint(endpoint_call: Call) -> None:
    info = endpoint_call("get_endpoint_info")
    assert info["model_id"] and 0 < info["max_input_tokens"] < info["max_total_tokens"]
    assert endpoint_call("health_check") is True


def main(url: str) -> None:
    checks = Checks(f"huggingface_hub {huggingface_hub.__version__}")
    options = {"timeout": 60}
    for kind, call in (
        ("sync", sync_call(lambda: InferenceClient(url, **options))),
        ("async", async_call(lambda: AsyncInferenceClient(url, **options))),
    ):
        checks.run_module(globals(), kind, call=call)
    options["provider"] = "hf-inference"
    checks.run_module(globals(), "sync", endpoint_call=sync_call(lambda: InferenceClient(url, **options)))
    checks.run_module(globals(), "async", endpoint_call=async_call(lambda: AsyncInferenceClient(url, **options)))
    checks.exit()


if __name__ == "__main__":
    main(sys.argv[1])
