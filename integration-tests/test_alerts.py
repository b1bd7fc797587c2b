"""monitoring/alerts.yaml: each rule asks for metrics that exist, and fires when it should and not before."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from board import MONITORING, names_of, series_of

FILE = MONITORING / "alerts.yaml"
GOLDEN = MONITORING.parent / "router/text_generation_router/metrics/tests/metrics.golden"
[GROUP] = yaml.safe_load(FILE.read_text())["groups"]
RULES = {rule["alert"]: rule for rule in GROUP["rules"]}
PROMTOOL = shutil.which("promtool")
WORDS = {"max", "or", "absent"}
ERRORS = ("overloaded", "validation", "template", "generation", "incomplete", "dropped", "deadline")


@dataclass(frozen=True, slots=True)
class Case:
    """Values of series once a minute, in promtool's words: 0+1x60 begins at 0 and grows by 1 each minute. While `calm`,
    the rule is silent."""

    calm: dict[str, str]
    alarming: dict[str, str]


def failures(**per_minute: int) -> dict[str, str]:
    each = {f'tgi_request_failure{{err="{name}"}}': f"0+{per_minute.get(name, 0)}x60" for name in ERRORS}
    return {"tgi_request_count": "0+100x60", **each}


def first_tokens(buckets: dict[str, int]) -> dict[str, str]:
    name = "tgi_request_time_to_first_token_duration_bucket"
    return {f'{name}{{le="{le}"}}': f"0+{count}x60" for le, count in buckets.items()}


def queue(seconds: int) -> dict[str, str]:
    each = {f'tgi_queue_wait_seconds{{reason="{reason}"}}': f"0+{seconds}x60" for reason in ("rows", "turn")}
    return each | {f'tgi_queue_waits{{reason="{reason}"}}': "0+2x60" for reason in ("rows", "turn")}


CASES = {
    "TgiNoReadyEngine": Case({"tgi_shards_ready": "1x60"}, {"tgi_shards_ready": "1x10 0x50"}),
    "TgiShardsLost": Case({"tgi_shard_losses": "0x40 1x20"}, {"tgi_shard_losses": "0x40 1 2 3 4 5x20"}),
    "TgiRequestsRefused": Case(failures(overloaded=3, validation=50), failures(overloaded=10)),
    "TgiRequestsFail": Case(failures(deadline=50, dropped=50), failures(generation=2, incomplete=2)),
    "TgiQueueWaitLong": Case(queue(2), queue(60)),
    "TgiSlotsFull": Case(
        {"tgi_slots_used": "700x60", "tgi_batch_max_total_tokens": "1000x60"},
        {"tgi_slots_used": "990x60", "tgi_batch_max_total_tokens": "1000x60"},
    ),
    "TgiFirstTokenLate": Case(
        first_tokens({"1": 999, "20": 1000, "+Inf": 1000}), first_tokens({"1": 900, "20": 1000, "+Inf": 1000})
    ),
    "TgiBooksErrors": Case({"tgi_books_errors": "0x60"}, {"tgi_books_errors": "0x50 1x10"}),
}


def test_every_rule_is_named_once_and_says_what_is_wrong_and_what_to_do() -> None:
    assert len(GROUP["rules"]) == len(RULES) == 8 and RULES.keys() == CASES.keys()
    for rule in RULES.values():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert all(rule["annotations"][part].endswith(".") for part in ("summary", "description"))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_asks_for_metrics_and_label_values_of_the_servers_page(rule: dict[str, Any]) -> None:
    series = series_of(GOLDEN.read_text())
    asked = names_of(rule["expr"]) - WORDS
    assert asked and asked <= set(series)
    for name, label, values in re.findall(r'(\w+)\{(\w+)=~?"([^"]*)"\}', rule["expr"]):
        assert set(values.split("|")) <= series[name][label]


@pytest.mark.parametrize("name", CASES)
def test_promtool_sees_a_rule_fire_when_it_should_and_not_before(name: str, tmp_path: Any) -> None:
    if PROMTOOL is None:
        pytest.skip("needs promtool on the PATH: `apt-get install prometheus`, then run this test again")
    case = CASES[name]
    (tmp_path / "test.yaml").write_text(
        yaml.safe_dump(
            {"rule_files": [str(FILE)], "tests": [case_of(name, case.calm, 0), case_of(name, case.alarming, 1)]}
        )
    )
    subprocess.run([PROMTOOL, "check", "rules", str(FILE)], check=True)
    subprocess.run([PROMTOOL, "test", "rules", str(tmp_path / "test.yaml")], check=True)


def case_of(name: str, values: dict[str, str], count: int) -> dict[str, Any]:
    """A test of promtool: after an hour of `values` of one server, the rule has fired if the count is 1."""
    target = 'job="tgi", instance="one:80"'
    series = [
        {"series": each[:-1] + f", {target}}}" if each.endswith("}") else f"{each}{{{target}}}", "values": numbers}
        for each, numbers in values.items()
    ]
    asked = {"expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)', "eval_time": "60m"}
    return {"interval": "1m", "input_series": series, "promql_expr_test": [asked | {"exp_samples": [sample(count)]}]}


def sample(count: int) -> dict[str, Any]:
    return {"labels": "{}", "value": count}
