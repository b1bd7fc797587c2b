"""Asks a server on the demo model, at temperature 1, for a text of each of 300 JSON schemas: `make test-grammars`.

Every text that has ended is valid, at least 250 end, and what the server does not support is refused by its name. With
`--url` the server is one that runs already."""

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
from calls import DEMO_MODEL
from server_process import ServerProcess

from text_generation_router.text.grammars.tests import make_schemas
from text_generation_router.text.grammars.tests.make_schemas import UNSUPPORTED
from text_generation_router.text.grammars.tests.matching import problems_of

SCHEMAS = Path(make_schemas.__file__).with_name("schemas.jsonl").read_text(encoding="utf-8").splitlines()
AT_ONCE, MAX_TOKENS, LEAST_ENDED, LIMIT_S = 16, 1000, 250, 300.0
PROMPT = [{"role": "user", "content": "Tell me about the fox and its friends."}]


async def outcome(client: httpx.AsyncClient, turn: asyncio.Semaphore, number: int) -> tuple[str, str]:
    """How the request for one schema ended, and what is wrong with that."""
    line = SCHEMAS[number]
    shape = {"type": "json_schema", "json_schema": {"name": "answer", "schema": json.loads(line)}}
    body = {"messages": PROMPT, "response_format": shape, "temperature": 1.0, "seed": number, "max_tokens": MAX_TOKENS}
    async with turn:
        response = await client.post("/v1/chat/completions", json=body)
    told: dict[str, Any] = response.json()
    if json.loads(line) in UNSUPPORTED:
        is_right = response.status_code == 400 and told["error"]["param"] == "response_format"
        return "refused", "" if is_right else f"an unsupported schema has status {response.status_code}: {line}"
    if response.status_code != 200:
        return "failed", f"{response.status_code} {told} for {line}"
    [choice] = told["choices"]
    if choice["finish_reason"] != "stop":
        return choice["finish_reason"], ""
    text = choice["message"]["content"]
    try:
        problems = [*problems_of(line, text)]
    except ValueError as error:
        problems = [str(error)]
    return "ended", f"{problems} in {text!r} for {line}" if problems else ""


async def outcomes(url: str) -> Sequence[tuple[str, str]]:
    turn = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
        return await asyncio.gather(*(outcome(client, turn, number) for number in range(len(SCHEMAS))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="address of a server that runs already")
    url = parser.parse_args().url
    arguments = ("--model-id", str(DEMO_MODEL), "--max-total-tokens", "2048")
    with nullcontext() if url else ServerProcess(*arguments) as server:
        found = asyncio.run(outcomes(url or server.url))
    counts = Counter(how for how, _ in found)
    wrong = [what for _, what in found if what]
    print(*wrong, sep="\n")
    print(f"{len(SCHEMAS)} schemas: {dict(counts)}, {len(wrong)} wrong")
    return int(bool(wrong) or counts["ended"] < LEAST_ENDED)


if __name__ == "__main__":
    sys.exit(main())
