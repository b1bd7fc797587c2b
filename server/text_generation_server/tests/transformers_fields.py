"""Every field name that a configuration class of the installed transformers knows, or that its models read. Run as a
script, writes the list:

    python server/text_generation_server/tests/transformers_fields.py

Reads the sources of transformers without importing them: importing hundreds of modules would take a minute."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import text_generation_common

READ = re.compile(r"\bconfig\.([a-z_]\w*)|getattr\((?:self\.)?config, \"(\w+)\"")
LIST = Path(text_generation_common.__file__).parent / "models" / "transformers_fields.txt"


def known_to_transformers() -> set[str]:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    files = [root / "configuration_utils.py", *root.glob("models/*/configuration_*.py")]
    classes = (node for file in files for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef))
    names = {name for node in classes for name in _fields(node)}
    for file in (root / "modeling_rope_utils.py", *root.glob("models/*/modeling_*.py")):
        names |= {name for found in READ.findall(file.read_text()) for name in found}
    return {name for name in names if name.isidentifier() and name != "self"}


def _fields(config_class: ast.ClassDef) -> Iterator[str]:
    """Yields names of fields: annotated fields, arguments of the constructor, attributes that it sets, and names taken
    out of its `kwargs`."""
    for statement in config_class.body:
        if isinstance(statement, ast.AnnAssign) and not ast.unparse(statement.annotation).startswith("ClassVar"):
            yield ast.unparse(statement.target)
        elif isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "attribute_map":
            yield from _strings(statement.value)
        elif isinstance(statement, ast.FunctionDef) and statement.name in ("__init__", "__post_init__"):
            yield from (argument.arg for argument in [*statement.args.args, *statement.args.kwonlyargs])
            yield from _used_in(statement)
        elif isinstance(statement, ast.FunctionDef):
            yield from _taken_in(statement)


def _used_in(constructor: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(constructor):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr
    yield from _taken_in(constructor)


def _taken_in(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("kwargs.pop", "kwargs.get"):
            yield from _strings(node.args[0])


def _strings(node: ast.expr) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def main() -> None:
    names = sorted(known_to_transformers())
    LIST.write_text("".join(f"{name}\n" for name in names))
    print(f"{LIST}: {len(names)} names")


if __name__ == "__main__":
    main()
