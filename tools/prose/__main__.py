"""Refuses wordings that a stranger cannot understand (`patterns.toml`), in the files and folders named, or in all.

With --sample, prints comments and docstrings drawn at random instead, without their code: a stranger should understand
each of them.
"""

import argparse
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from prose.check import PATTERNS, Checker, ProseFinding
from prose.texts import COMMENT, DOCSTRING, TRAILING, ProseText, texts_of

ROOT = Path(__file__).parent.parent.parent
LISTED = ("-z", "--cached", "--others", "--exclude-standard")


def main() -> int:
    options = _options()
    texts = {name: texts_of(ROOT / name) for name in files(options.paths)}
    if options.sample:
        seed = options.seed or _git("rev-parse", "HEAD").strip()
        print(f"seed {seed}")
        for name, text in sample(texts, options.sample, seed):
            print(f"\n{name}:{text.line} ({text.kind})")
            print("\n".join(f"    {line.strip()}" for _, line in text.lines).rstrip())
        return 0
    checker = Checker.from_file()
    findings = [finding for name, found in texts.items() for finding in checker.findings(name, found)]
    if options.counts:
        print(table(findings))
        return 0
    for finding in findings:
        print(finding)
    unused = checker.unused(set(texts))
    for entry in unused:
        print(f"{PATTERNS.name}: {entry.text!r} is allowed in {entry.path}, and is not there: remove the entry")
    return 1 if findings or unused else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m prose", description=__doc__)
    parser.add_argument(
        "paths", nargs="*", help="files and folders, relative to the repository; all when none is given"
    )
    parser.add_argument("--counts", action="store_true", help="print how often each pattern is found in each package")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="print N comments and docstrings to read")
    parser.add_argument("--seed", default="", help="which ones --sample draws; the hash of the commit when not given")
    return parser.parse_args()


def files(paths: Sequence[str]) -> list[str]:
    """Names of the files below `paths` that are under version control or could be added to it: git does not ignore
    them.
    """
    listed = _git("ls-files", *LISTED, "--", *paths)
    return sorted({name for name in listed.split("\0") if name and (ROOT / name).is_file()})


def sample(texts: dict[str, list[ProseText]], count: int, seed: str) -> list[tuple[str, ProseText]]:
    """Draws `count` comments and docstrings, in the order of the files. One seed always draws the same ones."""
    readable = [(name, text) for name, found in texts.items() for text in found if _is_to_read(text)]
    drawn = random.Random(seed).sample(range(len(readable)), min(count, len(readable)))
    return [readable[i] for i in sorted(drawn)]


def _is_to_read(text: ProseText) -> bool:
    return text.kind in (DOCSTRING, COMMENT, TRAILING) and len(text.joined.split()) > 1


def table(findings: Sequence[ProseFinding]) -> str:
    """The number of findings for each pattern and package, as a Markdown table."""
    counts = Counter((finding.pattern.name, _package(finding.path)) for finding in findings)
    patterns, packages = sorted({name for name, _ in counts}), sorted({package for _, package in counts})
    rows = [["pattern", *packages, "all"], ["---"] * (len(packages) + 2)]
    for pattern in patterns:
        cells = [counts[pattern, package] for package in packages]
        rows.append([pattern, *map(str, cells), str(sum(cells))])
    totals = [sum(counts[pattern, package] for pattern in patterns) for package in packages]
    rows.append(["all", *map(str, totals), str(sum(totals))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _package(path: str) -> str:
    return path.split("/")[0] if "/" in path else "(root)"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
