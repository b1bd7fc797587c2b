"""Hostile request bodies as data: large bodies, and more than a thousand distinct small bodies, the same for the same
seed.

A body with `refused` is not a valid request on any route and must be answered with a status 4xx. The other bodies are
strange but legal: any answer except a server error (5xx) is right."""

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

JSON = "application/json"
CANARY = "canary-5b1e"  # text in most bodies; must not appear in an error
REQUIRED = ("inputs", "prompt", "messages")
NATIVE = (
    "best_of temperature repetition_penalty frequency_penalty top_k top_p typical_p do_sample max_new_tokens"
    " return_full_text stop truncate watermark details seed top_n_tokens min_p presence_penalty logit_bias"
    " allowed_token_ids bad_words stop_token_ids min_new_tokens adapter_id priority timeout cache_salt"
).split()
OPENAI = (
    "max_tokens temperature top_p frequency_penalty logit_bias stop_token_ids min_tokens seed stop stream"
    " stream_options logprobs priority cache_salt"
).split()
# Invalid or very deep JSON values, as text.
INVALID_VALUES = (
    *("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1" + "0" * 5000, "01", "0x10", "+1", ".5", "1.", "1e", "--1"),
    *("tru", "undefined", "'a'", '"\\ud800"', '"\\udfff\\ud800"', '"\\u12"', '"\\x41"', '"a\nb"', '"\x00"', '"unended'),
    *("[1,]", "[1 2]", '{"a":1,}', "{a:1}", '{"a" 1}', "[" * 100_000, '{"a":' * 100_000, "[" * 2000 + "]" * 2000),
    "/* */ 1",
)
LARGE_WRONG_ITEMS = {
    **{"numbers": "1", "objects": "{}", "lists": "[]", "nulls": "null", "long numbers": "1" * 300, "reals": "1.5e-7"}
}
WRONG_TYPES = ("{}", "[[]]", "[null]", '{"$ref":"#"}', '[{"a":[]}]', '{"__proto__":{"x":1}}', '{"__class__":"x"}')
STRANGE_TEXTS = (
    *("\\u0000", "\\ud83d\\ude00", "\\uffff\\ufffe", "\\u202e", "\\u001b[31m", "\\r\\nx-injected: 1"),
    *("data: [DONE]\\n\\n", "{{ 7*7 }}{% for a in [] %}", "<|im_start|></s><pad>", "${jndi:ldap://127.0.0.1/a}"),
    *("../../etc/passwd", "' OR 1=1 --"),
)
NUMBERS = "0 -1 4294967295 4294967296 18446744073709551615 18446744073709551616 1e308 1e-45".split()
MEDIA_TYPES = (
    *("", "text/plain", "application/xml", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"),
    *("application/jsonp", "json", "application/", "a" * 5000, "application/json, text/plain"),
)
TIMEOUTS = b"0 -1 +1 nan inf -inf 1e9 1e400 0x10 1_000 30s .5 1. 1,1 1.2.3 null 0.0000000000001".split()


@dataclass(frozen=True, slots=True)
class Body:
    name: str
    content: bytes
    refused: bool
    content_type: str = JSON


@dataclass(frozen=True, slots=True)
class Headers:
    """Strange headers for a request with a valid body. If `refused`, the server must refuse the request; otherwise it
    must answer without a server error (5xx)."""

    name: str
    headers: list[tuple[bytes, bytes]]
    refused: bool


def headers() -> Iterator[Headers]:
    """Requests with strange tenant and timeout headers."""
    tenants = (b"two words", b"a" * 129, "é".encode(), b"\xff\xfe", b"\xc0\xaf", b"a\tb")
    timeouts = (*TIMEOUTS, b"1 2", b"9" * 5000, "\u0663".encode(), "½".encode(), b"Thu, 1 Jan")
    legal_tenants = (b"", b"a" * 128, b"../../etc/passwd", b"{{7*7}}", b"'+OR+1=1+--", b"a,b")
    for header, refused, values in (
        ("x-tenant", True, tenants),
        ("x-tenant", False, legal_tenants),
        ("x-request-timeout", True, timeouts),
        ("x-request-timeout", False, (b"", b"999999999.999999999", b"000000001")),
    ):
        for value in values:
            yield Headers(f"{header} {value[:20]!r}", [(header.encode(), value)], refused)
    yield Headers("two tenants", [(b"x-tenant", b"a"), (b"x-tenant", b"b")], True)
    yield Headers("two timeouts", [(b"x-request-timeout", b"1"), (b"x-request-timeout", b"1")], True)


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
    for name, item in LARGE_WRONG_ITEMS.items():
        items, half = _list_of(item, size), _list_of(item, size // 2)
        yield _body(f"stop: a list of {name}", True, stop=half, parameters=f'{{"stop":{half}}}')
        yield _body(f"all texts: a list of {name}", True, **dict.fromkeys(REQUIRED, _list_of(item, size // 3)))
        yield _body(f"chunks: a list of {name}", messages=_message(items))
        yield _body(f"an unknown field: a list of {name}", extra=items)
        yield _body(f"grammar and tools: a list of {name}", tools=half, parameters=f'{{"grammar":{half}}}')
    yield from _large_chats(size)
    yield from _large_texts(size)
    yield from _large_syntax(size)


def _body(name: str, refused: bool = False, **replaced: str) -> Body:
    return Body(name, _request(**replaced).encode(), refused)


def _list_of(item: str, size: int) -> str:
    return "[" + ",".join([item] * (size // (len(item) + 1))) + "]"


def _message(content: str, role: str = "user") -> str:
    """Messages of one, whose content is JSON."""
    return f'[{{"role":"{role}","content":{content}}}]'


def _large_chats(size: int) -> Iterator[Body]:
    """Valid chats, refused only if they are too long for the model's context."""
    for content in ("a", "", "\\n"):
        messages = _list_of(f'{{"role":"user","content":"{content}"}}', size)
        yield _body(f"chat of messages {content!r}", messages=messages)
    message = '{"role":"user","content":[{"type":"text","text":"a"}]}'
    yield _body("chat of messages in chunks", messages=_list_of(message, size))
    yield _body("chat of one message in chunks", messages=_message(_list_of('{"type":"text","text":"a"}', size)))
    chat = _list_of('{"role":"user","content":"a"}', size)
    yield _body("chat with a bad end", messages=chat[:-1] + ",1]")
    yield _body("chat of one role", messages=_message('"a"', "a" * size))


def _large_texts(size: int) -> Iterator[Body]:
    for name, text in (("a", "a"), ("space", " "), ("emoji", "\U0001f600"), ("escapes", "\\u00e9"), ("lines", "\\n")):
        long = '"' + text * (size // 3 // len(text.encode())) + '"'
        yield _body(f"texts of {name}", inputs=long, prompt=long, messages=_message(long))
        yield _body(f"truncated text of {name}", inputs=long, parameters='{"truncate":1,"max_new_tokens":1}')
    long = '"' + "a" * (size // 2) + '"'
    yield _body("long stop strings", stop=f"[{long}]", parameters=f'{{"stop":[{long}],"max_new_tokens":1}}')
    yield _body("a long model name", model=long)
    yield _body("prompts", prompt=_list_of('"a"', size))
    stops = _list_of('"a"', size // 2)
    yield _body("stop strings", stop=stops, parameters=f'{{"stop":{stops}}}')


def _large_syntax(size: int) -> Iterator[Body]:
    fields = ",".join(f'"{number}":{number}' for number in range(size // 27))
    most = fields[: size // 2].rpartition(",")[0]
    yield Body("many fields, large", f"{_request(extra='{' + fields + '}')[:-1]},{most}}}".encode(), False)
    yield Body("many equal fields", b"{" + b'"inputs":"a",' * (size // 13) + b'"inputs":"a"}', False)
    yield _body("deep and wide", extra=_list_of("[" * 900 + "]" * 900, size))
    yield Body("too deep", b"[" * size, True)
    yield Body("spaces", b" " * size, True)
    yield Body("no end", _request(messages=_list_of('{"role":"user","content":"a"}', size)).encode()[:-1], True)
    yield Body("one number", b"1" * size, True)


def _request(**replaced: str) -> str:
    """The JSON text of a request that is valid on every route, with the fields in `replaced` replaced."""
    text = f'"{CANARY}"'
    fields = {"inputs": text, "prompt": text, "messages": _message(text), "max_tokens": "1"}
    fields |= {"parameters": '{"max_new_tokens":1}'} | replaced
    return "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"


def _syntax() -> Iterator[Body]:
    """An invalid JSON value in every field that takes a value."""
    for number, value in enumerate(INVALID_VALUES):
        for name in (*REQUIRED, *OPENAI):
            yield _body(f"{name} is not JSON {number}", True, **{name: value})
        for name in NATIVE:
            yield _body(f"parameters.{name} is not JSON {number}", True, parameters=f'{{"{name}":{value}}}')
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
        yield _body(f"required fields are {wrong}", True, **dict.fromkeys(REQUIRED, wrong))
    for value in ("null", "true", "1", "-0", f'"{CANARY}"', "[]", f'["{CANARY}"]', "{}"):
        yield Body(f"the body is {value}", value.encode(), True)


def _media_types() -> Iterator[Body]:
    for kind in MEDIA_TYPES:
        yield Body(f"content type {kind[:30]!r}", _request().encode(), True, kind)


def _strange() -> Iterator[Body]:
    """Legal JSON with odd texts, doubled keys and many unknown fields."""
    for text in STRANGE_TEXTS:
        quoted = f'"{text}"'
        yield _body(f"text {text}", inputs=quoted, prompt=quoted, messages=_message(quoted))
        yield _body(f"role {text}", messages=_message('"a"', text))
        yield _body(f"stop {text}", stop=f"[{quoted}]", parameters=f'{{"stop":[{quoted}]}}')
    for name in (*REQUIRED, "parameters"):
        yield Body(f"{name} twice", f'{_request()[:-1]},"{name}":null}}'.encode(), False)
    extra = json.dumps({f"key-{number}": number for number in range(5000)})
    yield _body("many fields", extra=extra, parameters=extra)
    yield _body("many stops", stop=json.dumps(["a"] * 10_000))
    for number, name in itertools.product(NUMBERS, NATIVE):
        yield _body(f"{name} = {number}", parameters=f'{{"{name}":{number}}}')


def _damaged(rng: random.Random, number: int) -> Body:
    """A valid request with one to eight random bytes, which may or may not make it invalid."""
    content = bytearray(_request().encode())
    for _ in range(rng.randint(1, 8)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    return Body(f"damaged {number}", bytes(content), False)
