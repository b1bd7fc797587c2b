"""Holds grammars to the JSON-Schema-Test-Suite: what the standard calls valid can be written, what it calls invalid
cannot. Writes every difference into a file, or compares with it. The suite is in the source package of `jsonschema`.

python -m text_generation_router.text.grammars.tests.standard_suite SUITE standard_suite.tsv [--write]"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from text_generation_router.text.grammars.asked import AskedGrammar, GrammarKind
from text_generation_router.text.grammars.tests.matching import check, matches

DRAFT = "draft2020-12"


class Case(NamedTuple):
    """One value of the suite that grammars treat otherwise."""

    keyword: str  # the suite's file
    group: str
    test: str
    difference: str


def cases_of(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas with their values, each with its keyword or, of optional tests, its format."""
    paths = sorted((folder / DRAFT).glob("*.json")), sorted((folder / DRAFT / "optional/format").glob("*.json"))
    for path in (*paths[0], *paths[1]):
        for group in json.loads(path.read_text(encoding="utf-8")):
            yield path.stem if path in paths[0] else f"format {path.stem}", group


def compared(folder: Path) -> tuple[list[Case], Counter[str], Counter[str]]:
    """The differences; by keyword, the number of values that are treated as the standard says, and of groups that are
    refused."""
    differences: list[Case] = []
    same: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for keyword, group in cases_of(folder):
        checked = check(AskedGrammar("f", GrammarKind.JSON_SCHEMA, json.dumps(group["schema"])))
        if checked.refusal:
            refused[keyword] += 1
            continue
        for test in group["tests"]:
            text = json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False)
            if matches(checked.grammar, text) == test["valid"]:
                same[keyword] += 1
            else:
                difference = "valid, not written" if test["valid"] else "not valid, written"
                differences.append(Case(keyword, group["description"], test["description"], difference))
    return differences, same, refused


def main(folder: Path, file: Path, writes: bool) -> int:
    differences, same, refused = compared(folder)
    found = "".join("\t".join(case) + "\n" for case in differences)
    counts = Counter((case.keyword, case.difference) for case in differences)
    print("| keyword | as the standard says | valid, not written | not valid, written | refused schemas |")
    print("|---|---|---|---|---|")
    for keyword in sorted({*same, *refused, *(case.keyword for case in differences)}):
        narrow, wide = counts[keyword, "valid, not written"], counts[keyword, "not valid, written"]
        print(f"| `{keyword}` | {same[keyword]} | {narrow} | {wide} | {refused[keyword]} |")
    print(f"{same.total()} as the standard says, {len(differences)} otherwise, {refused.total()} schemas refused")
    if writes:
        file.write_text(found, encoding="utf-8")
    elif found != file.read_text(encoding="utf-8"):
        print(f"the differences are not those of {file}: write it anew with --write, and look at what has changed")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), "--write" in sys.argv))
