"""Valid bodies of every route with random changes: `make fuzz-bodies` sends 20,000 to a server, and checks each answer.

No answer is a server error (5xx), and no refusal lacks the form of its route's dialect. The seed, which is printed,
makes the same bodies again."""

import argparse
import copy
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attacks import Attacked, Findings, ThrownAnswer, document, throw
from hostile import Body
from scale import SHORT
from server_process import ServerProcess

# Bodies beside the document's own examples, with fields that these do not have: [route, body].
BODIES = [json.loads(line) for line in Path(__file__).with_suffix(".jsonl").read_text().splitlines()]
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**31, 2**63, 2**64, -(2**63) - 1, 1e308, "", "a", "\0", "\u202e", "#", "any"),
    *("none", "9" * 4301, '{"a":' * 300 + "1" + "}" * 300),
    *([], {}, [[]], [{}], [None], {"a": 1}, {"type": False}, [1] * 300, ["a", 5]),
)  # fmt: skip
KEYS = "type name const enum allOf content role tools tool_choice stream max_tokens n".split()
LEVELS = (60, 127, 130, 253, 300)
Place = tuple[Any, Any]  # an object or a list, and a key or an index in it


def mutants(document: Any, seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Routes, each with the body of a request."""
    rng, valid = random.Random(seed), [*_examples(document), *BODIES]
    for _ in range(count):
        route, body = rng.choice(valid)
        body = copy.deepcopy(body)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            _change(rng, body, rng.choice(valid)[1])
        yield route, json.dumps(body).encode()


def _examples(document: Any) -> Iterator[tuple[str, Any]]:
    for route, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        for example in content.get("examples", {}).values():
            yield route, example["value"]


def _change(rng: random.Random, body: Any, other: Any) -> None:
    places = [*_places(body)]
    if not places:
        return
    holder, key = rng.choice(places)
    match rng.randrange(6):
        case 0 | 1:
            holder[key] = copy.deepcopy(rng.choice(ODD))
        case 2:
            del holder[key]
        case 3:
            for _ in range(rng.choice(LEVELS)):
                holder[key] = {"a": holder[key]} if rng.random() < 0.5 else [holder[key]]
        case 4:
            there, name = rng.choice([*_places(other)])
            holder[key] = copy.deepcopy(there[name])
        case 5 if isinstance(holder, dict):
            holder[rng.choice(KEYS)] = copy.deepcopy(rng.choice(ODD))


def _places(value: Any) -> Iterator[Place]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def wrong_form(route: str, status: int, content: bytes) -> str:
    """What is wrong with a refusal; "": nothing. Answers and streams pass."""
    if status < 400:
        return ""
    told = json.loads(content)
    if route.startswith("/v1/messages"):
        right = told["type"] == "error" and {"type", "message"} <= told["error"].keys()
    elif route.startswith("/v1/"):
        right = told["error"].keys() == {"message", "type", "param", "code"}
    else:
        right = told.keys() == {"error", "error_type"} and isinstance(told["error"], str)
    return "" if right else f"a refusal in another dialect: {content[:200]!r}"


def throw_mutants(server: ServerProcess, seed: int, count: int) -> Attacked:
    shots = ((route, Body(f"{body[:300]!r}", body, False)) for route, body in mutants(document(server), seed, count))

    def check(findings: Findings, what: str, route: str, body: Body, answer: ThrownAnswer) -> None:
        if wrong := wrong_form(route, answer.status_code, answer.content):
            findings.wrong(f"{what}: {wrong}")
        if b'"type":"server_error"' in answer.content or b'"api_error"' in answer.content:
            findings.wrong(f"{what}: a server error in a stream, {answer.content[-300:]!r}")

    return throw(server, shots, check)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--count", type=int, default=20_000)
    arguments, flags = parser.parse_known_args()
    print(f"seed {arguments.seed}, {arguments.count} bodies")
    with SHORT.server(1, "--max-total-tokens", "256", *flags) as server:
        attacked = throw_mutants(server, arguments.seed, arguments.count)
        tracebacks = server.log().count("Traceback (most recent call last)")
    print(f"{attacked.sent} sent, statuses {attacked.statuses}, {tracebacks} tracebacks in the log")
    print("\n".join(attacked.findings[:20]))
    return 1 if attacked.failures() or tracebacks else 0


if __name__ == "__main__":
    sys.exit(main())
