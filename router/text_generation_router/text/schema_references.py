"""References within a JSON schema, such as `#/$defs/name`."""

from typing import Any, Final

Schema = dict[str, Any]

MAX_REFERENCES: Final = 64  # one after the other
# Keywords that change no text.
ANNOTATIONS: Final = frozenset(
    (
        "$comment", "contentEncoding", "contentMediaType", "contentSchema", "default", "deprecated", "description",
        "discriminator", "example", "examples", "externalDocs", "readOnly", "title", "writeOnly", "xml",
    )
)  # fmt: skip


def resolved(root: Schema, schema: Any) -> Any:
    """The schema that a reference such as `#/$defs/name` refers to, at most MAX_REFERENCES references away. Schemas
    that are not just a reference are their own."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema or not schema.keys() <= {"$ref", *ANNOTATIONS}:
            return schema
        schema = target(root, schema["$ref"])
    return None


def target(root: Schema, reference: Any) -> Any:
    """The schema at a reference; None for references of other forms than `#/$defs/name`."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isascii() and step.isdigit() and int(step[:9]) < len(found):
            found = found[int(step[:9])]
        elif isinstance(found, dict) and step in found:
            found = found[step]
        else:
            return None
    return found
