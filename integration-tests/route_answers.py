"""What must be equal in all answers to a request: whole or streamed, alone or in a crowd."""

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import httpx
from route_cases import RouteCase

# Fields that differ from run to run, or that tell of the cache.
VOLATILE = {
    *("id", "item_id", "call_id", "request_id", "created", "created_at", "completed_at", "object", "signature"),
    *("cached_tokens", "cache_read_input_tokens", "input_tokens_details", "prompt_tokens_details", "sequence_number"),
}
# Texts, whose parts a stream sends one after the other.
JOINED = {"text", "content", "reasoning_content", "arguments"}
# Fields of a body with which only a whole answer is given, or that a whole answer alone has.
WHOLE_ONLY = ("best_of", "decoder_input_details", "prompt_logprobs")


async def answer(client: httpx.AsyncClient, case: RouteCase, streamed: bool) -> Any:
    """The part of the answer that must be equal, as JSON."""
    path, body = case.path, case.body
    if streamed and path == "/generate":
        path = "/generate_stream"
    elif streamed:
        body = body | {"stream": True}
    else:
        body = {name: value for name, value in body.items() if name != "stream_options"}
    try:
        response = await client.post(path, json=body)
    except httpx.TransportError as error:
        return {"broken": type(error).__name__}
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        told = joined([*events(response.text)])
    else:
        told = response.json()
        told = {"refused": _message(told)} if response.status_code >= 400 else _whole(told)
    # The server draws the seeds of several texts of which one is the best.
    return steady(told, {*VOLATILE, "seed"} if "best_of" in json.dumps(body) else VOLATILE)


def events(text: str) -> Iterable[Any]:
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            if event.get("type") != "ping":  # the server sends some while a prompt waits
                yield event


def joined(found: list[Any]) -> Any:
    """The whole answer that a stream's events make."""
    wrong = next((each for each in found if each.get("error") and "response" not in each), None)
    if wrong is not None:
        return {"refused": _message(wrong)}
    if "token" in found[0]:
        return _native(found)
    if "choices" in found[0]:
        return _choices(found)
    return _blocks(found) if found[0]["type"] == "message_start" else _response(found)


def _message(told: Any) -> str:
    """The text of an error: of a whole answer, of an event, or of a response that has failed."""
    error = (told.get("error") or told.get("message")) if isinstance(told, Mapping) else told
    return str(error["message"] if isinstance(error, Mapping) else error or told)


def _whole(told: Any) -> Any:
    """A whole answer in the form of `joined`."""
    if isinstance(told, list) and told and isinstance(told[0], Mapping) and "generated_text" in told[0]:
        told = told[0]  # the route / answers with a list
    if isinstance(told, Mapping) and "choices" in told:
        choices = {str(each["index"]): {**each} for each in told["choices"]}
        return {"choices": {place: _unnamed(each) for place, each in choices.items()}, "usage": told.get("usage")}
    return told


def _unnamed(choice: dict[str, Any]) -> dict[str, Any]:
    choice.update(choice.pop("message", None) or {})
    calls = choice.get("tool_calls") or []
    choice["tool_calls"] = {str(place): call for place, call in enumerate(calls)}
    return choice


def _native(found: list[Any]) -> Any:
    last = found[-1]
    details = last.get("details")
    if details is not None:
        tops = [event["top_tokens"] for event in found if event.get("top_tokens")]
        details = details | {"tokens": [event["token"] for event in found], "top_tokens": tops}
        details.pop("input_length", None)
    return {"generated_text": last["generated_text"], "details": details}


def _choices(found: list[Any]) -> Any:
    choices: dict[str, Any] = {}
    usage = None
    for event in found:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            into = choices.setdefault(str(choice["index"]), {})
            delta = choice.get("delta") or {}
            calls = {str(call.pop("index")): call for call in delta.get("tool_calls") or []}
            parts = {name: value for name, value in choice.items() if name != "delta"}
            _merge(into, parts | delta | {"tool_calls": calls})
    return {"choices": choices, "usage": usage}


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Adds a part of a stream: texts and lists grow, and other values are the last ones."""
    for name, value in more.items():
        before = into.get(name)
        if value is None:
            continue
        if isinstance(value, Mapping):
            _merge(into.setdefault(name, {}), value)
        elif isinstance(value, list):
            into[name] = (before or []) + value
        else:
            into[name] = (before or "") + value if name in JOINED else value


def _blocks(found: list[Any]) -> Any:
    answer: dict[str, Any] = {"content": []}
    for event in found:
        match event["type"]:
            case "message_start":
                answer = event["message"] | {"content": []}
            case "content_block_start":
                answer["content"].append(event["content_block"] | {"json": ""})
            case "content_block_delta":
                _add(answer["content"][event["index"]], event["delta"])
            case "message_delta":
                answer |= event["delta"] | {"usage": event["usage"]}
    for block in answer["content"]:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = _object(written)
    return answer


def _add(block: dict[str, Any], delta: Mapping[str, str]) -> None:
    for name in ("text", "thinking", "signature"):
        if name in delta:
            block[name] = block.get(name, "") + delta[name]
    block["json"] += delta.get("partial_json", "")


def _object(written: str) -> Any:
    try:
        return json.loads(written)
    except ValueError:
        return {}


def _response(found: list[Any]) -> Any:
    """The response of the last event, whose texts are the deltas' ones."""
    ends = [each["response"] for each in found if each["type"] in ("response.completed", "response.incomplete")]
    if not ends:
        return {"refused": _message(found[-1].get("response", found[-1]))}
    parts: dict[int, str] = {}
    for event in found:
        if event["type"].endswith((".output_text.delta", "arguments.delta", "reasoning_text.delta")):
            parts[event["output_index"]] = parts.get(event["output_index"], "") + event["delta"]
    for place, text in parts.items():
        item = ends[0]["output"][place]
        said = item.get("arguments", "".join(part["text"] for part in item.get("content") or ()))
        if said != text:
            return {"deltas": text, "said": said}
    return ends[0]


def steady(value: Any, volatile: Collection[str] = VOLATILE) -> Any:
    """The value without fields that differ, and without empty ones, which some forms of an answer leave out."""
    if isinstance(value, Mapping):
        if "input_tokens" in value and "cache_read_input_tokens" in value:  # Anthropic counts cached tokens apart
            value = {**value, "input_tokens": value["input_tokens"] + value["cache_read_input_tokens"]}
        named = {name: each for name, each in value.items() if name not in volatile or _is_token(name, value)}
        kept = {name: steady(each, volatile) for name, each in named.items()}
        return {name: each for name, each in kept.items() if each not in (None, "", [], {})}
    return [steady(each, volatile) for each in value] if isinstance(value, list) else value


def _is_token(name: str, value: Mapping[str, Any]) -> bool:
    """Whether the field is a token's id, which does not differ."""
    return name == "id" and isinstance(value[name], int)


def difference(case: RouteCase, whole: Any, other: Any, streamed: bool) -> str:
    """How another answer to the same request differs from the whole one alone; empty if it does not."""
    if whole == other:
        return ""
    if streamed:
        if any(name in other.get("refused", "") for name in WHOLE_ONLY if name in json.dumps(case.body)):
            return ""
        if not other.get("usage"):  # a stream has it if it was asked for
            whole = {name: value for name, value in whole.items() if name != "usage"}
    return "; ".join(_places(whole, other, ""))


def _places(one: Any, other: Any, place: str) -> Iterable[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in sorted(one.keys() | other.keys()):
            yield from _places(one.get(name), other.get(name), f"{place}.{name}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _places(left, right, f"{place}[{number}]")
    elif one != other:
        yield f"{place}: {str(one)[:160]!r} and {str(other)[:160]!r}"
