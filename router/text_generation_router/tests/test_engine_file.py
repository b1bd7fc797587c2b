"""Engines in a file."""

import asyncio
from collections.abc import Collection
from pathlib import Path

import pytest

from text_generation_common.cluster.endpoints import Endpoint
from text_generation_common.errors import ArgumentValidation
from text_generation_router.engine_file import FollowedFile, endpoints_in


def test_addresses_stand_in_lines_or_with_commas_between() -> None:
    found = endpoints_in("10.0.0.3:1\n\n10.0.0.4:2, [::1]:3\n10.0.0.3:1\n")
    assert [endpoint.target for endpoint in found] == ["10.0.0.3:1", "10.0.0.4:2", "[::1]:3"]


@pytest.mark.parametrize("text", ["", "\n", "10.0.0.3", "0.0.0.0:1", "10.0.0.3:1 10.0.0.4:2"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ArgumentValidation):
        endpoints_in(text)


def test_changes_are_told_and_what_cannot_be_understood_changes_nothing(tmp_path: Path) -> None:
    file, told = tmp_path / "engines", []

    async def connect(endpoints: Collection[Endpoint]) -> None:
        told.append([endpoint.target for endpoint in endpoints])

    async def scenario() -> None:
        following = FollowedFile(file, connect)
        for text in (None, "h:1\n", "h:1\n", "h:1,h:2", "", "no address", "h:2"):
            if text is not None:
                file.write_text(text)
            await following.look()
        file.unlink()
        await following.look()

    asyncio.run(scenario())
    assert told == [["h:1"], ["h:1", "h:2"], ["h:2"]]
