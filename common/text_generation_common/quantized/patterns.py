"""Names of modules that a checkpoint's settings select, by exact names, by parts of names or by regular expressions.

A stranger has written the expressions. They are matched by an engine without backtracking (Rust's, in pydantic), whose
time grows with the length of expression and name only. Counted repetitions, whose automata may be large, are refused.
"""

import re
from collections.abc import Callable, Iterable

from text_generation_common.errors import WeightsError

Names = Callable[[str], bool]  # whether the name of a module is one of these

MAX_CHARS = 65_536  # characters of all expressions of a checkpoint
PLAIN = re.compile(r"[\w.-]+", re.ASCII)
AHEAD = "(?!"


def any_of(parts: Iterable[Names]) -> Names:
    listed = tuple(parts)
    return lambda name: any(part(name) for part in listed)


def exactly(names: Iterable[str]) -> Names:
    return frozenset(names).__contains__


def within_modules(names: Iterable[str]) -> Names:
    """Modules with these names and all modules inside them, and names with these ends, as transformers compares
    modules_to_not_convert."""
    ends, starts = tuple(names), tuple(f"{name.rstrip('.')}." for name in names)
    return lambda name: name.endswith(ends) or f"{name}.".startswith(starts)


class Compiler:
    """Makes the names of one checkpoint, and bounds their expressions together."""

    def __init__(self, where: str) -> None:
        self._where = where  # the file, for messages
        self._chars = 0

    def expression(self, text: str, *, anywhere: bool = False) -> Names:
        """Names whose beginning matches a regular expression; with `anywhere` names that have such a part."""
        self._chars += len(text)
        if self._chars > MAX_CHARS:
            raise WeightsError(
                f"{self._where}: the patterns of module names have more than {MAX_CHARS} characters: shorten them"
            )
        if anywhere:
            return self._automaton(text)
        excluded, wanted = _without_lookahead(text)
        names, others = self._automaton(f"^(?:{wanted})"), self._automaton(f"^(?:{excluded})") if excluded else None
        return names if others is None else lambda name: names(name) and not others(name)

    def targets(self, texts: Iterable[str]) -> Names:
        """Exact names, and expressions after `re:`, as compressed-tensors has them."""
        return any_of([exactly(texts), *(self.expression(text[3:]) for text in texts if text.startswith("re:"))])

    def modules(self, texts: Iterable[str]) -> Names:
        """Names of modules, which transformers reads as expressions, too."""
        expressions = [text for text in texts if not PLAIN.fullmatch(text)]
        plain = within_modules([text for text in texts if PLAIN.fullmatch(text)])
        return any_of([plain, *(self.expression(rf"(?:{text})(?:\.|$)") for text in expressions)])

    def wildcards(self, texts: Iterable[str]) -> Names:
        """Names of modules in which * stands for any characters, as in ModelOpt's exclude_modules."""
        found = [".*".join(map(re.escape, text.split("*"))) for text in texts]
        return any_of(self.expression(rf"(?:{text})(?:\.|$)") for text in found)

    def _automaton(self, text: str) -> Names:
        from pydantic_core import SchemaError, SchemaValidator, core_schema  # here, because the import takes 50 ms

        try:
            if re.search(r"(?<!\\)\{", text):
                raise ValueError("counted repetitions are not supported")
            return SchemaValidator(core_schema.str_schema(pattern=text, regex_engine="rust-regex")).isinstance_python
        except (SchemaError, ValueError) as error:
            why = str(error).strip().splitlines()[-1].strip().removeprefix("error: ")
            raise WeightsError(f"{self._where}: the pattern {text[:80]!a} cannot be used ({why}): change it") from None


def _without_lookahead(expression: str) -> tuple[str, str]:
    """Splits an expression that begins with a negative lookahead, which the engine does not have: names that must not
    match, and the rest."""
    body = expression.removeprefix("^")
    depth, is_class = 0, False
    for found in re.finditer(r"\\.|[()\[\]]", body if body.startswith(AHEAD) else ""):
        is_class = found[0] == "[" or (is_class and found[0] != "]")
        depth += 0 if is_class else {"(": 1, ")": -1}.get(found[0], 0)
        if not depth:
            return body[len(AHEAD) : found.start()], body[found.end() :]
    return "", expression
