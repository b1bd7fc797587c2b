"""Facts about the variables of a chat template that hold whichever branches are taken.

Jinja forgets a variable that is set within a loop after each iteration, but keeps a namespace's values. So that they
cannot grow, no value read from a namespace may be stored in a namespace.
"""

import re
from collections.abc import Sequence

from jinja2 import nodes

# Facts about one node of a chat template that follow from its syntax alone.

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


# Largest size of a value in a namespace, in units of cost.
MAX_KEPT = 64

TEXT_FILTERS = {"trim", "string", "tojson", "upper", "lower"}
# Names of callable globals, which a template must not set. A template may set `messages` to a part of its messages.
RESERVED = {"loop", "raise_exception", "namespace", "range", "lipsum", "dict", "cycler", "joiner", "strftime_now"} | {
    "self",
    "super",
    "caller",
}
# Names of Jinja tests that are false for None and for undefined values.
TESTS_OF_VALUES = {"string", "mapping", "number", "boolean", "true"}
# Variables that are None in a plain chat, and the only fields of its messages.
ABSENT = frozenset({"tools", "documents"})
FIELDS = {"role", "content"}


class UnboundedError(Exception):
    """The template contains syntax without a known bound."""


class TemplateVariables:
    def __init__(self, absent: frozenset[str], macros: frozenset[str] = frozenset()) -> None:
        """`absent`: variables that are certainly None. `macros`: names of the template's macros, which cost nothing as
        long as they are not used."""
        if not macros.isdisjoint(RESERVED):
            raise UnboundedError
        self._absent = absent
        self._reserved = RESERVED | macros
        # Size of each variable's value in units; a variable that is missing here has the size of one unit.
        self._sizes: dict[str, int] = {}
        self._messages = {"messages"}  # variables whose every value is a list of messages
        self._others: set[str] = set()  # variables that the template sets and that are in neither of the other sets
        self._message = set[str]()  # variables whose every value is one message
        self._texts = {"bos_token", "eos_token"}  # variables whose every value is a text
        self._namespaces: set[str] = set()
        self._read_from_namespace: set[str] = set()

    def set(self, name: str, size: int, value: nodes.Node) -> None:
        self._set(name, size, value, self.is_messages(value))

    def set_message(self, name: str, messages: nodes.Node) -> None:
        """Notes the variable of a loop over `messages`."""
        if name in self._sizes.keys() - self._message:
            raise UnboundedError
        self._message.add(name)
        self._set(name, 1, messages, is_messages=False)

    def set_namespace(self, name: str, call: nodes.Node) -> None:
        self._set(name, MAX_KEPT, call, is_messages=False)
        self._namespaces.add(name)
        self._read_from_namespace.add(name)

    def size(self, name: str) -> int:
        if name in self._reserved:
            raise UnboundedError
        return self._sizes.get(name, 1)

    def is_set(self, name: str) -> bool:
        return name in self._sizes or name in self._messages

    def is_namespace(self, name: str) -> bool:
        return name in self._namespaces

    def is_messages(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return self.is_messages(node.node)
        return isinstance(node, nodes.Name) and node.name in self._messages

    def is_message(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getitem):
            return self.is_messages(node.node) and is_number(node.arg)
        return isinstance(node, nodes.Name) and node.name in self._message

    def is_text(self, node: nodes.Node) -> bool:
        """Whether the value is certainly a text or undefined. All values of a message are texts."""
        if isinstance(node, nodes.TemplateData | nodes.Concat):
            return True
        if isinstance(node, nodes.Const):
            return isinstance(node.value, str)
        if isinstance(node, nodes.Name):
            return node.name in self._texts
        if isinstance(node, nodes.Add):
            return self.is_text(node.left) and self.is_text(node.right)
        if isinstance(node, nodes.Filter):
            return node.name in TEXT_FILTERS
        return isinstance(node, nodes.Getattr | nodes.Getitem) and self.is_message(node.node)

    def is_absent(self, node: nodes.Node) -> bool:
        """Whether the value is certainly false in a plain chat: tools, calls of tools, and the like."""
        match node:
            case nodes.And(left=left, right=right):
                return self.is_absent(left) or self.is_absent(right)
            case nodes.Or(left=left, right=right):
                return self.is_absent(left) and self.is_absent(right)
            case nodes.Name(name=name):
                return name in self._absent
            case nodes.Test(name="defined", node=value):
                return self._is_absent_field(value)
            case nodes.Test(name=name, node=value) if name in TESTS_OF_VALUES:
                return self.is_absent(value)
            case nodes.Not(node=nodes.Test(name="none", node=nodes.Name(name=name))):
                return name in self._absent
            case nodes.Compare(expr=nodes.Const(value=str(key)), ops=[nodes.Operand(op="in", expr=value)]):
                return self.is_message(value) and key not in FIELDS
        return self._is_absent_field(node)

    def _is_absent_field(self, node: nodes.Node) -> bool:
        found = key_of(node)
        return found is not None and self.is_message(found[0]) and found[1] not in FIELDS and not is_method(found[1])

    def is_from_namespace(self, node: nodes.Node) -> bool:
        names = [node, *node.find_all(nodes.Name)]
        return any(isinstance(name, nodes.Name) and name.name in self._read_from_namespace for name in names)

    def _set(self, name: str, size: int, value: nodes.Node, is_messages: bool) -> None:
        """Notes a value of a variable. Branches may set different values, so the variable gets the largest size of all.
        It is a list of messages, or a text, only if every value is.
        """
        if name in self._reserved or name in self._namespaces:
            raise UnboundedError
        if not is_messages:
            self._others.add(name)
            if name in self._messages:
                raise UnboundedError  # the cost of a loop over this name may have been computed already
        elif name not in self._others:
            self._messages.add(name)
        if not self.is_text(value):
            self._texts.discard(name)
        elif name not in self._sizes:
            self._texts.add(name)
        self._sizes[name] = max(size, self._sizes.get(name, 1))
        if self.is_from_namespace(value):
            self._read_from_namespace.add(name)
