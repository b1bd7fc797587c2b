"""The requests over whose answers `make digest` computes the hashes of its runs `routes`, `dialect` and `calls`: each
route, whole and streamed, with the fields that give an answer another form."""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from exchanges import Exchange

from text_generation_router.text.calls.tests.call_texts import CALL_TEXTS, TOOLS, CallText

Fields = dict[str, Any]

# Formats whose calls are JSON, XML and in channels: (calls, reasoning, whether markers are special tokens).
CALL_SERVERS = (("hermes", "think", False), ("qwen3-coder", "think", False), ("harmony", "harmony", True))
MAX_CALL_TEXTS = 4
# Numbers of tokens at which calls and reasoning are cut.
CUTS = (5, 40)
STORY = "Once upon a time there was a little fox in a dark green wood"
MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]
DRAWN: Fields = {"temperature": 0.9, "top_p": 0.9, "top_k": 30, "seed": 8}
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer", "maximum": 99}}, "required": ["sum"]}
PATTERN = "[a-c]{2,4}!"
RULES = 'root ::= "a" [0-9] | "b"'
LARK = 'start: "fox" | "bear"'
CHANGES: Fields = {"logit_bias": {"262": -5}, "bad_words": ["fox"], "stop_token_ids": [300], "min_p": 0.02}
PENALTIES: Fields = {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.5}
USAGE: Fields = {"stream_options": {"include_usage": True}}
EACH_USAGE: Fields = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
FUNCTIONS = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in TOOLS.items()]
FLAT_FUNCTIONS = [{"type": "function", "name": name, "parameters": each} for name, each in TOOLS.items()]
CUSTOM_TOOLS = [{"name": name, "input_schema": each} for name, each in TOOLS.items()]
CHOSEN = {"type": "function", "function": {"name": "clock"}}

NATIVE: dict[str, Fields] = {
    "plain": {},
    "details": {"details": True},
    "drawn": {"details": True, "do_sample": True, **DRAWN},
    "top tokens": {"details": True, "top_n_tokens": 3},
    "prompt": {"details": True, "decoder_input_details": True},
    "stop": {"details": True, "stop": [" a"]},
    "full text": {"return_full_text": True},
    "truncate": {"details": True, "truncate": 4},
    "changes": {"details": True, "seed": 6, **CHANGES},
    "penalties": {"details": True, **PENALTIES},
    "typical": {"details": True, "do_sample": True, "typical_p": 0.4, "seed": 5},
    "watermark": {"details": True, "watermark": True, "do_sample": True, "seed": 3},
    "no end": {"details": True, "ignore_eos_token": True, "min_new_tokens": 4},
    "best of two": {"details": True, "best_of": 2, "do_sample": True, "top_k": 1},
    "schema": {"details": True, "grammar": {"type": "json", "value": SCHEMA}},
    "expression": {"details": True, "grammar": {"type": "regex", "value": PATTERN}},
    "unknown field": {"unknown": 1},
}
FORMS: dict[str, Fields] = {
    "response format": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    "any JSON": {"response_format": {"type": "json_object"}},
    "TGI's grammar": {"response_format": {"type": "regex", "value": PATTERN}},
    "guided schema": {"guided_json": SCHEMA},
    "guided expression": {"guided_regex": PATTERN},
    "guided choice": {"guided_choice": ["fox", "bear"]},
    "guided GBNF": {"guided_grammar": RULES},
    "guided Lark": {"guided_grammar": LARK},
    "structured schema": {"structured_outputs": {"json": SCHEMA}},
    "structured expression": {"structured_outputs": {"regex": PATTERN}},
    "structured choice": {"structured_outputs": {"choice": ["fox", "bear"]}},
    "structured grammar": {"structured_outputs": {"grammar": RULES}},
    "json_schema": {"json_schema": SCHEMA},
    "regex": {"regex": PATTERN},
    "ebnf": {"ebnf": RULES},
    "grammar": {"grammar": RULES},
}
OPENAI: dict[str, Fields] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "drawn": DRAWN,
    "several": {"n": 2, **DRAWN},
    "stop": {"stop": [" a", " fox"]},
    "stop in the text": {"stop": " a", "include_stop_str_in_output": True},
    "changes": CHANGES,
    "penalties": PENALTIES,
    "no end": {"ignore_eos": True, "min_tokens": 4},
    "special tokens": {"skip_special_tokens": False, "add_special_tokens": False},
    "truncated left": {"truncate_prompt_tokens": 4},
    "truncated right": {"truncate_prompt_tokens": 4, "truncation_side": "right"},
    "ids": {"return_token_ids": True},
    "ignored": {"user": "a", "unknown": 1},
    **FORMS,
}
COMPLETION: dict[str, Fields] = {
    **OPENAI,
    "log-probabilities": {"logprobs": 2},
    "echo": {"echo": True, "logprobs": 1},
    "prompt's log-probabilities": {"prompt_logprobs": 1},
    "list": {"prompt": ["A fox", "A bear"]},
    "several of a list": {"prompt": ["A fox", "A bear"], "n": 2, **DRAWN},
    "ids as prompt": {"prompt": [5, 6, 7]},
    "lists of ids": {"prompt": [[5, 6], [7]], "logprobs": 0},
    "only echo": {"echo": True, "max_tokens": 0},
}
CHAT: dict[str, Fields] = {
    **OPENAI,
    "log-probabilities": {"logprobs": True, "top_logprobs": 2},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, *MESSAGES]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    "continued": {
        "messages": [*MESSAGES, {"role": "assistant", "content": "It is"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "tools": {"tools": FUNCTIONS},
    "a demanded call": {"tools": FUNCTIONS, "tool_choice": "required"},
    "a named call": {"tools": FUNCTIONS, "tool_choice": CHOSEN},
    "no calls": {"tools": FUNCTIONS, "tool_choice": "none"},
    "effort": {"reasoning_effort": "low"},
}
RESPONSES: dict[str, Fields] = {
    "plain": {},
    "drawn": {"temperature": 0.9, "top_p": 0.9, "seed": 8},
    "instructions": {"instructions": "Be brief.", "metadata": {"a": "b"}},
    "log-probabilities": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "schema": {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
    "tools": {"tools": FLAT_FUNCTIONS},
    "a demanded call": {"tools": FLAT_FUNCTIONS, "tool_choice": "required", "parallel_tool_calls": False},
    "a named call": {"tools": FLAT_FUNCTIONS, "tool_choice": {"type": "function", "name": "clock"}},
    "a call's result": {
        "input": [
            *MESSAGES,
            {"type": "function_call", "call_id": "call_1", "name": "clock", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "5"},
        ]
    },
    "effort": {"reasoning": {"effort": "low"}},
    "changes": CHANGES,
}
ANTHROPIC: dict[str, Fields] = {
    "plain": {},
    "drawn": {"temperature": 0.9, "top_p": 0.9, "top_k": 30, "seed": 8},
    "system": {"system": [{"type": "text", "text": "Be brief."}]},
    "stop": {"stop_sequences": [" a", " fox"]},
    "schema": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "tools": {"tools": CUSTOM_TOOLS},
    "a demanded call": {"tools": CUSTOM_TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    "a named call": {"tools": CUSTOM_TOOLS, "tool_choice": {"type": "tool", "name": "clock"}},
    "a call's result": {
        "messages": [
            *MESSAGES,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "clock", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "5"}]},
        ]
    },
    "thinking": {"thinking": {"type": "disabled"}},
    "changes": CHANGES,
}
BASES: dict[str, Fields] = {
    "/v1/completions": {"prompt": STORY, "max_tokens": 8, "temperature": 0},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 8, "temperature": 0},
    "/v1/responses": {"input": "What is 2 + 3?", "max_output_tokens": 8, "temperature": 0},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8, "temperature": 0},
}
DIALECTS = dict(zip(BASES, (COMPLETION, CHAT, RESPONSES, ANTHROPIC), strict=True))
PAGES = ("/openapi.json", "/info", "/version", "/v1/models", "/v1/models/demo_model", "/", "/health", "/ready", "/live")
TEXTS: tuple[tuple[str, Any], ...] = (
    ("/tokenize", {"inputs": STORY}),
    ("/chat_tokenize", BASES["/v1/chat/completions"]),
    ("/detokenize", {"tokens": [5, 6, 300]}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES, "system": "Be brief."}),
)


def routes() -> Iterator[Exchange]:
    """Requests of all routes of a server with default flags."""
    yield from (Exchange("page", path, method="GET") for path in PAGES)
    yield from (Exchange("text", path, body) for path, body in TEXTS)
    for name, more in NATIVE.items():
        body = {"inputs": STORY, "parameters": {"max_new_tokens": 8, **more}}
        yield from (Exchange(name, path, body) for path in ("/generate", "/generate_stream"))
        yield from _both(name, "/", body)
    yield from dialects(BASES)
    native = {"inputs": STORY, "parameters": {"max_new_tokens": 8}}
    clouds = (native, BASES["/v1/completions"], BASES["/v1/chat/completions"])
    for place, body in enumerate(clouds):
        yield from _both(f"body {place}", "/invocations", body)
    drawn = {"inputs": STORY, "parameters": {"max_new_tokens": 8, "seed": 2}}
    chat = BASES["/v1/chat/completions"] | {"seed": 3}
    yield Exchange("two", "/vertex", {"instances": [drawn, chat]})


def dialects(paths: Iterable[str]) -> Iterator[Exchange]:
    """Requests of routes below /v1, each whole and streamed."""
    for path in paths:
        for name, more in DIALECTS[path].items():
            yield from _both(name, path, BASES[path] | more)
    for path, options in product(("/v1/completions", "/v1/chat/completions"), (USAGE, EACH_USAGE)):
        yield Exchange("usage", path, BASES[path] | {"stream": True} | options)


def _both(name: str, path: str, body: Fields) -> Iterator[Exchange]:
    yield Exchange(name, path, body)
    if "prompt_logprobs" not in body:  # a whole answer has them, a stream has not
        yield Exchange(f"{name}, streamed", path, body | {"stream": True})


def call_texts(calls: str, reasoning: str, special: tuple[str, ...]) -> list[CallText]:
    """Texts of a model: the first of a format, whose markers are all meant as markers if they are special tokens."""
    found = [case for case in CALL_TEXTS if (case.format, case.reasoning_format) == (calls, reasoning)]
    is_meant = [not special or not (case.is_spelled or any(m in case.content for m in special)) for case in found]
    return [case for case, meant in zip(found, is_meant, strict=True) if meant][:MAX_CALL_TEXTS]


def calls_exchanges(case: CallText, cuts: Iterable[int] = CUTS) -> Iterator[Exchange]:
    """Requests to a server whose model writes the text of the case: by three APIs, whole, cut and streamed."""
    ask = [{"role": "user", "content": "Hi. " + case.prompt}]
    bodies = (
        ("/v1/chat/completions", "max_tokens", {"messages": ask, "tools": FUNCTIONS, "temperature": 0}),
        ("/v1/responses", "max_output_tokens", {"input": ask, "tools": FLAT_FUNCTIONS, "temperature": 0}),
        ("/v1/messages", "max_tokens", {"messages": ask, "tools": CUSTOM_TOOLS, "temperature": 0}),
    )
    for path, limit, body in bodies:
        for tokens in (700, *cuts):
            yield from _both(f"{case.label}, {tokens} tokens", path, body | {limit: tokens})
    stopped = bodies[0][2] | {"max_tokens": 700, "stop": ["o"]}
    yield from _both(f"{case.label}, stopped", bodies[0][0], stopped)
