"""README.md and docs/: short pages whose links lead somewhere, and what is missing is missing."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from manifests import REPOSITORY
from pages import PAGES
from server_process import ServerProcess

from text_generation_common.flags.declaration import Flag
from text_generation_common.flags.programs import LAUNCHER
from text_generation_launcher.config import LauncherConfig

DOCS = REPOSITORY / "docs"
README = REPOSITORY / "README.md"
OTHERS = [REPOSITORY / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")]
FOLDERS = [REPOSITORY / folder / "README.md" for folder in ("benchmark", "integration-tests", "clients/python")]
SHORT = ("from-tgi", "laptop", "docker", "troubleshooting")
LINK = re.compile(r"(?<!!)\[[^]]*\]\(([^)\s]+)\)")


def words(page: Path, with_tables: bool) -> int:
    return sum(len(line.split()) for line in page.read_text().splitlines() if with_tables or not line.startswith("|"))


def test_the_readme_has_900_words_and_architecture_300_lines() -> None:
    assert words(README, with_tables=True) <= 900
    assert len((REPOSITORY / "ARCHITECTURE.md").read_text().splitlines()) <= 300


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_has_2500_words_beside_its_tables_and_a_first_page_900(page: Path) -> None:
    assert words(page, with_tables=False) <= (900 if page.stem in SHORT else 2500)


def test_the_index_has_every_page() -> None:
    index = DOCS / "README.md"
    assert {page.name for page in DOCS.glob("*.md")} - {index.name} <= set(LINK.findall(index.read_text()))


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *OTHERS, *FOLDERS], ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        if path.startswith(("https://", "http://")):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def flag(name: str) -> Flag:
    return next(each for each in LAUNCHER.flags_of(LauncherConfig) if each.name == name)


def sees_no_images(url: str) -> bool:
    content = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    body = {"messages": [{"role": "user", "content": content}]}
    return "is not supported" in httpx.post(f"{url}/v1/chat/completions", json=body).text


# What is missing, by its row of the table in the README, and what shows that it is still missing.
MISSING: dict[str, Callable[[str], bool]] = {
    "NVIDIA GPUs": lambda _: "**No GPU has run this code yet.**" in (DOCS / "gpu.md").read_text(),
    "images": sees_no_images,
    "speculation": lambda _: flag("speculate").refused_except is not None,
    "one copy of a model over several machines": lambda _: flag("master_addr").no_effect is not None,
}


def compared() -> Iterator[tuple[str, str]]:
    for line in README.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 7:
            yield cells[0], cells[1]


def test_what_the_readme_says_is_missing_is_missing(server: ServerProcess) -> None:
    absent = {row for row, here in compared() if here.startswith("✗")}
    assert absent == MISSING.keys()
    for row in absent:
        assert MISSING[row](server.url), f"{row}: no longer missing, so the README's table is out of date"
