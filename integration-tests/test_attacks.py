"""One tenant attacks while another is served: a few seconds of some assaults of `make attacks`, without measuring."""

import math
from collections.abc import Iterator

import make_attacks
import pytest
from assaults import ASSAULTS
from make_attacks import Attack
from server_process import LAUNCHER, ServerProcess

SECONDS, NUM_VICTIMS = 2.5, 12
ENDLESS_TEMPLATE = "template: loops without output"


@pytest.fixture(autouse=True)
def memory_that_is_kept_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_attacks, "SETTLE_S", 1.0)


@pytest.fixture(scope="module")
def target() -> Iterator[ServerProcess]:
    with make_attacks.served(ASSAULTS["/info"], LAUNCHER) as server:
        yield server


def check(outcome: Attack) -> None:
    assert not math.isinf(outcome.attacked_p99_s), "a request of the other key was refused"
    assert not math.isinf(outcome.live_worst_s) and not outcome.restarted
    assert outcome.peak_mib <= make_attacks.MEMORY_MIB
    assert sum(outcome.statuses.values()) > 0


@pytest.mark.parametrize(
    "name",
    [
        "a body of 995,000 wrong stops",
        "chats of 58,000 messages in turns",
        pytest.param("texts of 2 MB, truncated to 1", marks=pytest.mark.slow),
        pytest.param("200 requests open", marks=pytest.mark.slow),
    ],
)
def test_an_attacked_server_answers_other_tenants_and_keeps_its_memory(target: ServerProcess, name: str) -> None:
    check(make_attacks.measure_on(target, ASSAULTS[name], SECONDS, NUM_VICTIMS))


def test_a_template_that_never_ends_does_not_delay_other_requests() -> None:
    assault = ASSAULTS[ENDLESS_TEMPLATE]
    with make_attacks.served(assault, LAUNCHER) as server:
        check(make_attacks.measure_on(server, assault, SECONDS, NUM_VICTIMS))


def test_no_other_keys_text_can_be_guessed_from_cached_tokens(target: ServerProcess) -> None:
    assert make_attacks.recovered_digits(target) == 0


def test_every_assault_names_a_resource() -> None:
    assert len(ASSAULTS) >= 38
    assert all(next(assault.requests("key")) and assault.resource for assault in ASSAULTS.values())
