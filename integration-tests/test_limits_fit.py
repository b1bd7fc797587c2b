"""The limits of the launcher and of the router are consistent with each other."""

from text_generation_launcher.restarts import MOST_DEATHS
from text_generation_router.scheduling.blame import MAX_LOSSES


def test_the_launcher_survives_one_deadly_request_and_four_other_kills() -> None:
    assert MAX_LOSSES + 4 < MOST_DEATHS
