"""The table knows every field of the peers' APIs. `field_names.json` has the fields of OpenAI's client (TypedDicts),
of Anthropic's (the same, those of its beta API too), of vLLM's request classes and of TGI's openapi.json, each with its
version."""

import json
from pathlib import Path

import pytest

from text_generation_router.api.anthropic import fields as anthropic_fields
from text_generation_router.api.anthropic.schemas import BLOCKS, OTHER_BLOCKS
from text_generation_router.api.common.contract import Contract, Refused, Renamed, Tolerated
from text_generation_router.api.common.known_fields import PLACES, TABLE
from text_generation_router.api.field_docs import page
from text_generation_router.api.openai import fields as openai_fields
from text_generation_router.api.responses import fields as responses_fields
from text_generation_router.api.responses.schemas import ITEMS, OTHER_ITEMS
from text_generation_router.api.tgi import fields as tgi_fields

CONTRACTS: dict[str, Contract] = {
    "chat": openai_fields.CHAT,
    "completion": openai_fields.COMPLETION,
    "parameters": tgi_fields.PARAMETERS,
    "stream_options": openai_fields.STREAM_OPTIONS,
    "responses": responses_fields.RESPONSES,
    "responses tool": responses_fields.TOOLS["function"],
    "tool": anthropic_fields.TOOL,
    "output_config": anthropic_fields.OUTPUT_CONFIG,
    "thinking": anthropic_fields.THINKING,
    "tool_choice": anthropic_fields.TOOL_CHOICE,
    "responses text": responses_fields.TEXT,
    "responses reasoning": responses_fields.REASONING,
    "responses stream_options": openai_fields.STREAM_OPTIONS,
    **{f"responses item {kind}": contract for kind, contract in responses_fields.ITEMS.items()},
    "messages": anthropic_fields.MESSAGES,
    "count_tokens": anthropic_fields.COUNT_TOKENS,
    **{f"block {kind}": contract for kind, contract in anthropic_fields.BLOCKS.items()},
}
OTHERS = (tgi_fields.GENERATE, tgi_fields.TOKENIZE, openai_fields.MESSAGE, openai_fields.TOOL, openai_fields.FUNCTION)
NAMES = json.loads((Path(__file__).parent / "field_names.json").read_text())


@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize("kind", CONTRACTS)
def test_every_field_of_a_peer_is_in_the_table(source, kind):
    assert set(NAMES[source].get(kind, ())) <= CONTRACTS[kind].known


def test_every_kind_of_block_is_known():
    (version,) = (source for source in NAMES if source.startswith("anthropic"))
    assert set(NAMES[version]["block kinds"]) == {*BLOCKS} | OTHER_BLOCKS and not {*BLOCKS} & OTHER_BLOCKS
    assert {*BLOCKS} == anthropic_fields.BLOCKS.keys()


def test_every_kind_of_item_is_known():
    (version,) = (source for source in NAMES if source.startswith("openai"))
    assert set(NAMES[version]["responses item kinds"]) == {*ITEMS} | OTHER_ITEMS and not {*ITEMS} & OTHER_ITEMS
    assert {*ITEMS} == responses_fields.ITEMS.keys()


def test_a_renamed_field_names_one_that_the_route_has():
    for kind, contract in CONTRACTS.items():
        for name, rule in contract.rules.items():
            # The field that a rule names may itself be unsupported here: it then has a rule of its own.
            assert not isinstance(rule, Renamed) or rule.here in contract.known, (kind, name)


def test_a_field_has_one_meaning_in_a_place():
    meanings = [(name, place) for names, places, _ in TABLE for place in places.split() for name in names.split()]
    assert len(set(meanings)) == len(meanings) and {place for _, place in meanings} == set(PLACES.split())


def test_every_row_counts_for_each_of_its_names():
    in_force = {
        (name, id(rule)) for contract in (*CONTRACTS.values(), *OTHERS) for name, rule in contract.rules.items()
    }
    assert {(name, id(rule)) for names, _, rule in TABLE for name in names.split()} <= in_force


def test_every_rule_says_why():
    for contract in CONTRACTS.values():
        for name, rule in contract.rules.items():
            if isinstance(rule, Refused | Tolerated):
                assert rule.why and not rule.why.endswith("."), name


def test_the_page_of_all_fields_is_what_the_tables_say():
    path = Path(__file__).parents[4] / "docs" / "fields.md"
    assert path.read_text(encoding="utf-8") == page(), f"write {path.name} again, as field_docs.py says"
