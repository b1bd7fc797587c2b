"""The requests of `make digest`'s run `refusals`: mistakes of each kind on every route, with a key and without."""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from digest_routes import BASES, CUSTOM_TOOLS, FUNCTIONS, MESSAGES, PAGES, STORY
from exchanges import Exchange

Change = tuple[str, Any]

KEY = "a-key"
# Removes the field.
LEFT_OUT = object()
LONG = "fox " * 3000
NATIVE_BASE = {"inputs": STORY, "parameters": {"max_new_tokens": 4}}
BODIES: dict[str, Any] = {
    "/generate": NATIVE_BASE,
    "/generate_stream": NATIVE_BASE,
    "/": NATIVE_BASE,
    **BASES,
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"inputs": STORY},
    "/chat_tokenize": {"messages": MESSAGES},
    "/detokenize": {"tokens": [5, 6]},
    "/invocations": NATIVE_BASE,
    "/vertex": {"instances": [{"inputs": STORY, "parameters": {"max_new_tokens": 4, "seed": 1}}]},
}
# Numbers out of their ranges, wrong types and unknown values of sampling fields that several routes have.
SAMPLING: tuple[Change, ...] = (
    ("temperature", -1), ("temperature", "hot"), ("top_p", 2), ("top_p", -0.5), ("top_k", -5), ("typical_p", 3),
    ("repetition_penalty", 0), ("frequency_penalty", 9), ("presence_penalty", -9), ("min_p", 2), ("seed", "one"),
    ("seed", 2**64), ("logit_bias", {"no": 1}), ("logit_bias", {"5": 1e9}), ("logit_bias", {"999999": 1}),
    ("allowed_token_ids", []), ("allowed_token_ids", [10**9]), ("bad_words", [""]), ("stop_token_ids", [-1]),
    ("priority", 99), ("timeout", -1), ("cache_salt", "a" * 200), ("chat_template", "{{ 1 }}"), ("lora", "a"),
    ("prompt_embeds", "a"), ("dry_multiplier", 1), ("stop_regex", "a"), ("watermarking", True),
)  # fmt: skip
NATIVE: tuple[Change, ...] = (
    ("inputs", LEFT_OUT), ("inputs", 5), ("inputs", ""), ("inputs", LONG), ("parameters", []),
    ("parameters.max_new_tokens", 0), ("parameters.max_new_tokens", 10**6), ("parameters.max_new_tokens", "4"),
    ("parameters.best_of", 0), ("parameters.best_of", 9), ("parameters.best_of", 2), ("parameters.stop", "a"),
    ("parameters.stop", ["a"] * 9), ("parameters.stop", [""]), ("parameters.truncate", 0),
    ("parameters.top_n_tokens", 99), ("parameters.adapter_id", "a"), ("parameters.max_tokens", 4),
    ("parameters.grammar", {"type": "json", "value": "{"}), ("parameters.grammar", {"type": "regex", "value": "("}),
    ("parameters.grammar", {"type": "xml", "value": "a"}), ("parameters.grammar", {"type": "json"}),
    ("parameters.decoder_input_details", True),
    *((f"parameters.{name}", value) for name, value in SAMPLING),
)  # fmt: skip
OPENAI: tuple[Change, ...] = (
    ("model", "other"), ("max_tokens", "4"), ("max_tokens", 10**6), ("n", 0), ("n", 99), ("stop", 5),
    ("stop", ["a"] * 9), ("stop", [""]), ("logprobs", 99), ("echo", 7), ("stream", "yes"),
    ("stream_options", {"include_usage": True}), ("best_of", 3), ("parameters", {"a": 1}), ("truncation_side", "up"),
    ("guided_json", "{"), ("guided_regex", "("), ("guided_choice", []), ("guided_grammar", "root ::="),
    ("structured_outputs", {"json": {}, "regex": "a"}), ("structured_outputs", {"other": 1}),
    ("response_format", {"type": "xml"}), ("response_format", {"type": "json_schema"}),
    ("guided_json", {"$ref": "#/none"}), ("guided_json", {"type": "text"}), ("response_format", 5),
    *SAMPLING,
)  # fmt: skip
COMPLETION: tuple[Change, ...] = (
    ("prompt", LEFT_OUT), ("prompt", 5), ("prompt", []), ("prompt", ["a"] * 9), ("prompt", [[10**9]]),
    ("prompt", LONG), ("suffix", "a"), ("messages", MESSAGES), ("logprobs", "two"), ("max_new_tokens", 4), *OPENAI,
)  # fmt: skip
CHAT: tuple[Change, ...] = (
    ("messages", LEFT_OUT), ("messages", []), ("messages", "Hi"), ("messages", [{"role": "user"}]),
    ("messages", [{"content": "Hi"}]), ("messages", [{"role": "user", "content": 5}]), ("messages.0.content", LONG),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]),
    ("messages", [{"role": "tool", "content": "5"}]), ("messages.0.tool_calls", [{"id": 5}]), ("audio", {}),
    ("modalities", ["audio"]), ("functions", [{"name": "a"}]), ("tools", [{"type": "other"}]), ("tools", "a"),
    ("tools", [{"type": "function", "function": {}}]), ("tool_choice", "required"), ("tool_choice", "sometimes"),
    ("top_logprobs", 3), ("reasoning_effort", "huge"), ("chat_template_kwargs", []), ("web_search_options", {}),
    ("continue_final_message", True), ("documents", "a"), ("logprobs", 5), ("prediction", {}),
    ("tools", [*FUNCTIONS, *FUNCTIONS]), *OPENAI,
)  # fmt: skip
RESPONSES: tuple[Change, ...] = (
    ("input", LEFT_OUT), ("input", 5), ("input", []), ("input", [{"type": "other"}]), ("input", LONG),
    ("input", [{"role": "user", "content": [{"type": "input_image"}]}]), ("model", "other"),
    ("max_output_tokens", "4"), ("max_output_tokens", 10**6), ("background", True), ("previous_response_id", "a"),
    ("conversation", "a"), ("store", True), ("truncation", "auto"), ("include", ["other"]), ("top_logprobs", 99),
    ("tools", [{"type": "web_search"}]), ("tools", [{"type": "function"}]), ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "name": "a"}), ("text", {"format": {"type": "xml"}}),
    ("text", {"format": {"type": "json_schema", "name": "a"}}), ("text", {"verbosity": "high"}),
    ("reasoning", {"effort": "huge"}), ("metadata", {"a": 1}), ("instructions", 5), ("max_tokens", 4),
    ("input", [{"type": "function_call_output", "call_id": "a", "output": "5"}]), *SAMPLING,
)  # fmt: skip
ANTHROPIC: tuple[Change, ...] = (
    ("messages", LEFT_OUT), ("messages", []), ("messages", "Hi"), ("messages", [{"role": "user"}]),
    ("messages", [{"role": "other", "content": "Hi"}]), ("messages.0.content", LONG), ("messages.0.content", 5),
    ("messages.0.content", [{"type": "image", "source": {}}]), ("model", "other"), ("max_tokens", LEFT_OUT),
    ("max_tokens", 0), ("max_tokens", 10**6), ("stop_sequences", "a"), ("stop_sequences", ["a"] * 9),
    ("system", 5), ("system", [{"type": "image"}]), ("tools", [{"name": "a"}]), ("tools", "a"),
    ("tools", [{"type": "web_search_20250305", "name": "web_search"}]), ("tool_choice", {"type": "any"}),
    ("tool_choice", "any"), ("tool_choice", {"type": "tool", "name": "a"}), ("thinking", {"type": "enabled"}),
    ("thinking", {"type": "enabled", "budget_tokens": 5}), ("output_config", {"format": {"type": "xml"}}),
    ("mcp_servers", [{}]), ("container", "a"), ("stop", ["a"]), ("tools", [*CUSTOM_TOOLS, *CUSTOM_TOOLS]),
    ("messages.0.content", [{"type": "tool_result", "tool_use_id": "a"}]), *SAMPLING,
)  # fmt: skip
CHANGES: dict[str, tuple[Change, ...]] = {
    "/generate": NATIVE,
    "/generate_stream": NATIVE,
    "/": NATIVE,
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": ANTHROPIC,
    "/v1/messages/count_tokens": ANTHROPIC[:20],
    "/tokenize": NATIVE[:5],
    "/chat_tokenize": CHAT[:16],
    "/detokenize": (("tokens", LEFT_OUT), ("tokens", 5), ("tokens", []), ("tokens", [-1]), ("tokens", [10**9])),
    "/invocations": (*NATIVE[:12], ("messages", MESSAGES), ("prompt", "a")),
    "/vertex": (
        *(("instances", value) for value in (LEFT_OUT, [], 5, [5], [{}], [NATIVE_BASE] * 9)),
        ("instances.0.parameters.best_of", 2), ("instances", [{"messages": MESSAGES, "stream": True}]),
        ("instances", [{"messages": MESSAGES, "n": 2}]), ("instances", [{"messages": MESSAGES, "tools": FUNCTIONS}]),
    ),
}  # fmt: skip
BROKEN: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"{",
    "a list": b"[1]",
    "null": b"null",
    "two values": b"{} {}",
    "not UTF-8": b'{"inputs": "\xff"}',
    "a lone surrogate": b'{"inputs": "\\ud800", "prompt": "\\ud800"}',
    "not a number": b'{"inputs": NaN}',
    "deep": b'{"inputs": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    "too large": b'{"inputs": "' + b"a" * 2_100_000 + b'"}',
}
HEADERS = (
    ("x-tenant", "two words"), ("x-request-timeout", "-1"), ("x-request-id", "two words"),
    ("content-type", "text/plain"), ("content-type", "application/x-www-form-urlencoded"),
    ("authorization", ""), ("authorization", "Bearer wrong"),
    ("authorization", "Basic YTpi"), ("x-api-key", "wrong"),
)  # fmt: skip
LOST = (("GET", "/none"), ("POST", "/v1/none"), ("GET", "/v1/models/none"), ("OPTIONS", "/generate"), ("PUT", "/info"))


def refusals() -> Iterator[Exchange]:
    """All of them, for a server whose key is KEY. Some may be taken by a version of the server."""
    for path, body in BODIES.items():
        for field, value in CHANGES[path]:
            shown = "left out" if value is LEFT_OUT else json.dumps(value)[:60]
            yield Exchange(f"{field}: {shown}", path, changed(body, field, value))
        for name, content in BROKEN.items():
            yield Exchange(name, path, content, headers=(("content-type", "application/json"),))
        for header, text in HEADERS:
            yield Exchange(f"{header}: {text}", path, body, headers=((header, text),))
        yield from (Exchange("method", path, method=method) for method in ("DELETE", "PATCH"))
    yield from (Exchange("no such route", path, method=method) for method, path in LOST)
    yield from (Exchange("no key", path, method="GET", headers=(("authorization", ""),)) for path in PAGES)
    yield from (Exchange("method", path, {}) for path in PAGES if path != "/")


def changed(body: Mapping[str, Any], field: str, value: Any) -> dict[str, Any]:
    """The body with another value of a field, whose path has dots between its names."""
    whole: Any = deepcopy(dict(body))
    *outer, last = field.split(".")
    inner = whole
    for name in outer:
        inner = inner[int(name) if isinstance(inner, list) else name]
    if value is LEFT_OUT:
        inner.pop(last, None)
    else:
        inner[last] = value
    return dict(whole)
