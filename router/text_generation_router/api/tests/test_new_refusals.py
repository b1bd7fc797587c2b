"""Every rule of the tables of /v1/messages and /v1/responses: what it refuses is refused by its name, and what changes
nothing is taken."""

import pytest

from text_generation_router.api.anthropic import fields as anthropic_fields
from text_generation_router.api.common.contract import Refused, Renamed
from text_generation_router.api.responses import fields as responses_fields
from text_generation_router.api.tests.conftest import ROUTES

BY_PATH = {route.path: route for route in ROUTES}
CONTRACTS = {"/v1/messages": anthropic_fields.MESSAGES, "/v1/responses": responses_fields.RESPONSES}
OTHER = {"something": "else"}  # no field has this as a neutral value


@pytest.mark.parametrize("path", CONTRACTS)
def test_what_changes_the_answer_is_refused_by_its_name(session_server, path):
    rules = {name: rule for name, rule in CONTRACTS[path].rules.items() if isinstance(rule, Refused | Renamed)}
    assert len(rules) > 80
    for name in rules:
        answer = session_server.post(path, BY_PATH[path].body | {name: OTHER})
        assert answer.status == 400, name
        assert answer.json["error"]["message"].startswith(f"Input validation error: `{name}` "), name


@pytest.mark.parametrize("path", CONTRACTS)
def test_what_changes_nothing_is_taken(session_server, path):
    for name, rule in CONTRACTS[path].rules.items():
        values = (None, *rule.neutral) if isinstance(rule, Refused | Renamed) else (None, OTHER)
        for value in values:
            answer = session_server.post(path, BY_PATH[path].body | {name: value})
            assert (answer.status, answer.headers.get("x-ignored-parameters")) == (200, None), (name, value)


NESTED = [
    ("/v1/messages", {"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "tools[0].defer_loading"),
    ("/v1/messages", {"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
    ("/v1/responses", {"tools": [{"type": "function", "name": "f", "async": True}]}, "tools[0].async"),
    ("/v1/responses", {"reasoning": {"mode": "pro"}}, "reasoning.mode"),
]


@pytest.mark.parametrize(("path", "fields", "name"), NESTED)
def test_a_field_within_another_is_refused_by_its_place(session_server, path, fields, name):
    answer = session_server.post(path, BY_PATH[path].body | fields)
    assert answer.status == 400 and f"`{name}` is not supported" in answer.json["error"]["message"]
