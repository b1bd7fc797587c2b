"""Finds the prose of a source file: comments, docstrings, string literals, names of tests, and Markdown."""

import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

DOCSTRING, COMMENT, TRAILING, STRING, NAME, MARKDOWN = "docstring", "comment", "trailing", "string", "name", "markdown"
# Two trailing comments on consecutive lines, joined with LINE_END between them.
PAIR = "pair"
LINE_END = "⏎ "

# Inserted between two paragraphs of one text, so that no pattern matches across their border.
BORDER = " ¶ "
# Least number of words: a shorter string literal is a name, a key or a format.
LEAST_WORDS = 3
# A comment that is an instruction for a tool, or a line of dashes.
PRAGMA = re.compile(r"(?:fmt|type|ruff|pragma|mypy): |noqa|-{3}")
# A string literal with a line that matches this pattern is a program, not prose.
PROGRAM = re.compile(r"\s*(?:import \w|from \w+ import|def \w+\()")
# Code inside a text is not prose.
CODE = re.compile(r"`[^`]*`")
FIELD = re.compile(r"\{[^{}]*\}")

LITERAL = re.compile(r"""([a-zA-Z]*)("{3}|'{3}|"|')(.*)\2""", re.DOTALL)
SLASHES = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
HASHES = re.compile(r'"(?:\\.|[^"\\\n])*"|(?<!\S)#[^\n]*')
FENCE = re.compile(r"\s*(```|~~~)")
NEW_PARAGRAPH = re.compile(r"\s*([-*+|#>]|\d+\.)")


@dataclass(frozen=True, slots=True)
class ProseText:
    """One comment, docstring, literal, name or paragraph: its lines, each with its number in the file."""

    kind: str
    lines: tuple[tuple[int, str], ...]

    @property
    def line(self) -> int:
        return self.lines[0][0]

    @property
    def joined(self) -> str:
        return "".join(piece for _, piece in self._pieces())

    def line_at(self, offset: int) -> int:
        """The line number, in the file, of the character at `offset` of `joined`."""
        end = 0
        for number, piece in self._pieces():
            end += len(piece)
            if offset < end:
                return number
        return self.lines[-1][0]

    def _pieces(self) -> Iterator[tuple[int, str]]:
        for number, line in self.lines:
            words = CODE.sub("`…`", line.strip())
            yield number, f"{words} " if words else BORDER


def texts_of(path: Path) -> list[ProseText]:
    """The texts of a file, in order. A file of another type than the supported ones has none."""
    if not _holds_prose(path):
        return []
    source = path.read_text()
    match path.suffix:
        case ".py":
            found = list(_of_python(source))
        case ".md":
            found = list(_of_markdown(source))
        case ".c" | ".h" | ".proto":
            found = list(_of_code(source, SLASHES))
        case _:
            found = list(_of_code(source, HASHES))
    return sorted([*found, *_pairs(found)], key=lambda text: text.line)


def _holds_prose(path: Path) -> bool:
    suffixes = (".py", ".md", ".c", ".h", ".proto", ".toml", ".yml", ".sh", ".in")
    return path.suffix in suffixes or path.name == "Makefile" or path.parent.name == ".ci"


def _pairs(texts: Sequence[ProseText]) -> Iterator[ProseText]:
    for first, second in pairwise(sorted((t for t in texts if t.kind == TRAILING), key=lambda text: text.line)):
        if second.line == first.line + 1:
            yield ProseText(PAIR, (*first.lines, (second.line, LINE_END + second.lines[0][1])))


def _of_python(source: str) -> Iterator[ProseText]:
    comments: list[ProseText] = []
    literal: list[tuple[int, str]] = []  # the lines of adjacent string tokens, which are one string
    begins_statement = is_docstring = True
    before = ""
    for token in _without_fields(tokenize.generate_tokens(io.StringIO(source).readline)):
        name, first_line = tokenize.tok_name[token.type], token.start[0]
        if name == "COMMENT":
            kind = TRAILING if token.line[: token.start[1]].strip() else COMMENT
            if not PRAGMA.match(words := _uncommented(token.string)):
                comments.append(ProseText(kind, ((first_line, words),)))
        elif name == "STRING":
            is_docstring = is_docstring if literal else begins_statement
            literal += _numbered(first_line, token.string)
        elif name != "NL":
            yield from _literal(literal, is_docstring and name == "NEWLINE")
            if before == "def" and token.string.startswith("test_"):
                yield ProseText(NAME, ((first_line, token.string.replace("_", " ")),))
            literal, before = [], token.string
            begins_statement = name in ("NEWLINE", "INDENT", "DEDENT")
    yield from _blocks(comments)


def _without_fields(tokens: Iterable[tokenize.TokenInfo]) -> Iterator[tokenize.TokenInfo]:
    """The same tokens, except that a string has no prefix and no quotes, and each field of an f-string is replaced by
    `{}`.
    """
    parts: list[
        tokenize.TokenInfo
    ] = []  # From Python 3.12 on, an f-string is several tokens, which may hold f-strings.
    depth = 0
    for token in tokens:
        name = tokenize.tok_name[token.type]
        depth += (name == "FSTRING_START") - (name == "FSTRING_END")
        if depth:
            parts.append(token)
        elif name == "FSTRING_END":
            yield parts[0]._replace(type=tokenize.STRING, string=_fstring(parts))
            parts = []
        elif name == "STRING":
            prefix, _, text = match.groups() if (match := LITERAL.fullmatch(token.string)) else ("", "", "")
            yield token._replace(string=FIELD.sub("{}", text) if "f" in prefix.lower() else text)
        else:
            yield token


def _fstring(parts: Iterable[tokenize.TokenInfo]) -> str:
    """The text of an f-string of Python 3.12 or later, from its tokens."""
    text, depth = "", 0  # `depth`: number of open braces
    for token in parts:
        if token.type == tokenize.OP and token.string == "{":
            text += "{}" if depth == 0 else ""
            depth += 1
        elif token.type == tokenize.OP and token.string == "}":
            depth -= 1
        elif tokenize.tok_name[token.type] == "FSTRING_MIDDLE" and depth == 0:
            text += token.string
    return text


def _literal(lines: list[tuple[int, str]], is_docstring: bool) -> Iterator[ProseText]:
    if lines and is_docstring:
        yield ProseText(DOCSTRING, tuple(lines))
    elif sum(len(line.split()) for _, line in lines) >= LEAST_WORDS and not any(PROGRAM.match(t) for _, t in lines):
        yield ProseText(STRING, tuple(lines))


def _numbered(first: int, text: str) -> list[tuple[int, str]]:
    return [(first + i, line) for i, line in enumerate(text.split("\n"))]


def _uncommented(comment: str) -> str:
    return comment.strip().removeprefix("/*").removesuffix("*/").strip("#/* ")


def _of_code(source: str, pattern: re.Pattern[str]) -> Iterator[ProseText]:
    comments: list[ProseText] = []
    for match in pattern.finditer(source):
        number = source.count("\n", 0, match.start()) + 1
        if match[0].startswith('"'):
            yield from _literal([(number, match[0][1:-1])], is_docstring=False)
        else:
            before = source[source.rfind("\n", 0, match.start()) + 1 : match.start()]
            lines = tuple((i, _uncommented(line)) for i, line in _numbered(number, match[0]))
            comments.append(ProseText(TRAILING if before.strip() else COMMENT, lines))
    yield from _blocks(comments)


def _blocks(comments: Sequence[ProseText]) -> Iterator[ProseText]:
    """Joins comments that stand on consecutive lines of their own into one text."""
    lines: tuple[tuple[int, str], ...] = ()
    for comment in comments:
        if lines and not (comment.kind == COMMENT and comment.line == lines[-1][0] + 1):
            yield ProseText(COMMENT, lines)
            lines = ()
        if comment.kind == TRAILING:
            yield comment
        else:
            lines += comment.lines
    if lines:
        yield ProseText(COMMENT, lines)


def _of_markdown(source: str) -> Iterator[ProseText]:
    lines: tuple[tuple[int, str], ...] = ()
    in_code = False
    for number, line in _numbered(1, source):
        is_fence = FENCE.match(line) is not None
        if lines and (is_fence or in_code or not line.strip() or NEW_PARAGRAPH.match(line)):
            yield ProseText(MARKDOWN, lines)
            lines = ()
        if is_fence:
            in_code = not in_code
        elif not in_code and line.strip():
            lines += ((number, line),)
    if lines:
        yield ProseText(MARKDOWN, lines)
