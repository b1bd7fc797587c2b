"""Descriptions of the fields of request bodies: the text below a field, read from the source. pydantic could read it
for every class, at each start; only the document needs it.
"""

import ast
import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from types import ModuleType

from pydantic import AliasChoices, BaseModel


def described(root: type[BaseModel]) -> dict[str, dict[str, str]]:
    """The descriptions of `root` and of all classes that are derived from it, by the name of the class, and then by the
    field's name in the document."""
    return {kind.__name__: dict(_of(kind)) for kind in {root, *_derived(root)}}


def _derived(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for derived in kind.__subclasses__():
        yield derived
        yield from _derived(derived)


def _of(kind: type[BaseModel]) -> Iterator[tuple[str, str]]:
    for name, field in kind.model_fields.items():
        owner = next(base for base in kind.__mro__ if name in inspect.get_annotations(base))
        text = field.description or _texts(inspect.getmodule(owner)).get(owner.__name__, {}).get(name)
        alias = field.validation_alias
        if text:
            yield str(alias.choices[0] if isinstance(alias, AliasChoices) else alias or name), text


@cache
def _texts(module: ModuleType | None) -> Mapping[str, Mapping[str, str]]:
    """By class and field."""
    classes = ast.parse(inspect.getsource(module)).body if module is not None else []
    return {node.name: dict(_below(node)) for node in classes if isinstance(node, ast.ClassDef)}


def _below(body: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in zip(body.body, body.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(str(told))):
                yield name, inspect.cleandoc(told)
