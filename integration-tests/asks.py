"""Requests for streams: plain ones, and those of every kind that a client can make, the same in every run."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

WORDS = "fox lamp river village old red lost found under near 27 because and the".split()
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1}
PLAIN = "plain"
SHARED_WORDS = 300  # words in the prefix that prompts of the kind "shared prefix" share
CHANGES: dict[str, Any] = {"min_p": 0.02, "presence_penalty": 0.5, "logit_bias": {"262": -5, "300": 2.5}}
STOP_TOKENS = list(range(260, 400))
ITEM = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}}}
ENDING = "([a-z]{1,6} ){4,9}the end"
LONG_WORDS = (450, 800)  # range of words in a prompt of several chunks


@dataclass(frozen=True, slots=True)
class Ask:
    kind: str
    path: str
    body: dict[str, Any]
    is_streamed: bool = True
    is_slow: bool = False  # the client reads slowly

    @property
    def new_tokens(self) -> int:
        return int(self.body["parameters"]["max_new_tokens"])


def plain(prompt: str, seed: int | None, new_tokens: int) -> Ask:
    """A request for one stream of exactly `new_tokens` tokens: greedy, or sampled with `seed`."""
    return _native(PLAIN, prompt, new_tokens, **({} if seed is None else {"seed": seed, **SAMPLED}))


def asks(count: int, new_tokens: int) -> list[Ask]:
    """`count` plain requests, the same in every run; every second one is sampled. Each prompt is different and has
    about 10 to 90 tokens."""
    rng = random.Random(1)
    prompts = [_words(rng, rng.randint(8, 60)) for _ in range(count)]
    return [plain(f"{i}: {prompt}", i if i % 2 else None, new_tokens) for i, prompt in enumerate(prompts)]


def mixed_asks(count: int, tokens: tuple[int, int], of_digest: bool = False) -> list[Ask]:
    """`count` requests, the same in every run, of all kinds in turn or, if `of_digest`, of KINDS_OF_DIGEST. `tokens`:
    the least and the largest number of tokens of a text."""
    rng = random.Random(2)
    shared = _words(rng, SHARED_WORDS)
    kinds = cycle(KINDS_OF_DIGEST if of_digest else KINDS)
    return [make(i, rng, shared, rng.randint(*tokens)) for i, make in zip(range(count), kinds, strict=False)]


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def _native(kind: str, prompt: str, tokens: int, **parameters: Any) -> Ask:
    # The end-of-text token is ignored: a stream must be long enough for the faults of the run.
    always = {"max_new_tokens": tokens, "ignore_eos_token": True, "details": True}
    return Ask(kind, "/generate_stream", {"inputs": prompt, "parameters": always | parameters})


def _short(i: int, rng: random.Random) -> str:
    return f"{i}: {_words(rng, rng.randint(8, 60))}"


def _kind(name: str, **parameters: Any) -> Callable[[int, random.Random, str, int], Ask]:
    """Native streams of a short prompt. A parameter `seed` has the number of the request as its value."""

    def make(i: int, rng: random.Random, shared: str, tokens: int) -> Ask:
        seeded = {"seed": i} if "seed" in parameters else {}
        return _native(name, _short(i, rng), tokens, **parameters | seeded)

    return make


def _long(i: int, rng: random.Random, shared: str, tokens: int) -> Ask:
    return _native("long prompt", f"{i}: {_words(rng, rng.randint(*LONG_WORDS))}", tokens)


def _shared(i: int, rng: random.Random, shared: str, tokens: int) -> Ask:
    return _native("shared prefix", f"{shared} {_short(i, rng)}", tokens, seed=i, **SAMPLED)


def _lists(i: int, rng: random.Random, shared: str, tokens: int) -> Ask:
    """A text that a stop token of its own may end, once half of its tokens are made."""
    lists = {"bad_words": ["fox", "the river", "lamp"], "stop_token_ids": STOP_TOKENS, "min_new_tokens": tokens // 2}
    allowed = {"allowed_token_ids": list(range(1000))} if i % 2 else {}
    return _native("lists of tokens", _short(i, rng), tokens, seed=i, do_sample=True, **CHANGES, **lists, **allowed)


def _grammar(i: int, rng: random.Random, shared: str, tokens: int) -> Ask:
    """A text by a schema, which its length limit cuts, or one by an expression, which ends by itself."""
    properties = {"list": {"type": "array", "items": ITEM, "minItems": tokens}}
    schema = {"type": "object", "properties": properties, "required": ["list"]}
    grammar = {"type": "json", "value": schema} if i % 2 else {"type": "regex", "value": ENDING}
    return _native("grammar", _short(i, rng), tokens, seed=i, do_sample=True, grammar=grammar)


def _stop(i: int, rng: random.Random, shared: str, tokens: int) -> Ask:
    return _native("stop strings", _short(i, rng), 2 * tokens, stop=["never said by any text", "fox and the"])


def _best_of(i: int, rng: random.Random, shared: str, tokens: int) -> Ask:
    ask = _native("best_of", _short(i, rng), tokens, best_of=2, do_sample=True)
    return replace(ask, path="/generate", is_streamed=False)


def _chat(i: int, rng: random.Random, shared: str, tokens: int) -> Ask:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": _short(i, rng)}]
    body = {"model": "tgi", "messages": messages, "max_tokens": tokens, "temperature": 0.8, "seed": i}
    body |= {"logprobs": True, "top_logprobs": 2, "stream": True}
    return Ask("OpenAI chat", "/v1/chat/completions", body)


def _slow(i: int, rng: random.Random, shared: str, tokens: int) -> Ask:
    return replace(_native("slow reader", _short(i, rng), tokens, top_n_tokens=5), is_slow=True)


def _prompt(i: int, rng: random.Random, shared: str, tokens: int) -> Ask:
    inputs = _long(i, rng, shared, tokens).body["inputs"]
    ask = _native("log-probabilities of a long prompt", inputs, tokens, decoder_input_details=True)
    return replace(ask, path="/generate", is_streamed=False)


# The published hash of `make digest` depends on this list.
KINDS_OF_DIGEST: list[Callable[[int, random.Random, str, int], Ask]] = [
    *(_kind("greedy"), _long, _shared, _kind("seed, warpers", seed=0, do_sample=True, top_k=20, typical_p=0.9)),
    _kind("penalties", repetition_penalty=1.3, frequency_penalty=0.4),
    _kind("watermark", seed=0, do_sample=True, watermark=True),
    *(_kind("top tokens", top_n_tokens=3), _stop, _best_of, _chat, _slow),
]
KINDS = [*KINDS_OF_DIGEST, _prompt, _lists, _grammar]
