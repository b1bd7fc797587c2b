"""The gate serves, or refuses with the stated reason, models whose config.json was read from public repositories.

A line of `published_configs.jsonl` leaves out only fields that say nothing about the architecture: the versions of
programs, the names of tokenizers and folders, and how weights were initialized.
"""

from collections.abc import Mapping
from typing import Any

import pytest
from model_types import NATIVE, published, standing


@pytest.mark.parametrize("line", published(), ids=lambda line: line["model"])
def test_a_published_config_is_served_or_refused_as_stated(line: Mapping[str, Any]) -> None:
    found = standing(line["config"])
    assert (found.reason or found.kind).startswith(line["outcome"]) and line["outcome"]


def test_lines_name_their_files_and_both_outcomes_occur() -> None:
    lines = published()
    assert len({(line["repository"], line["commit"], line["path"]) for line in lines}) == len(lines)
    assert all(len(line["commit"]) == 40 for line in lines)
    assert len({line["outcome"] for line in lines} - {NATIVE}) > 1
