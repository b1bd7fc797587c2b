"""Calls that a grammar lets a model write: texts at random, and tools with random schemas. For tests."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from text_generation_router.text.calls.formats import CALL_FORMATS, BodyKind, CallFormat
from text_generation_router.text.calls.reading import Reading
from text_generation_router.text.calls.written import Arguments, CallNumber, written_calls
from text_generation_router.text.grammars import checking_child
from text_generation_router.text.grammars.asked import RefusedGrammarError
from text_generation_router.text.grammars.checking_child import LIMITS
from text_generation_router.text.grammars.forms import CallsForm, ChatForm, WantedGrammar
from text_generation_router.text.tokens.pieces import CallArguments, CallStart, merged

Schema = dict[str, Any]
END = "</s>"
TEXTS = (
    "", "Rome", "a\nb\n", '"', "it's", "{", "[1]", " null", "None", "7", "-1.5", "true", "<", "</param", "é 🌊", "\\n",
)  # fmt: skip


def tokenizer_of(special: Sequence[str]) -> Tokenizer:
    """A token for each byte, and the special tokens."""
    tokenizer = Tokenizer(
        models.BPE({char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (END, *special)])
    return tokenizer


class Calls:
    """The calls of one format as a grammar demands them, and as they are read."""

    def __init__(self, name: str, tokenizer: Tokenizer, special: Sequence[str] = ()) -> None:
        self.syntax, self._tokenizer = CALL_FORMATS[name], tokenizer
        self._matching = LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id(END), slices=[])
        self._reading = Reading(self.syntax, None, frozenset(special))
        self._special = frozenset(special)

    def grammar(
        self, tools: dict[str, Schema], strict: bool = True, several: bool = True, is_required: bool = True
    ) -> str:
        form = CallsForm(self.syntax.name, tools, list(tools if strict else ()), is_required, several)
        made = checking_child.made(WantedGrammar(None, ChatForm.of(self._tokenizer, calls=form)), self._matching)
        if made.refusal:
            raise RefusedGrammarError(made.refusal)
        return made.grammar

    def matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._matching, grammar, limits=LIMITS, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def allows(self, grammar: str, text: str) -> bool:
        matcher, ids = self.matcher(grammar), self.ids(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def walk(self, grammar: str, rng: random.Random, hints: Sequence[str], most: int = 1500) -> list[int] | None:
        """Ids at random that the grammar allows, up to its end. `hints`: texts that are tried now and then, without
        which a text hardly ends. None: there are more than `most`."""
        matcher = self.matcher(grammar)
        end, ids = self._tokenizer.token_to_id(END), list[int]()
        tried = [self.ids(hint) for hint in hints]
        while len(ids) <= most:
            if matcher.is_stopped() or (matcher.is_accepting() and rng.random() < 0.5):
                return ids
            hint = rng.choice(tried) if rng.random() < 0.6 else []
            if not hint or matcher.validate_tokens(hint) < len(hint):
                mask = matcher.compute_bitmask()
                assert not matcher.is_error(), matcher.get_error()
                allowed = [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1 and i != end]
                assert allowed, self.text(ids)
                hint = [rng.choice(allowed)]
            assert matcher.consume_tokens(hint), matcher.get_error()
            ids += hint
        return None

    def text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def read(self, ids: Sequence[int], tools: dict[str, Schema]) -> list[tuple[str, Any]]:
        """The calls that a reader finds. There must not be anything else."""
        reader = self._reading.reader(tools)
        pieces, plain = [], list[int]()
        for i in ids:
            plain.append(i)
            if (token := self._tokenizer.id_to_token(i)) in self._special:
                pieces += [*reader.push(self.text(plain[:-1])), *reader.push(token, special=True)]
                plain.clear()
        found = merged([*pieces, *reader.push(self.text(plain)), *reader.finish()])
        assert all(isinstance(piece, CallStart | CallArguments) for piece in found), (self.text(ids), found)
        names = [piece.name for piece in found if isinstance(piece, CallStart)]
        arguments = [piece.text for piece in found if isinstance(piece, CallArguments)]
        return list(zip(names, map(json.loads, arguments), strict=True))


Made = tuple[Schema, Callable[[random.Random], Any]]  # a schema, and what makes a value of it


def some_text(rng: random.Random) -> str:
    return "".join(rng.choices(TEXTS, k=rng.randint(0, 3)))


def plain_text(rng: random.Random) -> str:
    """A text that is not read as a value of another type."""
    return f"x{some_text(rng)}"


def any_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(5 if depth > 1 else 7)
    if kind == 5:
        return [any_value(rng, depth + 1) for _ in range(rng.randint(0, 2))]
    if kind == 6:
        return {some_text(rng): any_value(rng, depth + 1) for _ in range(rng.randint(0, 2))}
    return (some_text(rng), rng.randint(-99, 10**9), rng.random(), rng.random() < 0.5, None)[kind]


def leaf(rng: random.Random) -> Made:
    listed = ["a b", "7", "x", 'say "hi"', "null"]
    bound = rng.randint(-5, 50)
    return rng.choice(
        (
            ({"type": "string"}, some_text),
            ({"type": "string", "description": "d"}, some_text),
            ({"type": "string", "maxLength": 6}, lambda r: some_text(r)[:6]),
            ({"type": "string", "pattern": "^[a-z]{2,4}$"}, lambda r: r.choice(("ab", "xyz", "wxyz"))),
            ({"type": "string", "pattern": "b|^c"}, lambda r: r.choice(("abc", "c", "b"))),
            ({"type": "string", "format": "date"}, lambda r: f"2024-0{r.randint(1, 9)}-28"),
            ({"type": "string", "enum": listed}, lambda r: r.choice(listed)),
            ({"enum": ["x", 5, True, None]}, lambda r: r.choice(("x", 5, True, None))),
            ({"const": 7}, lambda r: 7),
            ({"type": "integer"}, lambda r: r.randint(-(10**6), 10**6)),
            ({"type": "integer", "minimum": bound, "maximum": bound + 9}, lambda r: r.randint(bound, bound + 9)),
            ({"type": "number"}, lambda r: r.choice((0, -1, 2.5, 1e-7, 1e22))),
            ({"type": "boolean"}, lambda r: r.random() < 0.5),
            ({"type": ["string", "null"]}, lambda r: r.choice((None, plain_text(r)))),
            ({"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]}, lambda r: r.choice((None, "abcd"))),
            ({"anyOf": [{"type": "string"}, {"const": True}]}, lambda r: r.choice((True, "abc", "tru"))),
            ({"type": ["string", "integer"]}, lambda r: r.choice((5, -7, plain_text(r)))),
            ({"type": ["string", "integer"], "minimum": 3}, lambda r: r.choice((5, 3, "abc"))),
            ({"type": ["integer", "boolean", "null"]}, lambda r: r.choice((5, None, False))),
            ({"$ref": "#/$defs/size"}, lambda r: r.choice(("big", "small"))),
            ({}, lambda r: r.choice((plain_text(r), [any_value(r)], None, 1.5))),
        )
    )


def schema_of(rng: random.Random, depth: int = 0) -> Made:
    kind = rng.randrange(10)
    if kind < 6 or depth > 2:
        return leaf(rng)
    inner, make = schema_of(rng, depth + 1)
    if kind == 6:
        schema = {"type": "array", "items": inner, "minItems": 1, "maxItems": 3}
        return schema, lambda r: [make(r) for _ in range(r.randint(1, 3))]
    if kind == 7:
        return {"type": "object", "additionalProperties": inner}, lambda r: {some_text(r): make(r), "k": make(r)}
    if kind == 8:
        schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": inner}]}
        return schema, lambda r: r.choice(("Rome", [make(r)], []))
    return object_of(rng, depth + 1)


def object_of(rng: random.Random, depth: int = 0) -> Made:
    parts = {f"{name}{rng.choice(('', '_1'))}": schema_of(rng, depth) for name in "abcd"[: rng.randint(0, 4)]}
    required = [name for name in parts if rng.random() < 0.5]
    schema: Schema = {"type": "object", "properties": {name: part for name, (part, _) in parts.items()}}
    schema["required"] = required

    def make(rng: random.Random) -> Any:
        return {name: made(rng) for name, (_, made) in parts.items() if name in required or rng.random() < 0.5}

    return schema, make


def tool(rng: random.Random) -> Made:
    schema, make = object_of(rng)
    return schema | {"$defs": {"size": {"enum": ["big", "small"]}}}, make


def spelled(syntax: CallFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls, each a name and arguments, as a chat template writes them."""
    form = written_calls(syntax, [name for name, _ in calls])
    texts = []
    for number, (parts, (_, arguments)) in enumerate(zip(form.calls, calls, strict=True)):
        body = {Arguments: arguments_text(syntax, arguments), CallNumber: str(number)}
        texts.append("".join(part if isinstance(part, str) else body[type(part)] for part in parts))
    return "".join((*form.opening, "".join(form.separator).join(texts), *form.closing))


def arguments_text(syntax: CallFormat, arguments: dict[str, Any]) -> str:
    if syntax.body in (BodyKind.PYTHONIC, BodyKind.PYTHONIC_LINES):
        return ", ".join(f"{name}={python_text(value)}" for name, value in arguments.items())
    if syntax.xml is None:
        return json.dumps(arguments, ensure_ascii=False)
    xml, frame = syntax.xml, "\n" if syntax.xml.is_framed else ""
    between = "\n" + xml.before_value if xml.before_value else ""
    return "\n" + "".join(
        f"{xml.before_key}{name}{xml.after_key}{between}{frame}"
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}{frame}{xml.after_value}\n"
        for name, value in arguments.items()
    )


def python_text(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(python_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{python_text(key)}: {python_text(inner)}" for key, inner in value.items()) + "}"
    return repr(value)
