"""Arguments as in a call of Python: KEY=LITERAL, …"""

import re
from typing import Any

from text_generation_router.text.calls.found_calls import MAX_NAME_CHARS
from text_generation_router.text.grammars.arguments_schema import arguments_of
from text_generation_router.text.grammars.asked import RefusedGrammarError
from text_generation_router.text.grammars.literals import PYTHON, Literals, sequence
from text_generation_router.text.grammars.rules import Rules, literal

_KEY = re.compile(r"\w+")
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"


class PythonicArguments:
    def __init__(self, rules: Rules, schema: dict[str, Any]) -> None:
        """`schema`: prepared."""
        self._rules, self._root = rules, schema
        self._literals = Literals(rules, schema, PYTHON)

    def all(self) -> str:
        """What stands for the arguments in a rule. Raises RefusedGrammarError."""
        arguments = arguments_of(self._root)
        if not arguments.listed and arguments.others is not False:
            return self.anything(self._literals.of(arguments.others))
        members = []
        for name, schema in arguments.listed.items():
            if not _KEY.fullmatch(name) or len(name) > MAX_NAME_CHARS:
                raise RefusedGrammarError(f"the argument {name[:64]!r} has a name that Python does not allow")
            try:
                value = self._literals.of(schema)
            except RefusedGrammarError as refusal:
                raise RefusedGrammarError(f"the argument `{name}`: {refusal}") from None
            members.append((f"{literal(name + '=')} {value}", name in arguments.required))
        return sequence(self._rules, members)

    def anything(self, value: str = "") -> str:
        """Arguments of any names. `value`: what stands for their values in a rule, by default any literals."""
        argument = f'{self._rules.terminal(_ANY_KEY)} "=" {value or self._literals.any()}'
        return f'({argument} (", " {argument})*)?'
