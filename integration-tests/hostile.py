"""Hostile request bodies as data: large bodies, and more than a thousand distinct small bodies, the same for the same
seed.

A body with `refused` is not a valid request on any route and must be answered with a status 4xx. The other bodies are
strange but legal: any answer except a server error (5xx) is right.
"""

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

JSON = "application/json"
CANARY = "canary-5b1e"  # text in most bodies; must not appear in an error
REQUIRED = ("inputs", "prompt", "messages")
NATIVE = (
    "best_of",
    "temperature",
    "repetition_penalty",
    "frequency_penalty",
    "top_k",
    "top_p",
    "typical_p",
    "do_sample",
    "max_new_tokens",
    "return_full_text",
    "stop",
    "truncate",
    "watermark",
    "details",
    "seed",
    "top_n_tokens",
    "min_p",
    "presence_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "stop_token_ids",
    "min_new_tokens",
    "adapter_id",
    "priority",
    "timeout",
    "cache_salt",
)
OPENAI = (
    "max_tokens",
    "temperature",
    "top_p",
    "frequency_penalty",
    "logit_bias",
    "stop_token_ids",
    "min_tokens",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "logprobs",
    "priority",
    "cache_salt",
)
# Invalid or very deep JSON values, as text.
INVALID_VALUES = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "-1e400",
    "1" + "0" * 5000,
    "01",
    "0x10",
    "+1",
    ".5",
    "1.",
    "1e",
    "--1",
    "tru",
    "undefined",
    "'a'",
    '"\\ud800"',
    '"\\udfff\\ud800"',
    '"\\u12"',
    '"\\x41"',
    '"a\nb"',
    '"\x00"',
    '"unended',
    "[1,]",
    "[1 2]",
    '{"a":1,}',
    "{a:1}",
    '{"a" 1}',
    "[" * 100_000,
    '{"a":' * 100_000,
    "[" * 2000 + "]" * 2000,
    "/* */ 1",
)
LARGE_WRONG_ITEMS = (
    ("numbers", "1"),
    ("objects", "{}"),
    ("lists", "[]"),
    ("nulls", "null"),
    ("long numbers", "1" * 300),
    ("reals", "1.5e-7"),
)
WRONG_TYPES = ("{}", "[[]]", "[null]", '{"$ref":"#"}', '[{"a":[]}]', '{"__proto__":{"x":1}}', '{"__class__":"x"}')
STRANGE_TEXTS = (
    "\\u0000",
    "\\ud83d\\ude00",
    "\\uffff\\ufffe",
    "\\u202e",
    "\\u001b[31m",
    "\\r\\nx-injected: 1",
    "data: [DONE]\\n\\n",
    "{{ 7*7 }}{% for a in [] %}",
    "<|im_start|></s><pad>",
    "${jndi:ldap://127.0.0.1/a}",
    "../../etc/passwd",
    "' OR 1=1 --",
)


@dataclass(frozen=True, slots=True)
class Body:
    name: str
    content: bytes
    refused: bool
    content_type: str = JSON


@dataclass(frozen=True, slots=True)
class Headers:
    """Strange headers for a request with a valid body. If `refused`, the server must refuse the request; otherwise it
    must answer without a server error (5xx).
    """

    name: str
    headers: list[tuple[bytes, bytes]]
    refused: bool


def headers() -> list[Headers]:
    """Requests with strange tenant and timeout headers."""
    return [*_tenants(), *_timeouts()]


def bodies(seed: int = 0, num_damaged: int = 300) -> list[Body]:
    """Bodies made by hand, and up to `num_damaged` bodies with random damage. No two have the same content and type."""
    rng = random.Random(seed)
    by_chance = (_damaged(rng, number) for number in range(num_damaged))
    found: dict[tuple[bytes, str], Body] = {}
    for body in itertools.chain(_syntax(), _types(), _media_types(), _strange(), by_chance):
        found.setdefault((body.content, body.content_type), body)
    return list(found.values())


def large_bodies(size: int = 1_990_000) -> Iterator[Body]:
    """Bodies of about `size` bytes (the payload limit) that are expensive to parse, check, render or refuse. They are
    made one at a time."""
    for name, item in LARGE_WRONG_ITEMS:
        items, half = _list_of(item, size), _list_of(item, size // 2)
        yield Body(f"stop: a list of {name}", _request(stop=half, parameters=f'{{"stop":{half}}}').encode(), True)
        yield Body(
            f"all texts: a list of {name}",
            _request(**dict.fromkeys(REQUIRED, _list_of(item, size // 3))).encode(),
            True,
        )
        chunks = f'[{{"role":"user","content":{items}}}]'
        yield Body(f"chunks: a list of {name}", _request(messages=chunks).encode(), False)
        yield Body(f"an unknown field: a list of {name}", _request(extra=items).encode(), False)
        yield Body(
            f"grammar and tools: a list of {name}",
            _request(tools=_list_of(item, size // 2), parameters=f'{{"grammar":{_list_of(item, size // 2)}}}').encode(),
            False,
        )
    yield from _large_chats(size)
    yield from _large_texts(size)
    yield from _large_syntax(size)


def _list_of(item: str, size: int) -> str:
    return "[" + ",".join([item] * (size // (len(item) + 1))) + "]"


def _large_chats(size: int) -> Iterator[Body]:
    """Valid chats, refused only if they are too long for the model's context."""
    for content in ("a", "", "\\n"):
        message = f'{{"role":"user","content":"{content}"}}'
        yield Body(f"chat of messages {content!r}", _request(messages=_list_of(message, size)).encode(), False)
    message = '{"role":"user","content":[{"type":"text","text":"a"}]}'
    yield Body("chat of messages in chunks", _request(messages=_list_of(message, size)).encode(), False)
    chunks = _list_of('{"type":"text","text":"a"}', size)
    yield Body(
        "chat of one message in chunks", _request(messages=f'[{{"role":"user","content":{chunks}}}]').encode(), False
    )
    chat = _list_of('{"role":"user","content":"a"}', size)
    yield Body("chat with a bad end", _request(messages=chat[:-1] + ",1]").encode(), False)
    yield Body("chat of one role", _request(messages=f'[{{"role":"{"a" * size}","content":"a"}}]').encode(), False)


def _large_texts(size: int) -> Iterator[Body]:
    for name, text in (("a", "a"), ("space", " "), ("emoji", "\U0001f600"), ("escapes", "\\u00e9"), ("lines", "\\n")):
        long = '"' + text * (size // 3 // len(text.encode())) + '"'
        message = f'[{{"role":"user","content":{long}}}]'
        yield Body(f"texts of {name}", _request(inputs=long, prompt=long, messages=message).encode(), False)
        yield Body(
            f"truncated text of {name}",
            _request(inputs=long, parameters='{"truncate":1,"max_new_tokens":1}').encode(),
            False,
        )
    long = '"' + "a" * (size // 2) + '"'
    yield Body(
        "long stop strings",
        _request(stop=f"[{long}]", parameters=f'{{"stop":[{long}],"max_new_tokens":1}}').encode(),
        False,
    )
    yield Body("a long model name", _request(model=long).encode(), False)
    yield Body("prompts", _request(prompt=_list_of('"a"', size)).encode(), False)
    yield Body(
        "stop strings",
        _request(
            stop=_list_of('"a"', size // 2), parameters=f'{{"stop":{_list_of(chr(34) + "a" + chr(34), size // 2)}}}'
        ).encode(),
        False,
    )


def _large_syntax(size: int) -> Iterator[Body]:
    fields = ",".join(f'"{number}":{number}' for number in range(size // 27))
    yield Body(
        "many fields, large",
        _request(extra="{" + fields + "}").encode()[:-1]
        + b","
        + fields[: size // 2].rpartition(",")[0].encode()
        + b"}",
        False,
    )
    yield Body("many equal fields", b"{" + b'"inputs":"a",' * (size // 13) + b'"inputs":"a"}', False)
    nest = "[" * 900 + "]" * 900
    yield Body("deep and wide", _request(extra=_list_of(nest, size)).encode(), False)
    yield Body("too deep", b"[" * size, True)
    yield Body("spaces", b" " * size, True)
    yield Body("no end", _request(messages=_list_of('{"role":"user","content":"a"}', size)).encode()[:-1], True)
    yield Body("one number", b"1" * size, True)


def _tenants() -> Iterator[Headers]:
    for value in (b"two words", b"a" * 129, "é".encode(), b"\xff\xfe", b"\xc0\xaf", b"a\tb"):
        yield Headers(f"tenant {value[:20]!r}", [(b"x-tenant", value)], True)
    yield Headers("two tenants", [(b"x-tenant", b"a"), (b"x-tenant", b"b")], True)
    for value in (b"", b"a" * 128, b"../../etc/passwd", b"{{7*7}}", b"'+OR+1=1+--", b"a,b"):
        yield Headers(f"tenant {value[:20]!r}", [(b"x-tenant", value)], False)


def _timeouts() -> Iterator[Headers]:
    numbers = b"0 -1 +1 nan inf -inf 1e9 1e400 0x10 1_000 30s .5 1. 1,1 1.2.3 null 0.0000000000001".split()
    for value in (*numbers, b"1 2", b"9" * 5000, "\u0663".encode(), "½".encode(), b"Thu, 1 Jan"):
        yield Headers(f"timeout {value[:20]!r}", [(b"x-request-timeout", value)], True)
    yield Headers("two timeouts", [(b"x-request-timeout", b"1"), (b"x-request-timeout", b"1")], True)
    for value in (b"", b"999999999.999999999", b"000000001"):
        yield Headers(f"timeout {value[:20]!r}", [(b"x-request-timeout", value)], False)


def _request(**replaced: str) -> str:
    """The JSON text of a request that is valid on every route, with the fields in `replaced` replaced."""
    fields = {
        "inputs": f'"{CANARY}"',
        "prompt": f'"{CANARY}"',
        "messages": f'[{{"role":"user","content":"{CANARY}"}}]',
        "max_tokens": "1",
        "parameters": '{"max_new_tokens":1}',
    } | replaced
    return "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"


def _syntax() -> Iterator[Body]:
    """An invalid JSON value in every field that takes a value."""
    for number, value in enumerate(INVALID_VALUES):
        for name in REQUIRED + OPENAI:
            yield Body(f"{name} is not JSON {number}", _request(**{name: value}).encode(), True)
        for name in NATIVE:
            parameters = f'{{"{name}":{value}}}'
            yield Body(f"parameters.{name} is not JSON {number}", _request(parameters=parameters).encode(), True)
        yield Body(f"the body is not JSON {number}", value.encode(), True)
    whole = _request().encode()
    for at in range(0, len(whole), 7):
        yield Body(f"cut at {at}", whole[:at], True)
    for number, bad in enumerate((b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\x80", b"\xe2\x82")):
        yield Body(f"bad UTF-8 {number}", whole.replace(CANARY.encode(), bad), True)
    for encoding in ("utf-16", "utf-32", "utf-8-sig"):
        yield Body(f"in {encoding}", whole.decode().encode(encoding), True)
    yield Body("two values", whole + whole, True)


def _types() -> Iterator[Body]:
    """Valid JSON with wrong types, so that every route lacks a required field."""
    for wrong in (*WRONG_TYPES, "1", "true", "null", "-0.0", "18446744073709551616"):
        yield Body(f"required fields are {wrong}", _request(**dict.fromkeys(REQUIRED, wrong)).encode(), True)
    for value in ("null", "true", "1", "-0", f'"{CANARY}"', "[]", f'["{CANARY}"]', "{}"):
        yield Body(f"the body is {value}", value.encode(), True)


def _media_types() -> Iterator[Body]:
    kinds = (
        "",
        "text/plain",
        "application/xml",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
    )
    for kind in (*kinds, "application/jsonp", "json", "application/", "a" * 5000, "application/json, text/plain"):
        yield Body(f"content type {kind[:30]!r}", _request().encode(), True, kind)


def _strange() -> Iterator[Body]:
    """Legal JSON with odd texts, doubled keys and many unknown fields."""
    for text in STRANGE_TEXTS:
        message = f'[{{"role":"user","content":"{text}"}}]'
        odd = _request(inputs=f'"{text}"', prompt=f'"{text}"', messages=message)
        yield Body(f"text {text}", odd.encode(), False)
        yield Body(f"role {text}", _request(messages=f'[{{"role":"{text}","content":"a"}}]').encode(), False)
        yield Body(f"stop {text}", _request(stop=f'["{text}"]', parameters=f'{{"stop":["{text}"]}}').encode(), False)
    for name in (*REQUIRED, "parameters"):
        yield Body(f"{name} twice", _request()[:-1].encode() + f',"{name}":null}}'.encode(), False)
    extra = json.dumps({f"key-{number}": number for number in range(5000)})
    yield Body("many fields", _request(extra=extra, parameters=extra).encode(), False)
    yield Body("many stops", _request(stop=json.dumps(["a"] * 10_000)).encode(), False)
    for number in (
        "0",
        "-1",
        "4294967295",
        "4294967296",
        "18446744073709551615",
        "18446744073709551616",
        "1e308",
        "1e-45",
    ):
        for name in NATIVE:
            yield Body(f"{name} = {number}", _request(parameters=f'{{"{name}":{number}}}').encode(), False)


def _damaged(rng: random.Random, number: int) -> Body:
    """A valid request with one to eight random bytes, which may or may not make it invalid."""
    content = bytearray(_request().encode())
    for _ in range(rng.randint(1, 8)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    return Body(f"damaged {number}", bytes(content), False)
