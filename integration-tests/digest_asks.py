"""The requests over whose answers `make digest` computes its hash."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mixed import MixedAsk, mixed_asks

from text_generation_router.api.common.generation_stream import CREDITS

NUM_ASKS = 500
TOKENS = (60, 340)
# Every second request is a question whose text ends by itself after a few tokens. The server then expects texts that
# are shorter than max_new_tokens, and takes on more requests than fit.
QUESTION = "<|user|>What is {} + {}?</s><|assistant|>"
STORY = "Once upon a time there was a little fox in a dark green wood"
NATIVE: tuple[dict[str, Any], ...] = (
    {"truncate": 8},
    {"return_full_text": True},
    {"priority": -1},
    {"timeout": 1000},
    {"cache_salt": "salt"},
    {"do_sample": True, "seed": 2},
    {"top_k": 7, "seed": 3},
    {"top_p": 0.5, "seed": 4},
    {"typical_p": 0.4, "seed": 5},
    {"temperature": 1.7, "seed": 6},
)
OPENAI: dict[str, Any] = {
    "temperature": 0.9,
    "seed": 8,
    "stop": ["fox and the"],
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "top_p": 0.9,
    "top_k": 30,
    "typical_p": 0.9,
    "ignore_eos": True,
}
STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
COMPLETION = {"prompt": "The fox", "logprobs": 2, "max_tokens": 24}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_completion_tokens": 24}


def crowded_asks() -> list[MixedAsk]:
    """NUM_ASKS requests, the same in every run. No answer uses up the credits of its stream, so that no request pauses,
    however slowly its client reads: the shards' work would depend on the client's speed."""
    found = []
    for i, ask in enumerate(mixed_asks(NUM_ASKS // 2, TOKENS, of_digest=True)):
        parameters = {"max_new_tokens": 400, "details": True}
        body = {"inputs": QUESTION.format(i % 10, i // 10 % 10), "parameters": parameters}
        found += [MixedAsk("question", "/generate_stream", body), _within_credits(ask)]
    return found


def _within_credits(ask: MixedAsk) -> MixedAsk:
    """The request, for a text of fewer than CREDITS tokens, top tokens included."""
    native = ask.body.get("parameters")
    fields, name, tops = (
        (native, "max_new_tokens", "top_n_tokens") if native else (ask.body, "max_tokens", "top_logprobs")
    )
    fields = fields | {name: min(fields[name], (CREDITS - 1) // (1 + fields.get(tops, 0)))}
    return replace(ask, body=ask.body | {"parameters": fields} if native else fields)


def with_one_outcome(ask: MixedAsk) -> MixedAsk:
    """The request, with best_of among texts that are all greedy. The server draws the seeds of sampled texts, and
    sampled texts may share more or fewer of their first tokens in the prefix cache."""
    if ask.kind != "best_of":
        return ask
    return replace(ask, body=ask.body | {"parameters": ask.body["parameters"] | {"top_k": 1}})


def asks_for_options() -> Iterator[MixedAsk]:
    """Requests for each option, and on each route, that `mixed_asks` does not use."""
    length = {"max_new_tokens": 24, "details": True}
    for more in NATIVE:
        yield MixedAsk("options", "/generate", {"inputs": STORY, "parameters": length | more}, is_streamed=False)
    for is_streamed in (False, True):
        body = {"inputs": STORY, "stream": is_streamed, "parameters": length | {"seed": 7}}
        yield MixedAsk("options", "/", body, is_streamed)
        openai = OPENAI | STREAMED if is_streamed else OPENAI
        yield MixedAsk("options", "/v1/completions", openai | COMPLETION, is_streamed)
        yield MixedAsk("options", "/v1/chat/completions", openai | CHAT, is_streamed)
