"""Strings without quotes, as a part of a call's text: what their JSON schema allows, as a terminal of Lark."""

from collections.abc import Iterator
from typing import Any

from llguidance import regex_to_lark

from text_generation_router.text.grammars.asked import RefusedGrammarError
from text_generation_router.text.grammars.rules import ANY, literal

_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
# Leap years and the year 0 are left to the patterns that prepared schemas have for them.
_DATE = "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))"
# Each format in its usual form: every text is valid, and not every valid text is written.
_FORMATS = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_CLOCK}",
    "duration": "P([0-9]{1,4}W|[0-9]{1,4}D(T[0-9]{1,4}[HMS])?|T[0-9]{1,4}[HMS])",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,16}}){{0,2}}@{_LABEL}(\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|::1?",
    "time": _CLOCK,
    "uri": rf"[a-z][a-z0-9+.-]{{1,15}}://{_LABEL}(\.{_LABEL}){{0,4}}(:[0-9]{{1,4}})?(/[A-Za-z0-9._~+-]{{0,64}}){{0,8}}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
_SUPPORTED = frozenset(("type", "minLength", "maxLength", "pattern", "format", "allOf"))


def string_body(schema: dict[str, Any], constraining: frozenset[str]) -> str:
    """The body of a terminal: the strings that a prepared schema of the type `string` allows. `constraining`: the
    schema's keywords that limit its values. Raises RefusedGrammarError."""
    if unsupported := sorted(constraining - _SUPPORTED):
        raise RefusedGrammarError(f"the keyword `{unsupported[0]}` is not supported for a string without quotes")
    parts = [_length(schema)]
    if "pattern" in constraining:
        parts.append(searched(schema["pattern"]))
    if "format" in constraining:
        parts.append(regex(_FORMATS[schema["format"]]))
    for part in schema.get("allOf", ()):
        if not isinstance(part, dict) or part.keys() != {"pattern"}:
            raise RefusedGrammarError("the keyword `allOf` is not supported for a string without quotes")
        parts.append(searched(part["pattern"]))
    return " & ".join(f"({part})" for part in dict.fromkeys(parts)) if len(parts) > 1 else parts[0]


def regex(pattern: str) -> str:
    """A regular expression of JSON schemas that a whole text matches. It must not have anchors."""
    return f"/{regex_to_lark(f'({pattern})', 'dw')}/"


def searched(pattern: Any) -> str:
    """The body of a terminal: the texts in which a regular expression of JSON schemas is found."""
    if not isinstance(pattern, str):
        raise RefusedGrammarError("the schema's `pattern` must be a string")
    return " | ".join(f"({_branch(branch)})" for branch in _branches(pattern))


def _length(schema: dict[str, Any]) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not all(isinstance(bound, int) for bound in (least, 0 if most is None else most)):
        raise RefusedGrammarError("the schema's `minLength` and `maxLength` must be integers")
    if most is None and not least:
        return ANY
    if most is not None and most < least:
        raise RefusedGrammarError("no string has the length that the schema asks for")
    return f"/(?s:.{{{least},{'' if most is None else most}}})/"


def _branch(pattern: str) -> str:
    begins, ends = pattern.startswith("^"), _ends_with_anchor(pattern)
    inner = pattern[begins : len(pattern) - ends]
    if any(character in "^$" for character, _ in _plain(inner)):
        raise RefusedGrammarError("a `pattern` must not have anchors inside it")
    found = regex(inner) if inner else literal("")
    return f"{'' if begins else ANY} {found} {'' if ends else ANY}".strip()


def _ends_with_anchor(pattern: str) -> bool:
    return ("$", len(pattern) - 1) in _plain(pattern)


def _branches(pattern: str) -> list[str]:
    """The alternatives of a pattern, each with its own anchors."""
    cuts, depth = [-1], 0
    for character, at in _plain(pattern):
        depth += (character == "(") - (character == ")")
        if character == "|" and not depth:
            cuts.append(at)
    return [pattern[begin + 1 : end] for begin, end in zip(cuts, [*cuts[1:], len(pattern)], strict=True)]


def _plain(pattern: str) -> Iterator[tuple[str, int]]:
    """The characters of a pattern that are neither escaped nor in brackets, with their places."""
    in_brackets = is_escaped = False
    for at, character in enumerate(pattern):
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif in_brackets:
            in_brackets = character != "]"
        elif character == "[":
            in_brackets = True
        else:
            yield character, at
