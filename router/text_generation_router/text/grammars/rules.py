"""Rules of llguidance's Lark dialect, which are collected while a grammar is made."""

from collections.abc import Mapping

import orjson

from text_generation_router.text.grammars.asked import RefusedGrammarError

MAX_CHARS = 2**19  # most characters of the rules for one tool
ANY = "/(?s:.*)/"


class Rules:
    """Definitions with names of their own. Equal definitions are one."""

    def __init__(self, prefix: str) -> None:
        """`prefix`: lower-case letters and digits. All names begin with it."""
        self._prefix = prefix
        self._names: dict[str, str] = {}  # by what is defined
        self._lines: list[str] = []
        self._size = 0

    def rule(self, body: str) -> str:
        """The name of a rule. Its body may refer to rules, terminals, special tokens and schemas."""
        return self._named("r", body)

    def terminal(self, body: str) -> str:
        """The name of a terminal. Its body consists of texts, regular expressions and terminals."""
        return self._named("T", body)

    def reserved(self) -> str:
        """A name for a rule that is defined later, because it refers to itself."""
        return self._name("s")

    def define(self, name: str, body: str) -> None:
        """Raises RefusedGrammarError if the definitions become too large."""
        self._lines.append(f"{name}: {body}")
        self._size += len(body)
        if self._size > MAX_CHARS:
            raise RefusedGrammarError("it is too large or complex")

    @property
    def text(self) -> str:
        return "\n".join(self._lines)

    def _named(self, kind: str, body: str) -> str:
        if (name := self._names.get(kind + body)) is None:
            self._names[kind + body] = name = self._name(kind)
            self.define(name, body)
        return name

    def _name(self, kind: str) -> str:
        name = f"{self._prefix}_{kind}{len(self._lines) + len(self._names)}"
        self._names[name] = name
        return name.upper() if kind.isupper() else name


def literal(text: str) -> str:
    """A string of Lark that has this text."""
    return orjson.dumps(text).decode()


def without(body: str, text: str) -> str:
    """The texts of a terminal's body that do not contain `text`."""
    return f"{ANY} & ({body}) & ~({ANY} {literal(text)} {ANY})"


class MarkedTexts:
    """Texts of a call's syntax as Lark has them, of which some are special tokens of the tokenizer."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        """`token_ids`: of the texts that are special tokens."""
        self._token_ids = token_ids

    def is_token(self, text: str) -> bool:
        return text in self._token_ids

    def sequence(self, *texts: str) -> str:
        """The texts one after the other. Each special token must be a text of its own."""
        parts: list[str] = []
        spelled = ""
        for text in texts:
            if text in self._token_ids:
                parts += [literal(spelled)] if spelled else []
                parts.append(f"<[{self._token_ids[text]}]>")
                spelled = ""
            else:
                spelled += text
        return " ".join(parts + ([literal(spelled)] if spelled else []))
