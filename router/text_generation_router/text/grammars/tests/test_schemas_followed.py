"""300 schemas, followed by a model that knows nothing: among the tokens that a grammar allows, each is as likely.

Every text that comes to its end parses, and is valid. `make test-grammars` runs all schemas; `make test` a tenth."""

import json
import os
from pathlib import Path
from random import Random

import pytest
from llguidance import LLMatcher, LLTokenizer

from text_generation_router.text.grammars.asked import AskedGrammar, GrammarKind
from text_generation_router.text.grammars.checking_child import LIMITS
from text_generation_router.text.grammars.keywords import REFUSED
from text_generation_router.text.grammars.tests.make_schemas import UNSUPPORTED, schemas
from text_generation_router.text.grammars.tests.matching import check, problems_of

DEMO = Path(__file__).parents[5] / "server/text_generation_server/demo_model/tokenizer.json"
LINES = Path(__file__).with_name("schemas.jsonl").read_text(encoding="utf-8").splitlines()
# `make test-grammars` sets it: every schema instead of every tenth.
EVERY = 1 if os.environ.get("ALL_SCHEMAS") else 10
MAX_TOKENS, EOS = 2000, 0


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(DEMO.read_text(encoding="utf-8"), eos_token=EOS)


def numbers_of(mask: bytes) -> list[int]:
    return [8 * place + bit for place, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]


def drawn_text(tokenizer: LLTokenizer, grammar: str, random: Random) -> str | None:
    """A text of random tokens that the grammar allows; None if it has not ended after MAX_TOKENS."""
    matcher, ids = LLMatcher(tokenizer, grammar, limits=LIMITS), []
    while len(ids) < MAX_TOKENS:
        token = random.choice(numbers_of(matcher.compute_bitmask()))
        assert matcher.consume_token(token), matcher.get_error()
        if token == EOS:
            return tokenizer.decode_bytes(ids).decode()
        ids.append(token)
        if matcher.is_stopped():
            return tokenizer.decode_bytes(ids).decode()
    return None


def test_the_file_is_what_the_script_writes():
    assert [json.loads(line) for line in LINES] == schemas() and len(LINES) == 300


def test_exactly_the_schemas_with_unsupported_keywords_are_refused():
    for line in LINES:
        refusal = check(AskedGrammar("f", GrammarKind.JSON_SCHEMA, line)).refusal
        assert bool(refusal) == (json.loads(line) in UNSUPPORTED), (line, refusal)
        names = [name for name in REFUSED if f'"{name}"' in line]
        assert not refusal or not names or f"`{names[0]}`" in refusal


def test_every_text_that_ends_is_valid(tokenizer):
    ended, tried = 0, 0
    for number, line in enumerate(LINES):
        checked = check(AskedGrammar("f", GrammarKind.JSON_SCHEMA, line))
        if number % EVERY or checked.refusal:
            continue
        tried += 1
        text = drawn_text(tokenizer, checked.grammar, Random(number))
        if text is not None:
            ended += 1
            assert [*problems_of(line, text)] == [], (line, text)
    print(f"{ended} of {tried} texts have ended")
    assert ended >= tried * 250 / 288
