"""The gate serves, or refuses with the stated reason, models whose config.json was read from public repositories.

A line of `published_configs.jsonl` has the repository and the commit that its file was read from, or the package and
the SHA-256 of its wheel; the path in it; and the file's fields. The first seven lines leave out fields that say nothing
about the architecture: the versions of programs, the names of tokenizers and folders, and how weights were initialized.
A `.py` file quotes the fields of a config.json. `beside` holds other files of the model's folder.
"""

from collections.abc import Mapping
from typing import Any

import pytest
from model_types import FALLBACK, NATIVE, published, standing


@pytest.mark.parametrize("line", published(), ids=lambda line: line["model"])
def test_a_published_config_is_served_or_refused_as_stated(line: Mapping[str, Any]) -> None:
    found = standing(line["config"], line.get("beside"))
    assert (found.reason or found.kind).startswith(line["outcome"]) and line["outcome"]


def test_lines_name_their_files_and_all_outcomes_occur() -> None:
    lines = published()
    read = [line for line in lines if "package" not in line]
    assert all(len(line["commit"]) == 40 and line["repository"] and line["path"] for line in read) and len(read) >= 60
    assert all(len(line["sha256"]) == 64 and line["path"] for line in lines if line not in read)
    assert len({line["model"] for line in lines}) == len(lines)
    assert len({line["config"]["model_type"] for line in lines}) >= 25
    assert {NATIVE, FALLBACK} < {line["outcome"] for line in lines}
