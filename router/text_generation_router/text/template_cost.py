"""An upper bound on the cost of rendering a chat template, derived from the template's source.

Only the syntax of common templates is known here; a template with anything else has no bound. One unit is the number of
characters of the chat and the template together. Each expression has a size: the most units that its value can take for
any chat. The size is also the expression's cost. Jinja forgets a variable that is set within a loop after each turn,
but keeps a namespace's values; so that they cannot grow, no value read from a namespace may be stored in a namespace.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jinja2 import nodes

F = TypeVar("F")

# Factor for printing a value: one character becomes at most 10 ("\\U0001f600"), plus brackets, quotes and commas.
PRINTED = 12
# Factor for changing case: most characters that one character becomes in upper or lower case.
CASE = 3
# Factor for `split`: bytes that a list takes for each of its texts, each of which may be a single character.
SPLIT = 64
# Most units of a value in a namespace.
MAX_KEPT = 64
MAX_DEPTH = 2  # levels of nested loops

FACTORS_OF_FILTERS = {
    **{"trim": 1, "string": 1, "upper": CASE, "lower": CASE, "tojson": PRINTED},
    **{"length": 1, "count": 1, "first": 1, "last": 1},
}
FACTORS_OF_METHODS = {"strip": 1, "lstrip": 1, "rstrip": 1, "upper": CASE, "lower": CASE}
METHODS_WITH_TEXTS = {"startswith": 1, "endswith": 1, "split": SPLIT}
TEXT_FILTERS = {"trim", "string", "tojson", "upper", "lower"}
TESTS = {
    "defined",
    "undefined",
    "none",
    "string",
    "mapping",
    "iterable",
    "sequence",
    "number",
    "boolean",
    "true",
    "false",
}
LOOP_NUMBERS = {"index", "index0", "revindex", "revindex0", "length"}
LOOP_VALUES = LOOP_NUMBERS | {"first", "last", "previtem", "nextitem"}
# Expressions that refer to an existing value without copying it.
WITHOUT_COPY = (nodes.Name, nodes.Const, nodes.TemplateData, nodes.Getattr)
# Callable global names, which a template must not set. A template may set `messages` to a part of its messages.
RESERVED = {"loop", "raise_exception", "namespace", "range", "lipsum", "dict", "cycler", "joiner", "strftime_now"} | {
    "self",
    "super",
    "caller",
}
# Types whose methods a template must not read as attributes: a stored method could be called by another name.
HAVE_METHODS = (str, list, tuple, dict, int, float)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost in units, by loop depth: spent once, for each message, for each pair of messages."""

    by_depth: tuple[int, ...]

    def of(self, num_messages: int, unit: int) -> int:
        return unit * sum(cost * int(num_messages**depth) for depth, cost in enumerate(self.by_depth))


class UnboundedError(Exception):
    """The template contains syntax without a known bound."""


def cost_of(template: nodes.Template) -> Cost | None:
    walk = _Walk()
    try:
        walk.statements(template.body)
    except UnboundedError:
        return None
    return Cost(tuple(walk.by_depth))


class _Walk:
    def __init__(self) -> None:
        self.by_depth = [0] * (MAX_DEPTH + 1)
        self._depth = 0
        self._sizes: dict[str, int] = {}  # units of a variable's value; a variable that is not here has one unit
        self._messages = {"messages"}  # variables whose every value is a list of messages
        self._others: set[str] = set()  # all other variables that the template sets
        self._message = set[str]()  # variables whose every value is one message
        self._texts = {"bos_token", "eos_token"}  # variables whose every value is a text
        self._namespaces: set[str] = set()
        self._read_from_namespace: set[str] = set()
        self._statements: Mapping[type[nodes.Node], Callable[..., None]] = {
            nodes.Output: self._output,
            nodes.If: self._if,
            nodes.For: self._for,
            nodes.Assign: self._assign,
            nodes.Break: _nothing,
            nodes.Continue: _nothing,
        }
        self._expressions: Mapping[type[nodes.Node], Callable[..., int]] = {
            nodes.TemplateData: _one,
            nodes.Const: _one,
            nodes.Name: self._name,
            nodes.Tuple: self._items,
            nodes.List: self._items,
            nodes.Getattr: self._attribute,
            nodes.Getitem: self._item,
            nodes.Compare: self._compare,
            nodes.And: self._both,
            nodes.Or: self._both,
            nodes.Add: self._both,
            nodes.Sub: self._number,
            nodes.Mod: self._mod,
            nodes.Not: lambda node: self.size(node.node),
            nodes.CondExpr: self._choice,
            nodes.Concat: lambda node: sum(map(self._printed, node.nodes)),
            nodes.Filter: self._filter,
            nodes.Test: self._test,
            nodes.Call: self._call,
        }

    def statements(self, body: Sequence[nodes.Node]) -> None:
        for node in body:
            _known(self._statements, node)(node)

    def size(self, node: nodes.Node) -> int:
        """Size of the node's value in units. Adds the cost of making that value."""
        size: int = _known(self._expressions, node)(node)
        self.by_depth[self._depth] += 1 if isinstance(node, WITHOUT_COPY) else size
        return size

    def _output(self, node: nodes.Output) -> None:
        for part in node.nodes:
            self.by_depth[self._depth] += self._printed(part)

    def _if(self, node: nodes.If) -> None:
        self.size(node.test)
        for body in (node.body, node.elif_, node.else_):
            self.statements(body)

    def _for(self, node: nodes.For) -> None:
        if node.recursive or not self._is_messages(node.iter) or not isinstance(node.target, nodes.Name):
            raise UnboundedError
        self.size(node.iter)
        if node.target.name in self._sizes.keys() - self._message:
            raise UnboundedError
        self._message.add(node.target.name)
        self._set(node.target.name, 1, node.iter, is_messages=False)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnboundedError
        if node.test is not None:
            self.size(node.test)
        self.statements(node.body)
        self._depth -= 1
        self.statements(node.else_)

    def _assign(self, node: nodes.Assign) -> None:
        value, target = node.node, node.target
        if isinstance(target, nodes.NSRef):
            if self._is_from_namespace(value) or self.size(value) > MAX_KEPT or target.name not in self._namespaces:
                raise UnboundedError
        elif not isinstance(target, nodes.Name):
            raise UnboundedError
        elif _is_call_of(value, "namespace"):
            self._make_namespace(target.name, value)
        else:
            if target.name in self._message:
                raise UnboundedError
            self._set(target.name, self.size(value), value, self._is_messages(value))

    def _make_namespace(self, name: str, call: nodes.Node) -> None:
        assert isinstance(call, nodes.Call)
        if call.args or call.dyn_args or call.dyn_kwargs or name in self._sizes or name == "messages":
            raise UnboundedError
        for keyword in call.kwargs:
            if self._is_from_namespace(keyword.value) or self.size(keyword.value) > MAX_KEPT:
                raise UnboundedError
        self._set(name, MAX_KEPT, call, is_messages=False)
        self._namespaces.add(name)
        self._read_from_namespace.add(name)

    def _set(self, name: str, size: int, value: nodes.Node, is_messages: bool) -> None:
        """Notes a value of a variable. As branches may set different values, the variable has the largest size of all,
        and is a list of messages or a text only if every value is."""
        if name in RESERVED or name in self._namespaces:
            raise UnboundedError
        if not is_messages:
            self._others.add(name)
            if name in self._messages:
                raise UnboundedError  # a loop over this name may have been counted already
        elif name not in self._others:
            self._messages.add(name)
        if not self._is_text(value):
            self._texts.discard(name)
        elif name not in self._sizes:
            self._texts.add(name)
        self._sizes[name] = max(size, self._sizes.get(name, 1))
        if self._is_from_namespace(value):
            self._read_from_namespace.add(name)

    def _is_messages(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return self._is_messages(node.node)
        return isinstance(node, nodes.Name) and node.name in self._messages

    def _is_text(self, node: nodes.Node) -> bool:
        """Whether the value is certainly a text or undefined. All values of a message are texts."""
        if isinstance(node, nodes.TemplateData | nodes.Concat):
            return True
        if isinstance(node, nodes.Const):
            return isinstance(node.value, str)
        if isinstance(node, nodes.Name):
            return node.name in self._texts
        if isinstance(node, nodes.Add):
            return self._is_text(node.left) and self._is_text(node.right)
        if isinstance(node, nodes.Filter):
            return node.name in TEXT_FILTERS
        return isinstance(node, nodes.Getattr | nodes.Getitem) and self._is_message(node.node)

    def _is_message(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getitem):
            return self._is_messages(node.node) and _is_number(node.arg)
        return isinstance(node, nodes.Name) and node.name in self._message

    def _printed(self, node: nodes.Node) -> int:
        return self.size(node) * (1 if self._is_text(node) else PRINTED)

    def _is_from_namespace(self, node: nodes.Node) -> bool:
        names = [node, *node.find_all(nodes.Name)]
        return any(isinstance(name, nodes.Name) and name.name in self._read_from_namespace for name in names)

    def _name(self, node: nodes.Name) -> int:
        if node.name in RESERVED:
            raise UnboundedError
        return self._sizes.get(node.name, 1)

    def _items(self, node: nodes.Tuple | nodes.List) -> int:
        return 1 + sum(map(self.size, node.items))

    def _attribute(self, node: nodes.Getattr) -> int:
        if _is_loop(node.node):
            if node.attr not in LOOP_VALUES:
                raise UnboundedError
            return 1
        if _is_method(node.attr):
            raise UnboundedError
        return self.size(node.node)

    def _item(self, node: nodes.Getitem) -> int:
        """`value[name]`. Jinja reads the attribute `name` if the value has no such key, so methods are refused."""
        if isinstance(node.arg, nodes.Slice):
            bounds = [bound for bound in (node.arg.start, node.arg.stop, node.arg.step) if bound is not None]
        else:
            bounds = [] if _is_key(node.arg) else [node.arg]
        if not all(map(_is_number, bounds)):
            raise UnboundedError
        return self.size(node.node)

    def _compare(self, node: nodes.Compare) -> int:
        """Searching a text for another takes time in proportion to the characters of both."""
        return self.size(node.expr) + sum(self.size(operand.expr) for operand in node.ops)

    def _both(self, node: nodes.BinExpr) -> int:
        return self.size(node.left) + self.size(node.right)

    def _mod(self, node: nodes.Mod) -> int:
        """`%` of numbers only: with a text on the left it would format."""
        if not _is_number(node.left):
            raise UnboundedError
        self.size(node.right)
        return 1

    def _number(self, node: nodes.Sub) -> int:
        if not _is_number(node):
            raise UnboundedError
        return 1

    def _choice(self, node: nodes.CondExpr) -> int:
        self.size(node.test)
        return self.size(node.expr1) + (self.size(node.expr2) if node.expr2 is not None else 0)

    def _filter(self, node: nodes.Filter) -> int:
        if node.node is None or node.name not in FACTORS_OF_FILTERS or _has_arguments(node):
            raise UnboundedError
        takes_text = node.name in TEXT_FILTERS - {"tojson"}
        return FACTORS_OF_FILTERS[node.name] * (self._printed(node.node) if takes_text else self.size(node.node))

    def _test(self, node: nodes.Test) -> int:
        if node.name not in TESTS or _has_arguments(node):
            raise UnboundedError
        self.size(node.node)
        return 1

    def _call(self, node: nodes.Call) -> int:
        if node.kwargs or node.dyn_args or node.dyn_kwargs:
            raise UnboundedError
        if _is_call_of(node, "raise_exception"):
            return sum(map(self._printed, node.args))
        method = node.node
        if not isinstance(method, nodes.Getattr):
            raise UnboundedError
        known = METHODS_WITH_TEXTS if node.args else FACTORS_OF_METHODS
        if method.attr not in known:
            raise UnboundedError
        for text in node.args:
            self.size(text)
        return known[method.attr] * self.size(method.node)


def _known(handlers: Mapping[type[nodes.Node], F], node: nodes.Node) -> F:
    if type(node) not in handlers:
        raise UnboundedError
    return handlers[type(node)]


def _is_loop(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "loop"


def _is_number(node: nodes.Node) -> bool:
    """Whether the value is certainly a small number, or undefined (`loop` outside of a loop). No template can set
    `loop`."""
    if isinstance(node, nodes.Add | nodes.Sub):
        return _is_number(node.left) and _is_number(node.right)
    if isinstance(node, nodes.Neg):
        return _is_number(node.node)
    if isinstance(node, nodes.Getattr):
        return _is_loop(node.node) and node.attr in LOOP_NUMBERS
    return isinstance(node, nodes.Const) and isinstance(node.value, int) and abs(node.value) < 2**31


def _is_key(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, str) and not _is_method(node.value)


def _is_method(name: str) -> bool:
    return any(hasattr(kind, name) for kind in HAVE_METHODS)


def _is_call_of(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == name


def _has_arguments(node: nodes.Filter | nodes.Test) -> bool:
    return bool(node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)


def _one(_: nodes.Node) -> int:
    return 1


def _nothing(_: nodes.Node) -> None: ...
