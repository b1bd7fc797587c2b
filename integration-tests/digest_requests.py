"""The requests over whose answers `make digest` computes its hashes. Their fields are rows of `digest_requests.jsonl`:
[table, name, fields], or [table, field, value] of a mistake, which without a value leaves the field out. A text that
begins with `$` stands for one of NAMED."""

import json
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from asks import Ask, mixed_asks
from exchanges import Exchange

from text_generation_router.api.common.generation_stream import CREDITS
from text_generation_router.text.calls.tests.call_texts import CALL_TEXTS, TOOLS, CallText

Fields = dict[str, Any]

NUM_ASKS, TOKENS = 500, (60, 340)
# Every second request is a question whose text ends by itself after a few tokens. The server then expects texts that
# are shorter than max_new_tokens, and takes on more requests than fit.
QUESTION = "<|user|>What is {} + {}?</s><|assistant|>"
# Formats whose calls are JSON, XML and in channels: (calls, reasoning, whether markers are special tokens).
CALL_SERVERS = (("hermes", "think", False), ("qwen3-coder", "think", False), ("harmony", "harmony", True))
MAX_CALL_TEXTS = 4
CUTS = (5, 40)  # numbers of tokens at which calls and reasoning are cut
KEY = "a-key"  # the API key of the server that refuses
STORY = "Once upon a time there was a little fox in a dark green wood"
MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer", "maximum": 99}}, "required": ["sum"]}
PATTERN, RULES, LARK = "[a-c]{2,4}!", 'root ::= "a" [0-9] | "b"', 'start: "fox" | "bear"'
FUNCTIONS = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in TOOLS.items()]
FLAT_FUNCTIONS = [{"type": "function", "name": name, "parameters": each} for name, each in TOOLS.items()]
CUSTOM_TOOLS = [{"name": name, "input_schema": each} for name, each in TOOLS.items()]
CHOSEN = {"type": "function", "function": {"name": "clock"}}
NATIVE_BASE = {"inputs": STORY, "parameters": {"max_new_tokens": 4}}
NAMED: Fields = {
    **{"MESSAGES": MESSAGES, "SCHEMA": SCHEMA, "PATTERN": PATTERN, "RULES": RULES, "LARK": LARK, "CHOSEN": CHOSEN},
    **{"FUNCTIONS": FUNCTIONS, "FLAT_FUNCTIONS": FLAT_FUNCTIONS, "CUSTOM_TOOLS": CUSTOM_TOOLS},
    **{"NATIVE_BASE": NATIVE_BASE, "LONG": "fox " * 3000},
}
LIMIT: Fields = {"max_tokens": 8, "temperature": 0}
BASES: dict[str, Fields] = {
    "/v1/completions": {"prompt": STORY, **LIMIT},
    "/v1/chat/completions": {"messages": MESSAGES, **LIMIT},
    "/v1/responses": {"input": "What is 2 + 3?", "max_output_tokens": 8, "temperature": 0},
    "/v1/messages": {"messages": MESSAGES, **LIMIT},
}
PAGES = ("/openapi.json", "/info", "/version", "/v1/models", "/v1/models/demo_model", "/", "/health", "/ready", "/live")
BODIES: dict[str, Any] = {
    **dict.fromkeys(("/generate", "/generate_stream", "/"), NATIVE_BASE),
    **BASES,
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"inputs": STORY},
    "/chat_tokenize": {"messages": MESSAGES},
    "/detokenize": {"tokens": [5, 6]},
    "/invocations": NATIVE_BASE,
    "/vertex": {"instances": [{"inputs": STORY, "parameters": {"max_new_tokens": 4, "seed": 1}}]},
}
BROKEN: dict[str, bytes] = {
    **{"empty": b"", "no JSON": b"{", "a list": b"[1]", "null": b"null", "two values": b"{} {}"},
    **{"not UTF-8": b'{"inputs": "\xff"}', "a lone surrogate": b'{"inputs": "\\ud800", "prompt": "\\ud800"}'},
    **{"not a number": b'{"inputs": NaN}', "deep": b'{"inputs": ' + b"[" * 2000 + b"]" * 2000 + b"}"},
    "too large": b'{"inputs": "' + b"a" * 2_100_000 + b'"}',
}
LOST = (("GET", "/none"), ("POST", "/v1/none"), ("GET", "/v1/models/none"), ("OPTIONS", "/generate"), ("PUT", "/info"))


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _filled(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_filled(each) for each in value]
    return NAMED[value[1:]] if isinstance(value, str) and value.startswith("$") else value


ROWS: list[Any] = [_filled(json.loads(line)) for line in Path(__file__).with_suffix(".jsonl").read_text().splitlines()]


def named(table: str) -> dict[str, Fields]:
    return {name: fields for each, name, fields in (row for row in ROWS if row[0] == table)}


def mistakes(*tables: str) -> list[list[Any]]:
    """[field, value], or [field] of one that is left out."""
    return [row[1:] for table in tables for row in ROWS if row[0] == f"refused {table}"]


def crowded_asks() -> list[Ask]:
    """NUM_ASKS requests, the same in every run. No answer uses up the credits of its stream, so that no request pauses,
    however slowly its client reads: the shards' work would depend on the client's speed."""
    found = []
    for i, ask in enumerate(mixed_asks(NUM_ASKS // 2, TOKENS, of_digest=True)):
        parameters = {"max_new_tokens": 400, "details": True}
        body = {"inputs": QUESTION.format(i % 10, i // 10 % 10), "parameters": parameters}
        found += [Ask("question", "/generate_stream", body), _within_credits(ask)]
    return found


def _within_credits(ask: Ask) -> Ask:
    """The request, for a text of fewer than CREDITS tokens, top tokens included."""
    native = ask.body.get("parameters")
    name, tops = ("max_new_tokens", "top_n_tokens") if native else ("max_tokens", "top_logprobs")
    fields = native or ask.body
    fields = fields | {name: min(fields[name], (CREDITS - 1) // (1 + fields.get(tops, 0)))}
    return replace(ask, body=ask.body | {"parameters": fields} if native else fields)


def with_one_outcome(ask: Ask) -> Ask:
    """The request, with best_of among texts that are all greedy. The server draws the seeds of sampled texts, and
    sampled texts may share more or fewer of their first tokens in the prefix cache."""
    if ask.kind != "best_of":
        return ask
    return replace(ask, body=ask.body | {"parameters": ask.body["parameters"] | {"top_k": 1}})


def asks_for_options() -> Iterator[Ask]:
    """Requests for each option, and on each route, that `mixed_asks` does not use."""
    length = {"max_new_tokens": 24, "details": True}
    for more in named("options").values():
        yield Ask("options", "/generate", {"inputs": STORY, "parameters": length | more}, is_streamed=False)
    v1 = named("options of /v1")
    for is_streamed in (False, True):
        body = {"inputs": STORY, "stream": is_streamed, "parameters": length | {"seed": 7}}
        yield Ask("options", "/", body, is_streamed)
        openai = v1["all"] | v1["streamed"] if is_streamed else v1["all"]
        for path in ("/v1/completions", "/v1/chat/completions"):
            yield Ask("options", path, openai | v1[path], is_streamed)


def routes() -> Iterator[Exchange]:
    """Requests of all routes of a server with default flags."""
    yield from (Exchange("page", path, method="GET") for path in PAGES)
    chat = BASES["/v1/chat/completions"]
    texts = {
        "/tokenize": {"inputs": STORY},
        "/chat_tokenize": chat,
        "/detokenize": {"tokens": [5, 6, 300]},
        "/v1/messages/count_tokens": {"messages": MESSAGES, "system": "Be brief."},
    }
    yield from (Exchange("text", path, body) for path, body in texts.items())
    for name, more in named("native").items():
        body = {"inputs": STORY, "parameters": {"max_new_tokens": 8, **more}}
        yield from (Exchange(name, path, body) for path in ("/generate", "/generate_stream"))
        yield from _both(name, "/", body)
    yield from dialects(BASES)
    native = {"inputs": STORY, "parameters": {"max_new_tokens": 8}}
    for place, body in enumerate((native, BASES["/v1/completions"], chat)):
        yield from _both(f"body {place}", "/invocations", body)
    drawn = {"inputs": STORY, "parameters": {"max_new_tokens": 8, "seed": 2}}
    yield Exchange("two", "/vertex", {"instances": [drawn, chat | {"seed": 3}]})


def dialects(paths: Iterable[str]) -> Iterator[Exchange]:
    """Requests of routes below /v1, each whole and streamed."""
    for path in paths:
        openai = named("openai") if path.endswith("completions") else {}
        for name, more in (openai | named(path)).items():
            yield from _both(name, path, BASES[path] | more)
    usage = {"include_usage": True}
    both = (usage, usage | {"continuous_usage_stats": True})
    for path, options in product(("/v1/completions", "/v1/chat/completions"), both):
        yield Exchange("usage", path, BASES[path] | {"stream": True, "stream_options": options})


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


def changes() -> dict[str, list[list[Any]]]:
    """The mistakes in the bodies of each route."""
    sampling = mistakes("sampling")
    native = mistakes("native") + [[f"parameters.{name}", *value] for name, *value in sampling]
    of = {
        **{path: mistakes(path, "openai", "sampling") for path in ("/v1/completions", "/v1/chat/completions")},
        **{path: mistakes(path, "sampling") for path in ("/v1/responses", "/v1/messages")},
        **{path: mistakes(path) for path in ("/detokenize", "/vertex")},
        **dict.fromkeys(("/generate", "/generate_stream", "/"), native),
    }
    few = {"/v1/messages/count_tokens": of["/v1/messages"][:20], "/chat_tokenize": of["/v1/chat/completions"][:16]}
    return of | few | {"/tokenize": native[:5], "/invocations": native[:12] + mistakes("/invocations")}


def refusals() -> Iterator[Exchange]:
    """Mistakes of each kind on every route, for a server whose key is KEY. Some may be taken by a version of it."""
    wrong = changes()
    for path, body in BODIES.items():
        for field, *value in wrong[path]:
            shown = json.dumps(value[0])[:60] if value else "left out"
            yield Exchange(f"{field}: {shown}", path, changed(body, field, *value))
        for name, content in BROKEN.items():
            yield Exchange(name, path, content, headers=(("content-type", "application/json"),))
        for header, text in mistakes("header"):
            yield Exchange(f"{header}: {text}", path, body, headers=((header, text),))
        yield from (Exchange("method", path, method=method) for method in ("DELETE", "PATCH"))
    yield from (Exchange("no such route", path, method=method) for method, path in LOST)
    yield from (Exchange("no key", path, method="GET", headers=(("authorization", ""),)) for path in PAGES)
    yield from (Exchange("method", path, {}) for path in PAGES if path != "/")


def changed(body: Mapping[str, Any], field: str, *value: Any) -> dict[str, Any]:
    """The body with another value of a field, or without it. The field's path has dots between its names."""
    whole: Any = deepcopy(dict(body))
    *outer, last = field.split(".")
    inner = whole
    for name in outer:
        inner = inner[int(name) if isinstance(inner, list) else name]
    if value:
        inner[last] = value[0]
    else:
        inner.pop(last, None)
    return dict(whole)
