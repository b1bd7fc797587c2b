"""Engines in a file, or in the files of a folder."""

from collections.abc import Collection
from pathlib import Path

import pytest

from text_generation_common.cluster.endpoints import Endpoint
from text_generation_common.errors import ArgumentValidation
from text_generation_router.fleet.engine_file import FollowedFile, endpoints_in, text_at


def test_addresses_stand_in_lines_or_with_commas_between() -> None:
    found = endpoints_in("10.0.0.3:1\n\n10.0.0.4:2, [::1]:3\n10.0.0.3:1\n")
    assert [endpoint.target for endpoint in found] == ["10.0.0.3:1", "10.0.0.4:2", "[::1]:3"]


@pytest.mark.parametrize("text", ["", "\n", "10.0.0.3", "0.0.0.0:1", "10.0.0.3:1 10.0.0.4:2"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ArgumentValidation):
        endpoints_in(text)


async def test_changes_are_told_and_what_cannot_be_understood_changes_nothing(tmp_path: Path) -> None:
    file, told = tmp_path / "engines", []

    async def connect(endpoints: Collection[Endpoint]) -> None:
        told.append([endpoint.target for endpoint in endpoints])

    following = FollowedFile(file, connect)
    for text in (None, "h:1\n", "h:1\n", "h:1,h:2", "", "no address", "h:2"):
        if text is not None:
            file.write_text(text)
        await following.look()
    file.unlink()
    await following.look()
    assert told == [["h:1"], ["h:1", "h:2"], ["h:2"]]


async def test_a_folder_has_the_addresses_of_all_its_files_but_of_unfinished_and_hidden_ones(tmp_path: Path) -> None:
    told = []

    async def connect(endpoints: Collection[Endpoint]) -> None:
        told.append([endpoint.target for endpoint in endpoints])

    following = FollowedFile(tmp_path, connect)
    await following.look()
    for name in ("1.7.partial", "1.tmp", "1~", ".nfs0001"):
        (tmp_path / name).write_text("other:1")
    (tmp_path / "folder").mkdir()
    await following.look()
    (tmp_path / "0").write_text("h:1\n")
    await following.look()
    (tmp_path / "1").write_text("h:2\n")
    await following.look()
    (tmp_path / "2").write_text("no address")
    await following.look()
    (tmp_path / "2").unlink()
    (tmp_path / "0").unlink()
    await following.look()
    (tmp_path / "1").unlink()
    await following.look()
    assert told == [["h:1"], ["h:1", "h:2"], ["h:2"]]


def test_a_file_that_vanishes_after_the_folder_was_listed_has_no_address(tmp_path: Path) -> None:
    (tmp_path / "0").symlink_to(tmp_path / "gone")
    (tmp_path / "1").write_text("h:2\n")
    assert [endpoint.target for endpoint in endpoints_in(text_at(tmp_path))] == ["h:2"]
