"""Requests for every route with every field, drawn from the schemas of the OpenAPI document.

A field whose name is in VALUES gets one of the values there, which give an answer a form of its own. Any other field,
e.g. a new one, gets values of its schema. What would make an answer depend on the clock or on a seed that the server
draws is left out: deadlines are long, and each drawn text has a seed."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from asks import WORDS
from digest_requests import CHOSEN, CUSTOM_TOOLS, FLAT_FUNCTIONS, FUNCTIONS, LARK, PATTERN, RULES, SCHEMA

from text_generation_router.openapi.document import document_of
from text_generation_router.openapi.operation_json import Interface

Schema = Mapping[str, Any]
Draw = Callable[[random.Random], Any]

# Fields of one group contradict each other, so that a body has one of them at most.
FORMS = frozenset(
    ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
) | {"json_schema", "regex", "ebnf", "grammar"}
CONTRARY = (FORMS, frozenset(("max_tokens", "max_completion_tokens")))
# The field that limits the length of a text, by the schema. A body always has one.
LENGTHS = {
    "GenerateParameters": "max_new_tokens", "CompletionRequest": "max_tokens", "ChatRequest": "max_tokens",
    "ResponsesRequest": "max_output_tokens", "MessagesRequest": "max_tokens",
}  # fmt: skip
# Fields with which a text does not end by itself.
UNENDED = frozenset(("ignore_eos", "ignore_eos_token"))
# Numbers of tokens: of most texts, and of those that make the server preempt others, which it has not foreseen.
SHORT_TEXT, LONG_TEXT = (1, 50), (120, 220)
# Probability that an object of more than LARGE fields has a field which it need not have, and that it has none of them.
LARGE, FEW, PLAIN = 12, 0.12, 0.1
# Fields that give an answer more parts, of which a body has some more often.
FREQUENT, OFTEN = frozenset(("logprobs", "top_n_tokens", "details", "stop", "stop_sequences", "tools", "n")), 0.35
LONG = 0.3  # probability that a text may be long
CHOICES = ["fox", "bear and fox"]
CLOCK_CALL = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
CALLED = [
    {"role": "user", "content": "What time is it?"},
    {"role": "assistant", "content": None, "tool_calls": [CLOCK_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "It is five."},
]  # fmt: skip
QUESTIONS = ("What is 2 + 3?", "Tell me a story about a fox.", "What is the weather in Rome?", "Write JSON.")


def words(rng: random.Random, most: int = 90) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))


def prompt(rng: random.Random) -> str:
    """Some prompts begin alike, so that the cache has a part of them."""
    return rng.choice((words(rng), f"{'the old fox and ' * 20}{words(rng, 9)}", rng.choice(QUESTIONS)))


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    first = [{"role": "system", "content": "Be brief."}] if rng.random() < 0.3 else []
    turn = {"role": "user", "content": rng.choice((prompt(rng), [{"type": "text", "text": prompt(rng)}]))}
    return rng.choice((CALLED, [*first, turn], [*first, turn, {"role": "assistant", "content": "It is"}]))


def turns(rng: random.Random) -> list[dict[str, Any]]:
    """Messages in Anthropic's form."""
    used = {"type": "tool_use", "id": "toolu_1", "name": "clock", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "It is five."}
    called = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    first = {"role": "user", "content": rng.choice((prompt(rng), [{"type": "text", "text": prompt(rng)}]))}
    return rng.choice(([first], [first, *called], [first, {"role": "assistant", "content": "It is"}]))


def items(rng: random.Random) -> Any:
    """The input of /v1/responses."""
    call = {"type": "function_call", "call_id": "call_1", "name": "clock", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "It is five."}
    ask = {"role": "user", "content": rng.choice((prompt(rng), [{"type": "input_text", "text": prompt(rng)}]))}
    return rng.choice((prompt(rng), [ask], [ask, call, result]))


def some(*values: Any) -> Draw:
    return lambda rng: rng.choice(values)


def between(least: float, most: float) -> Draw:
    return lambda rng: round(rng.uniform(least, most), 2)


GRAMMARS = ({"type": "json", "value": SCHEMA}, {"type": "regex", "value": PATTERN})
NAMED = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
FLAT_NAMED = {"type": "json_schema", "name": "a", "schema": SCHEMA}
# The last ones begin as texts of the demo model do, so that some tokens are held back and then given.
STOPS = (
    *(["the"], [" and", "fox"], ["e"], ["\n"], [" was a X", "The home of X", "I am X"], ["he X", "e X", "s X", ", X"]),
)
VALUES: dict[str, Draw] = {
    "inputs": prompt, "temperature": between(0.05, 2), "repetition_penalty": between(0.8, 1.5),
    "frequency_penalty": between(-1, 2), "presence_penalty": between(-1, 2), "top_k": some(1, 3, 50),
    "top_p": between(0.05, 0.99),
    "typical_p": between(0.05, 0.99), "min_p": between(0, 0.5), "seed": lambda rng: rng.randint(0, 2**63),
    "logit_bias": lambda rng: {str(rng.randint(3, 1000)): rng.choice((-100, -2, 3, 20)) for _ in range(3)},
    "allowed_token_ids": lambda rng: sorted(rng.sample(range(2, 1500), 900)),
    "bad_words": some(["fox"], ["the", "a b"]),
    "stop_token_ids": lambda rng: rng.sample(range(260, 1200), 30), "model": some("demo", "any"),
    "response_format": some({"type": "json_object"}, NAMED, {"type": "text"}), "guided_json": some(SCHEMA),
    "structured_outputs": some({"json": SCHEMA}, {"regex": PATTERN}, {"choice": CHOICES}, {"grammar": RULES}),
    "guided_regex": some(PATTERN, "[a-z ]{5,40}"), "guided_choice": some(CHOICES), "guided_grammar": some(RULES, LARK),
    "json_schema": some(SCHEMA), "regex": some(PATTERN), "ebnf": some(RULES), "n": some(1, 2, 3), "best_of": some(2),
    "stop": some(*STOPS), "stop_sequences": some(*STOPS), "min_tokens": some(1, 5), "min_new_tokens": some(1, 5),
    "truncate": some(5, 40), "truncate_prompt_tokens": some(-1, 5, 40), "prompt_logprobs": some(0, 2),
    "priority": lambda rng: rng.randint(-5, 5), "timeout": some(1000), "cache_salt": some("a", "b"),
    "top_logprobs": some(0, 1, 3), "top_n_tokens": some(0, 2, 5), "chat_template_kwargs": some({}, {"a": 1}),
    "tool_prompt": some("Use a tool."),
    "max_thinking_tokens": some(5, 20), "documents": some([], [{"text": "A fox."}]),
    "include": some([], ["message.output_text.logprobs"]), "metadata": some({"a": "b"}),
    "instructions": some("Be brief."),
    "format": some(FLAT_NAMED, {"type": "text"}), "thinking": some({"type": "disabled"}, {"type": "adaptive"}),
    "tool_choice": some("auto", "none", "required"), "tokens": lambda rng: rng.sample(range(3, 1500), 9),
}  # fmt: skip
# Values of fields that are other ones in a schema.
OWN_VALUES: dict[tuple[str, str], Draw] = {
    ("ChatRequest", "messages"): conversation,
    ("MessagesRequest", "messages"): turns,
    ("CountTokensRequest", "messages"): turns,
    ("ResponsesRequest", "input"): items,
    ("ChatRequest", "tools"): some(FUNCTIONS, FUNCTIONS[:1]),
    ("ChatRequest", "tool_choice"): some("auto", "none", "required", CHOSEN),
    ("ResponsesRequest", "tools"): some(FLAT_FUNCTIONS),
    ("MessagesRequest", "tools"): some(CUSTOM_TOOLS),
    ("CountTokensRequest", "tools"): some(CUSTOM_TOOLS),
    ("MessagesRequest", "tool_choice"): some({"type": "auto"}, {"type": "any"}, {"type": "none"}),
    ("CountTokensRequest", "tool_choice"): some({"type": "auto"}),
    ("MessagesRequest", "system"): some("Be brief.", [{"type": "text", "text": "Be brief."}]),
    ("OutputConfig", "format"): some({"type": "json_schema", "schema": SCHEMA}),
    ("GenerateParameters", "grammar"): some(*GRAMMARS),
    ("CompletionRequest", "logprobs"): some(0, 2),
    ("CompletionRequest", "grammar"): some(RULES),
    ("ChatRequest", "grammar"): some(RULES),
    ("CompletionRequest", "prompt"): lambda rng: rng.choice(
        (prompt(rng), [prompt(rng), words(rng)], [5, 6, 7], [[5, 6], [300, 7]])
    ),
}


@dataclass(frozen=True, slots=True)
class RouteCase:
    """A request. `fields`: what was drawn, as `Schema.field`. `has_stream`: the route also answers it as a stream."""

    path: str
    body: dict[str, Any]
    fields: tuple[str, ...]
    has_stream: bool


@cache
def document() -> dict[str, Any]:
    return document_of(Interface(version="0"))


def bodies() -> dict[str, Schema]:
    """The schema of the body of each POST route."""
    operations = {path: methods["post"] for path, methods in document()["paths"].items() if "post" in methods}
    return {
        path: each["requestBody"]["content"]["application/json"]["schema"]
        for path, each in operations.items()
        if "requestBody" in each
    }


def cases(seed: int, count: int) -> list[RouteCase]:
    """`count` cases, of all routes in turn."""
    rng, routes = random.Random(seed), sorted(bodies())
    # Routes without a stream and without a text are cheap, and have little that could differ.
    turns = [path for path in routes for _ in range(1 if "token" in path else 3)]
    return [_case(rng, turns[number % len(turns)]) for number in range(count)]


def _case(rng: random.Random, path: str) -> RouteCase:
    drawing = Drawing(rng)
    body = drawing.value(bodies()[path], "")
    if path == "/generate_stream":
        path = "/generate"  # the other form of the same answer
    has_stream = path == "/generate" or (isinstance(body, dict) and "stream" in _all_properties(path))
    for part in _generating(body):
        _make_steady(part, rng)
    body.pop("stream", None)
    return RouteCase(path, body, tuple(drawing.fields), has_stream)


def _all_properties(path: str) -> set[str]:
    schema = bodies()[path]
    named = [_resolved(each) for each in schema.get("anyOf", [schema])]
    return {name for each in named for name in each.get("properties", ())}


def _generating(body: Any) -> Sequence[dict[str, Any]]:
    """The objects of a body that have sampling parameters."""
    found = body.get("instances", [body])
    return [each.get("parameters", each) if "inputs" in each else each for each in found]


def _make_steady(part: dict[str, Any], rng: random.Random) -> None:
    """Without seeds that the server draws, and with a tool for each choice of one."""
    if part.get("best_of", 1) > 1:
        part.pop("seed", None)
        part |= {"do_sample": True, "top_k": 1}
    else:
        part.setdefault("seed", rng.randint(0, 2**63))
    if "tool_choice" in part and "tools" not in part:
        del part["tool_choice"]
    if "tools" in part:
        for name in FORMS & part.keys():
            del part[name]


class Drawing:
    """Draws one body, and notes its fields."""

    def __init__(self, rng: random.Random) -> None:
        self.fields: list[str] = []
        self._rng = rng

    def value(self, schema: Schema, name: str) -> Any:
        title = schema["$ref"].rpartition("/")[2] if "$ref" in schema else ""
        schema = _resolved(schema)
        if "anyOf" in schema:
            return self.value(self._rng.choice([each for each in schema["anyOf"] if each.get("type") != "null"]), name)
        if "const" in schema or "enum" in schema:
            return self._rng.choice(schema.get("enum", [schema.get("const")]))
        match schema.get("type"):
            case "object":
                return self._object(schema, title)
            case "array":
                least = schema.get("minItems", 0)
                return [self.value(schema.get("items", {}), name) for _ in range(self._rng.randint(least, least + 1))]
            case "boolean":
                return self._rng.random() < 0.5
            case "integer" | "number":
                return self._rng.randint(max(0, schema.get("minimum", 0)), 9)
        return words(self._rng, 9)

    def _object(self, schema: Schema, title: str) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        few = 0.0 if self._rng.random() < PLAIN else FEW if len(properties) > LARGE else 0.5
        often = max(few, OFTEN if few else 0.0)
        names = [
            name for name in properties if name in required or self._rng.random() < (often if name in FREQUENT else few)
        ]
        for group in CONTRARY:
            forms = [name for name in names if name in group]
            chosen = self._rng.choice(forms or [""])
            names = [name for name in names if name not in group or name == chosen]
        made = {name: self._field(title, name, properties[name]) for name in names}
        if title in LENGTHS:
            is_long = self._rng.random() < LONG
            limit = "max_completion_tokens" if "max_completion_tokens" in made else LENGTHS[title]
            made[limit] = self._rng.randint(*(LONG_TEXT if is_long else SHORT_TEXT))
            made |= dict.fromkeys(UNENDED & properties.keys(), True) if is_long else {}
        if "parameters" in properties and "inputs" in properties and "parameters" not in made:
            made["parameters"] = {"max_new_tokens": 5}
        return made

    def _field(self, title: str, name: str, schema: Schema) -> Any:
        self.fields.append(f"{title}.{name}")
        draw = OWN_VALUES.get((title, name)) or VALUES.get(name)
        return draw(self._rng) if draw else self.value(schema, name)


def _resolved(schema: Schema) -> Schema:
    if "$ref" not in schema:
        return schema
    found: Schema = document()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def drawn(made: Sequence[RouteCase]) -> Counter[str]:
    return Counter(field for case in made for field in case.fields)


def all_fields() -> set[str]:
    """`Schema.field` of each field that a body of a route may have at its top, or in its parameters."""
    tops = [each for schema in bodies().values() for each in schema.get("anyOf", [schema])]
    titles = {top["$ref"].rpartition("/")[2] for top in tops} | {"GenerateParameters"}
    schemas = document()["components"]["schemas"]
    return {f"{title}.{name}" for title in titles for name in schemas[title].get("properties", ())}
