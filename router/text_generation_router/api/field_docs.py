"""Writes the page of all known request fields, docs/fields.md, from the schemas and the table of known fields.

python -m text_generation_router.api.field_docs docs/fields.md
"""

import sys
from pathlib import Path

from text_generation_router.api.anthropic import fields as anthropic_fields
from text_generation_router.api.common.contract import Contract, Refused, Renamed
from text_generation_router.api.openai import fields as openai_fields
from text_generation_router.api.responses import fields as responses_fields
from text_generation_router.api.tgi import fields as tgi_fields

COLUMNS: dict[str, Contract] = {
    "native": tgi_fields.PARAMETERS,
    "completions": openai_fields.COMPLETION,
    "chat": openai_fields.CHAT,
    "responses": responses_fields.RESPONSES,
    "messages": anthropic_fields.MESSAGES,
}
HEAD = """# Fields of requests

Every field that the server knows, by route: *native* is `parameters` of `/generate`, `/generate_stream` and `/`;
*completions* is `/v1/completions`; *chat* is `/v1/chat/completions`; *responses* is `/v1/responses`;
*messages* is `/v1/messages`. [api.md](api.md) has the others.

- **yes**: the field has its effect.
- **no**: the field would change the answer, and is refused by its name. `null` is never refused, nor are the values
  in brackets, which change nothing.
- **`other`**: refused; the route's own field of the same meaning is `other`.
- *no effect*: taken, because it changes no answer here.
- –: unknown.

<!-- written by text_generation_router/api/field_docs.py -->

"""


def cell(contract: Contract, name: str) -> str:
    if name in contract.honoured:
        return "yes"
    rule = contract.rules.get(name)
    if rule is None:
        return "–"
    if isinstance(rule, Renamed):
        return f"`{rule.here}`"
    if isinstance(rule, Refused):
        values = ", ".join(f"`{value!r}`".replace("|", "\\|") for value in rule.neutral)
        return f"no ({values})" if values else "no"
    return "*no effect*"


def page() -> str:
    names = sorted({name for contract in COLUMNS.values() for name in contract.known})
    lines = ["| field | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    for name in names:
        lines.append(f"| `{name}` | " + " | ".join(cell(contract, name) for contract in COLUMNS.values()) + " |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
