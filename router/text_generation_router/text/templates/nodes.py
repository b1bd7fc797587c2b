"""Facts about one node of a chat template that follow from its syntax alone."""

import re
from collections.abc import Sequence

from jinja2 import nodes

LOOP_NUMBERS = {"index", "index0", "revindex", "revindex0", "length"}
MAX_STRIPPED = 4  # most characters that a stripping method may look for
# A format without widths, so that every directive makes a short text.
DATE_FORMAT = re.compile(r"(?:[^%]|%-?[a-zA-Z%])*")
# Types whose values have methods. A template must not read a method as an attribute, because it could store the method
# and call it under another name.
HAVE_METHODS = (str, list, tuple, dict, int, float)


def is_loop(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "loop"


def is_number(node: nodes.Node) -> bool:
    """Whether the value is certainly a small number, or undefined (`loop` outside of a loop). No template can set
    `loop`."""
    if isinstance(node, nodes.Add | nodes.Sub):
        return is_number(node.left) and is_number(node.right)
    if isinstance(node, nodes.Neg):
        return is_number(node.node)
    if isinstance(node, nodes.Getattr):
        return is_loop(node.node) and node.attr in LOOP_NUMBERS
    if isinstance(node, nodes.Filter):
        return node.name in ("length", "count") and not has_arguments(node)
    return isinstance(node, nodes.Const) and isinstance(node.value, int) and abs(node.value) < 2**31


def is_key(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, str) and not is_method(node.value)


def is_method(name: str) -> bool:
    return any(hasattr(kind, name) for kind in HAVE_METHODS)


def is_call_of(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == name


def has_arguments(node: nodes.Filter | nodes.Test) -> bool:
    return bool(node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)


def is_date_format(arguments: Sequence[nodes.Node]) -> bool:
    text = only_text(arguments)
    return text is not None and DATE_FORMAT.fullmatch(text) is not None


def is_short_text(arguments: Sequence[nodes.Node]) -> bool:
    text = only_text(arguments)
    return text is not None and len(text) <= MAX_STRIPPED


def only_text(arguments: Sequence[nodes.Node]) -> str | None:
    """The one argument, if it is a text that stands in the template."""
    if len(arguments) == 1 and isinstance(arguments[0], nodes.Const) and isinstance(arguments[0].value, str):
        return arguments[0].value
    return None


def _is_none(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and node.value is None


def names_set_in(template: nodes.Template) -> set[str]:
    """Names of all variables that the template itself sets, in any way, except to None."""
    to_none = {id(set_.target) for set_ in template.find_all(nodes.Assign) if _is_none(set_.node)}
    names = {name.name for name in template.find_all(nodes.Name) if name.ctx != "load" and id(name) not in to_none}
    names |= {reference.name for reference in template.find_all(nodes.NSRef)}
    return names | {macro.name for macro in template.find_all(nodes.Macro)}


def key_of(node: nodes.Node) -> tuple[nodes.Node, str] | None:
    """The value and the key of `value.key` or `value['key']`; None for any other expression."""
    if isinstance(node, nodes.Getattr):
        return node.node, node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
        return node.node, node.arg.value
    return None
