"""One tenant attacks, another one is served: a few seconds of some assaults of `make attacks`, without its times."""

import math

import make_attacks
import pytest
from assaults import ASSAULTS
from server_process import LAUNCHER


@pytest.mark.parametrize(
    "name",
    [
        "a body of 995,000 wrong stops",
        "chats of 58,000 messages in turns",
        "texts of 2 MB, truncated to 1",
        "200 requests open",
        "template: loops without output",
    ],
)
def test_an_attacked_server_answers_everybody_else_and_keeps_its_memory(name: str) -> None:
    outcome = make_attacks.measure(ASSAULTS[name], LAUNCHER, seconds=4.0, victims=12)
    assert not math.isinf(outcome.attacked_p99_s), "a request of the other key was refused"
    assert not math.isinf(outcome.live_worst_s) and not outcome.restarted
    assert outcome.peak_mib <= make_attacks.MEMORY_MIB
    assert sum(outcome.statuses.values()) > 0


def test_no_other_keys_text_can_be_guessed_from_cached_tokens() -> None:
    assert make_attacks.recovered_digits(LAUNCHER) == 0


def test_every_assault_has_its_own_name_and_resource() -> None:
    assert len(ASSAULTS) >= 38
    assert all(next(assault.requests("key")) and assault.resource for assault in ASSAULTS.values())
