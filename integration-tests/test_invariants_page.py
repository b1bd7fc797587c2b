"""The code and the tests that docs/invariants.md names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def test_what_the_page_of_invariants_names_exists():
    named = NAMED.findall((ROOT / "docs/invariants.md").read_text())
    assert len(named) > 80
    for path, name in named:
        file = ROOT / path if path.startswith("server/") else ROOT / "router/text_generation_router" / path
        assert re.search(rf"\b(?:def|class) {name}\b", file.read_text()), f"{path} has no {name}"
