"""docs/models.md, from the server's tables of models and the results of their tests. Run as a script, writes it."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fallback_checkpoints import MODELS
from family_checkpoints import VARIANTS
from family_tools import ROUNDING, TOLERANCE
from model_results import PAGE as FILE
from model_results import Result, Results, read_results
from model_types import (
    FALLBACK,
    FORMS,
    NATIVE,
    REFUSED,
    TGI,
    Standing,
    further_compared,
    further_native,
    others,
    published,
    standing,
)
from test_families import LENGTHS, NEW
from test_families_in_bfloat16 import SCORE_TOLERANCE, TOKENS
from test_family_fields import MOVED

from text_generation_common.models.config import MULTIMODAL
from text_generation_common.models.families import FAMILIES

TEMPLATE = Path(__file__).with_suffix(".md")
NO_TEST = "–"
Shown = Callable[[list[Result]], str]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))


def code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


@cache
def subject(test: str, parameters: str) -> tuple[str, str]:
    """(NATIVE or FALLBACK, the model type) that a test is about. The type is empty if it is about none."""
    file = test.partition("::")[0]
    side = FALLBACK if file.startswith("test_fallback") else NATIVE
    if side == NATIVE:
        for variant in sorted(VARIANTS, key=len, reverse=True):
            if re.search(rf"(^|-){re.escape(variant)}(-|$)", parameters):
                return side, VARIANTS[variant][0]
    known = {*FAMILIES, *MULTIMODAL, *MODELS}
    named = [word for word in parameters.split("-") if word in known]
    return side, named[0] if named else "llama" if file == "test_llama" else ""


def grouped(results: Results) -> dict[tuple[str, str], list[Result]]:
    """Results by what they are about."""
    found = defaultdict(list)
    for result in results:
        found[subject(result.test, result.parameters)].append(result)
    return found


def counted(found: list[Result]) -> str:
    """How many tests passed, and what became of the others."""
    if not found:
        return "no tests"
    numbers = {
        outcome: sum(result.outcome == outcome for result in found) for outcome in ("failed", "skipped", "not run")
    }
    rest = ", ".join(f"{number} {outcome}" for outcome, number in numbers.items() if number)
    passed = len(found) - sum(numbers.values())
    return f"{passed} of {len(found)} passed: **{rest}**" if rest else f"all {passed} passed"


def cell(found: list[Result], names: str, shown: Shown = lambda passed: "passed") -> str:
    """What some tests have found. `names`: an expression for the names of the tests."""
    of_tests = [result for result in found if re.search(names, result.test)]
    passed = [result for result in of_tests if result.outcome == "passed"]
    if not of_tests:
        return NO_TEST
    if len(passed) == len(of_tests):
        return shown(passed)
    return counted(of_tests) if passed else f"**{of_tests[0].outcome}**"


def recorded(found: list[Result], name: str) -> list[Any]:
    return [result.recorded[name] for result in found if name in result.recorded]


def largest(name: str) -> Shown:
    return lambda found: f"{max(recorded(found, name)):.1e}"


def least(*names: str) -> Shown:
    return lambda found: " ".join(f"{min(recorded(found, name)):.0f}" for name in names)


def shards(found: list[Result]) -> str:
    return " ".join(map(str, sorted({size for sizes in recorded(found, "shards") for size in sizes})))


def fields(found: list[Result]) -> str:
    kinds = [kind for kind, _ in recorded(found, "field")]
    return " / ".join(str(kinds.count(kind)) for kind in ("moved", "refused", "no effect"))


NATIVE_COLUMNS: dict[str, tuple[str, Shown]] = {
    "logits": (
        "test_greedy_texts_and_logits_equal_transformers|test_texts_are_those_of_transformers",
        largest("float32"),
    ),
    "scores gates logits": ("test_scores_gates_and_logits", least("scores", "gates", "logits")),
    "beside others": ("test_other_requests_chunks_cached_prefixes", lambda _: "equal bits"),
    "bfloat16": ("test_families_in_bfloat16::", largest("bfloat16")),
    "shards": ("test_a_split_family", shards),
    "files": ("test_family_files::|test_tensors_have_|test_every_tensor", lambda _: "passed"),
    "fields": ("test_a_changed_field", fields),
    "wrong values": ("test_wrong_values", lambda found: str(sum(recorded(found, "mutants")))),
    "kill -9": ("test_families_served::", lambda _: "passed"),
}
FALLBACK_COLUMNS: dict[str, str] = {
    "texts": "test_greedy_text_and_logprobs",
    "beside others": "test_other_requests_chunks",
    "options of attention": "test_without_an_option",
    "bfloat16": "test_in_bfloat16",
    "served": "test_fallback_served::",
}


def tgi_table(results: Results) -> str:
    about, rows = grouped(results), []
    for name, raw in TGI.items():
        found = standing(raw)
        rows.append((name, f"`{raw['model_type']}`", found.kind, _tested(found, raw["model_type"], about)))
    return table(("model", "`model_type`", "here", "tests, or the reason"), rows)


def _tested(found: Standing, model_type: str, about: dict[tuple[str, str], list[Result]]) -> str:
    if found.kind == REFUSED:
        return found.reason
    inside = f"its text model, see also `{MULTIMODAL[model_type]}`: " if model_type in MULTIMODAL else ""
    return inside + counted(about.get((found.kind, model_type), []))


def further_table(results: Results) -> str:
    about = grouped(results)
    types = [(model_type, NATIVE) for model_type in further_native()]
    types += [(model_type, FALLBACK) for model_type in further_compared()]
    return table(
        ("`model_type`", "here", "tests"),
        ((f"`{name}`", kind, _tested(Standing(kind), name, about)) for name, kind in types),
    )


def others_table(found: dict[str, Standing]) -> str:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for model_type, what in found.items():
        reason = what.reason.partition(" is not supported: ")[2] or "transformers needs more than the type to read it"
        by_reason[f"refused: {reason}" if what.kind == REFUSED else "fallback, not compared: trials decide"].append(
            model_type
        )
    return table(("here", "model types"), ((what, code(types)) for what, types in sorted(by_reason.items())))


def forms_table() -> str:
    rows = ((what, f"`{raw['model_type']}`", standing(raw).reason) for what, raw in FORMS.items())
    return table(("model", "for example", "refused with"), rows)


def published_table() -> str:
    rows = ((line["model"], f"{_origin(line)} `{line['path']}`", line["outcome"]) for line in published())
    return table(("model", "file", "outcome"), rows)


def _origin(line: Mapping[str, str]) -> str:
    return f"package `{line['package']}`" if "package" in line else f"`{line['repository']}` `{line['commit'][:12]}`"


def native_table(results: Results) -> str:
    about, rows = grouped(results), []
    for model_type in sorted(FAMILIES):
        found = about.get((NATIVE, model_type), [])
        variants = sum(family == model_type for family, _ in VARIANTS.values())
        rows.append([f"`{model_type}`", str(variants), *(cell(found, *column) for column in NATIVE_COLUMNS.values())])
    return table(("`model_type`", "variants", *NATIVE_COLUMNS), rows)


def fallback_table(results: Results) -> str:
    about = grouped(results)
    rows = (
        [
            f"`{model_type}`",
            *(cell(about.get((FALLBACK, model_type), []), names) for names in FALLBACK_COLUMNS.values()),
        ]
        for model_type in sorted(MODELS)
    )
    return table(("`model_type`", *FALLBACK_COLUMNS), rows)


def fields_table(results: Results) -> str:
    by_end: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for result in results:
        if result.test.endswith("::test_a_changed_field_moves_the_logits_or_is_refused"):
            model_type, _, name = result.parameters.partition("-")
            kind, detail = result.recorded.get("field", (f"**{result.outcome}**", ""))
            by_end[name, kind, "" if kind == "moved" else detail].append(
                f"{model_type} {detail}" if kind == "moved" else model_type
            )
    rows = ([f"`{name}`", kind, why, ", ".join(types)] for (name, kind, why), types in sorted(by_end.items()))
    return table(("field", "change", "how, or why", "families"), rows)


def not_passed(results: Results) -> str:
    """Every test that failed or was skipped by name, and numbers of those that did not run."""
    lines, waiting = [], defaultdict(int)
    for result in results:
        if result.outcome == "not run":
            waiting[result.test] += 1
        elif result.outcome != "passed":
            lines.append(f"- {result.ended}: `{result.test}[{result.parameters}]`\n")
    lines += [f"- not run: {number} of `{test}`\n" for test, number in waiting.items()]
    return "".join(lines) or "None.\n"


def page(results: Results, other_types: dict[str, Standing]) -> str:
    runs = sorted(results.runs.items())
    return (
        TEMPLATE.read_text().rstrip().format(
            tests=counted(list(results)), runs="".join(f"- {run}: {len(found)} tests\n" for run, found in runs),
            tgi=tgi_table(results), further=further_table(results), multimodal=code(sorted(MULTIMODAL)),
            others=others_table(other_types), forms=forms_table(), native=native_table(results),
            published=published_table(),
            fallback=fallback_table(results), fields=fields_table(results), not_passed=not_passed(results),
            new=NEW, lengths=", ".join(map(str, LENGTHS)), tolerance=TOLERANCE, tokens=TOKENS, score=SCORE_TOLERANCE,
            rounding=ROUNDING, moved=MOVED / ROUNDING, dash=NO_TEST,
        )
    )  # fmt: skip


if __name__ == "__main__":
    FILE.write_text(page(read_results(), others()))
