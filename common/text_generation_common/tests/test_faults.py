"""Faults happen at the points, passes and processes that the rules name, and nowhere without rules."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from text_generation_common import faults
from text_generation_common.faults import InjectedFault

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())


@pytest.fixture(autouse=True)
def no_rules_afterwards() -> Iterator[None]:
    yield
    faults.setup("")


def passes_that_raise(point: str, passes: int) -> list[int]:
    raised = []
    for number in range(1, passes + 1):
        try:
            faults.point(point)
        except InjectedFault:
            raised.append(number)
    return raised


@pytest.mark.parametrize(("rules", "expected"), TABLES["rules"])
def test_a_rule_acts_at_its_passes_and_in_its_processes_only(rules: str, expected: list[int]) -> None:
    faults.setup(rules, rank=1, epoch=2)
    assert passes_that_raise("shard.step", 9) == expected


@pytest.mark.parametrize("text", TABLES["not_rules"])
def test_a_text_that_is_not_a_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="FAILPOINTS"):
        faults.setup(text)


def test_a_command_without_the_testing_flag_warns_and_has_no_faults(caplog: pytest.LogCaptureFixture) -> None:
    faults.setup_command("shard.step:raise; what?", testing=False)
    assert passes_that_raise("shard.step", 3) == []
    assert [record.getMessage() for record in caplog.records] == [faults.NOT_TESTING] and "--testing" in caplog.text
    caplog.clear()
    faults.setup_command("", testing=False)
    assert not caplog.records


def test_a_command_with_the_testing_flag_reads_the_rules() -> None:
    faults.setup_command("shard.step[rank=1]:raise@2", testing=True, rank=1)
    assert passes_that_raise("shard.step", 3) == [2]
    with pytest.raises(ValueError, match="FAILPOINTS"):
        faults.setup_command("what?", testing=True)


def test_a_rule_for_a_token_counts_only_the_passes_that_work_on_it() -> None:
    faults.setup("shard.chunk[rank=1,token=17]:raise@2; shard.chunk[rank=0,token=17]:raise@1", rank=1)
    raised = []
    for number, ids in enumerate([(1, 17), (1, 2), (), (17,), (17,)], start=1):
        try:
            faults.point("shard.chunk", lambda ids=ids: ids)
        except InjectedFault:
            raised.append(number)
    assert raised == [4]
    faults.point("shard.chunk")  # A pass without tokens does not match the rule.


def test_ids_to_emit_are_read_at_each_pass_and_only_by_a_rule_for_the_point(tmp_path: Path) -> None:
    file = tmp_path / "ids"
    faults.setup(f"shard.sampled[rank=0]:emit={file}", rank=0)
    for ids in ([], [5, 3]):
        file.write_text(str(ids))
        assert faults.emitted("shard.sampled") == ids and faults.emitted("shard.step") == []
    faults.point("shard.sampled")  # Nothing else happens there.
    faults.setup(f"shard.sampled[rank=0]:emit={file}", rank=1)
    assert faults.emitted("shard.sampled") == []
    faults.setup_command(f"shard.sampled:emit={file}", testing=False)
    assert faults.emitted("shard.sampled") == []


def test_a_delay_delays() -> None:
    faults.setup("p:delay=0.05")
    started = time.monotonic()
    faults.point("p")
    assert time.monotonic() - started >= 0.05


@pytest.mark.parametrize(("action", "status"), [("kill", -signal.SIGKILL), ("exit", 1)])
def test_kill_and_exit_end_the_process_after_saying_so(action: str, status: int) -> None:
    code = f"""
import logging
from text_generation_common import faults
logging.basicConfig(level="INFO")
faults.setup("p:{action}@2")
faults.point("p")
print("once", flush=True)
faults.point("p")
print("twice", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert done.stdout == "once\n" and f"fault injected: p {action} at pass 2" in done.stderr
