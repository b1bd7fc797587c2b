"""A server whose model writes the text that a test gives it, and what clients of each API make of its answers.

The model has no weights that mean anything: a fault puts the ids of the text in the place of the sampled ones."""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from calls import events_of
from server_process import LAUNCHER, ServerProcess
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from text_generation_router.text.calls.formats import CALL_FORMATS, REASONING_FORMATS

END = "</s>"
# Shows the tools, and ends with the last message, which so can open the reasoning.
TEMPLATE = "{% if tools %}{{ tools | length }} tools. {% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
MAX_TOKENS = 700
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "torch_dtype": "float32",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client has of an answer, by whichever API."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]  # (name, arguments)
    ids: tuple[str, ...]  # the ids of the calls
    ending: str  # why the answer ended, in the API's own word


class WritingServer:
    """Runs while the context is open. Its model knows a format of calls and one of reasoning, whose markers are special
    tokens or plain text."""

    def __init__(
        self,
        folder: Path,
        calls: str,
        reasoning: str,
        has_special: bool,
        *,
        launcher: Path = LAUNCHER,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.special = special_markers(calls, reasoning) if has_special else ()
        self._tokenizer = byte_tokenizer([END, *self.special])
        self._ids = folder / "ids.json"
        self._ids.write_text("[]")
        _write_model(folder, self._tokenizer)
        self.process = ServerProcess(
            *("--model-id", str(folder), "--load-format", "dummy", "--testing"),
            *("--max-total-tokens", "1024", "--max-batch-prefill-tokens", "256", "--max-concurrent-requests", "256"),
            *("--tool-call-format", calls, "--reasoning-format", reasoning),
            launcher=launcher,
            environ={**(environ or {}), "FAILPOINTS": f"shard.sampled:emit={self._ids}"},
        )

    def __enter__(self) -> "WritingServer":
        self.process.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.__exit__(*exception)

    @property
    def url(self) -> str:
        return self.process.url

    def write(self, text: str) -> int:
        """Lets all requests from now on be answered by `text`. Returns its number of tokens, without the last one,
        which ends the text. No request may be running."""
        ids = self._tokenizer.encode(text + END, add_special_tokens=False).ids
        assert len(ids) <= MAX_TOKENS
        self._replace(ids)
        return len(ids) - 1

    def begin(self, text: str) -> None:
        """Lets all requests from now on be answered by `text` and what the model samples after it."""
        self._replace(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _replace(self, ids: list[int]) -> None:
        new = self._ids.with_suffix(".new")
        new.write_text(json.dumps(ids))
        os.replace(new, self._ids)


def special_markers(calls: str, reasoning: str) -> tuple[str, ...]:
    """All texts of the formats that can be tokens."""
    texts = " ".join((*CALL_FORMATS[calls].texts, *REASONING_FORMATS[reasoning].markers))
    return tuple(dict.fromkeys(re.findall(r"<[^\s<>]+>|\[/?[A-Z_]+\]", texts)))


def byte_tokenizer(special: Iterable[str]) -> Tokenizer:
    """A token for each byte, and the special tokens."""
    tokenizer = Tokenizer(
        models.BPE({char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def _write_model(folder: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": tokenizer.token_to_id(END), "bos_token_id": None}
    (folder / "config.json").write_text(json.dumps(CONFIG | ids))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": END}))


def tools_of(schemas: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": n, "parameters": schema}} for n, schema in schemas.items()]


def _chat_joined(events: list[Any], num_choices: int) -> list[Answer]:
    """The answer's choices, put together from the chunks of a stream."""
    messages: list[dict[str, Any]] = [{} for _ in range(num_choices)]
    endings: list[str | None] = [None for _ in messages]
    for event in events:
        assert "choices" in event, event
        for choice in event["choices"]:
            assert endings[choice["index"]] is None
            _add(messages[choice["index"]], choice["delta"])
            endings[choice["index"]] = choice["finish_reason"]
    return [_of_message(message, str(ending)) for message, ending in zip(messages, endings, strict=True)]


def _anthropic_joined(events: list[Any], _: int) -> Answer:
    names = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    blocks: list[dict[str, Any]] = []
    ending = ""
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                blocks[-1]["json"] += delta["partial_json"]
            else:
                blocks[-1][names[delta["type"]]] += delta[names[delta["type"]]]
        elif event["type"] == "message_delta":
            ending = event["delta"]["stop_reason"]
    return _of_blocks([block | {"input": object_of(block["json"])} for block in blocks], ending)


def _responses_joined(events: list[Any], _: int) -> Answer:
    items: list[dict[str, Any]] = []
    ending = ""
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            items.append(event["item"] | {"text": ""})
        elif kind.endswith(".delta"):
            items[event["output_index"]]["text"] += event["delta"]
        elif kind in ("response.completed", "response.incomplete"):
            ending = event["response"]["status"]
    for item in items:
        item |= {"arguments": item["text"], "content": [{"text": item["text"]}]}
    return _of_items(items, ending)


def chat_body(inputs: str, schemas: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": inputs}]
    return {"messages": messages, "tools": tools_of(schemas), "max_tokens": MAX_TOKENS}


def messages_body(inputs: str, schemas: dict[str, Any]) -> dict[str, Any]:
    tools = [{"name": name, "input_schema": schema} for name, schema in schemas.items()]
    return {"model": "m", "messages": [{"role": "user", "content": inputs}], "tools": tools, "max_tokens": MAX_TOKENS}


def responses_body(inputs: str, schemas: dict[str, Any]) -> dict[str, Any]:
    tools = [{"type": "function", "name": name, "parameters": schema} for name, schema in schemas.items()]
    return {"model": "m", "input": inputs, "tools": tools, "max_output_tokens": MAX_TOKENS}


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Adds a chunk's delta to the message, as OpenAI's clients do."""
    for name in ("content", "reasoning_content"):
        message[name] = (message.get(name) or "") + (delta.get(name) or "")
    calls = message.setdefault("tool_calls", [])
    for part in delta.get("tool_calls", ()):
        if part["index"] == len(calls):
            calls.append({"id": part["id"], "function": part["function"]})
        else:
            assert part.keys() == {"index", "function"} and part["function"].keys() == {"arguments"}
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]


def _of_message(message: dict[str, Any], ending: str) -> Answer:
    calls = message.get("tool_calls") or []
    return Answer(
        message["content"] or "",
        message.get("reasoning_content", ""),
        tuple((call["function"]["name"], call["function"]["arguments"]) for call in calls),
        tuple(call["id"] for call in calls),
        ending,
    )


def _of_blocks(blocks: list[dict[str, Any]], ending: str) -> Answer:
    calls = [block for block in blocks if block["type"] == "tool_use"]
    return Answer(
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        tuple((call["name"], json.dumps(call["input"])) for call in calls),
        tuple(call["id"] for call in calls),
        ending,
    )


def _of_items(items: list[dict[str, Any]], ending: str) -> Answer:
    def text(kind: str) -> str:
        return "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])

    calls = [item for item in items if item["type"] == "function_call"]
    return Answer(
        text("message"),
        text("reasoning"),
        tuple((call["name"], call["arguments"]) for call in calls),
        tuple(call["call_id"] for call in calls),
        ending,
    )


def object_of(arguments: str) -> dict[str, Any]:
    """The object that the JSON text of a call's arguments has; an empty one for other text, as in /v1/messages."""
    try:
        value = json.loads(arguments)
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _api(path: str, body_of: Callable[..., dict[str, Any]], whole: Callable[[Any], Any], joined: Any = None) -> Any:
    """Makes calls for `at_once`, from the last message, the schemas of the tools and more fields. `joined`: puts an
    answer together from the events of a stream."""

    def make(inputs: str, schemas: dict[str, Any], **fields: Any) -> Any:
        body = body_of(inputs, schemas) | fields

        async def call(client: httpx.AsyncClient) -> Any:
            if joined is not None:
                async with client.stream("POST", path, json=body | {"stream": True}) as response:
                    return joined([event async for event in events_of(response)], fields.get("n", 1))
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            return whole(response.json())

        return call

    return make


def _choices(answer: Any) -> list[Answer]:
    return [_of_message(choice["message"], choice["finish_reason"]) for choice in answer["choices"]]


_CHAT = ("/v1/chat/completions", chat_body, _choices)
_ANTHROPIC = ("/v1/messages", messages_body, lambda answer: _of_blocks(answer["content"], answer["stop_reason"]))
_RESPONSES = ("/v1/responses", responses_body, lambda answer: _of_items(answer["output"], answer["status"]))
# Calls of each API, for whole answers and streams. A chat gives its choices, the others one answer.
chat, chat_stream = _api(*_CHAT), _api(*_CHAT, _chat_joined)
anthropic, anthropic_stream = _api(*_ANTHROPIC), _api(*_ANTHROPIC, _anthropic_joined)
responses, responses_stream = _api(*_RESPONSES), _api(*_RESPONSES, _responses_joined)
