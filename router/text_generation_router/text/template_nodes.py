"""Facts about one node of a chat template that follow from its syntax alone."""

from jinja2 import nodes

LOOP_NUMBERS = {"index", "index0", "revindex", "revindex0", "length"}
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
    return isinstance(node, nodes.Const) and isinstance(node.value, int) and abs(node.value) < 2**31


def is_key(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, str) and not is_method(node.value)


def is_method(name: str) -> bool:
    return any(hasattr(kind, name) for kind in HAVE_METHODS)


def is_call_of(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == name


def has_arguments(node: nodes.Filter | nodes.Test) -> bool:
    return bool(node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)


def names_set_in(template: nodes.Template) -> set[str]:
    """Names of all variables that the template itself sets, in any way."""
    return {name.name for name in template.find_all(nodes.Name) if name.ctx != "load"} | {
        name.name for name in template.find_all(nodes.NSRef)
    }
