"""An upper bound on the cost of rendering a chat template, derived from the template's source.

Only the syntax of common templates is known here; a template with any other syntax has no bound. The unit of cost is
the number of characters of the chat and the template together. Each expression has a size: the most units that its
value can take for any plain chat (`Conversation.is_plain`). The size is also the cost of the expression.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jinja2 import nodes

from text_generation_router.text.templates.variables import (
    ABSENT,
    LOOP_NUMBERS,
    MAX_KEPT,
    TEXT_FILTERS,
    TemplateVariables,
    UnboundedError,
    has_arguments,
    is_call_of,
    is_date_format,
    is_key,
    is_loop,
    is_method,
    is_number,
    is_short_text,
    names_set_in,
    only_text,
)

F = TypeVar("F")

# Factor for printing a value: one character becomes at most 10 characters ("\\U0001f600"), plus brackets, quotes and
# commas.
PRINTED = 12
# Factor for changing case: most characters that one character becomes in upper or lower case.
CASE = 3
# Factor for `split`: bytes that a list takes for each of its texts, each of which may be a single character.
SPLIT = 64
# Size of a date: most characters that a character of its format becomes.
DATE = 16
MAX_DEPTH = 2  # deepest nesting of loops that has a bound

FACTORS_OF_FILTERS = {
    **{"trim": 1, "string": 1, "upper": CASE, "lower": CASE, "tojson": PRINTED},
    **{"length": 1, "count": 1, "first": 1, "last": 1},
}
FACTORS_OF_METHODS = {"strip": 1, "lstrip": 1, "rstrip": 1, "upper": CASE, "lower": CASE}
STRIPS = {"strip", "lstrip", "rstrip"}
METHODS_WITH_TEXTS = {"startswith": 1, "endswith": 1, "split": SPLIT, **dict.fromkeys(STRIPS, 1)}
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
LOOP_VALUES = LOOP_NUMBERS | {"first", "last", "previtem", "nextitem"}
# Expressions that refer to an existing value without copying it.
WITHOUT_COPY = (nodes.Name, nodes.Const, nodes.TemplateData, nodes.Getattr)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost in units by loop depth: units for the whole chat, for each message, and for each pair of messages."""

    by_depth: tuple[int, ...]

    def of(self, num_messages: int, unit: int) -> int:
        return unit * sum(cost * int(num_messages**depth) for depth, cost in enumerate(self.by_depth))


def cost_of(template: nodes.Template) -> Cost | None:
    macros = frozenset(macro.name for macro in template.find_all(nodes.Macro))
    try:
        walk = _Walk(TemplateVariables(ABSENT - names_set_in(template), macros))
        walk.statements(template.body)
    except UnboundedError:
        return None
    return Cost(tuple(walk.by_depth))


class _Walk:
    def __init__(self, variables: TemplateVariables) -> None:
        self.by_depth = [0] * (MAX_DEPTH + 1)
        self._depth = 0
        self._variables = variables
        self._statements: Mapping[type[nodes.Node], Callable[..., None]] = {
            nodes.Output: self._output,
            nodes.If: self._if,
            nodes.For: self._for,
            nodes.Assign: self._assign,
            nodes.Scope: lambda node: self.statements(node.body),
            nodes.Macro: _nothing,
            nodes.Break: _nothing,
            nodes.Continue: _nothing,
        }
        self._expressions: Mapping[type[nodes.Node], Callable[..., int]] = {
            nodes.TemplateData: _one,
            nodes.Const: _one,
            nodes.Name: lambda node: self._variables.size(node.name),
            nodes.Tuple: self._items,
            nodes.List: self._items,
            nodes.Getattr: self._attribute,
            nodes.Getitem: self._item,
            nodes.Compare: self._compare,
            nodes.And: self._and,
            nodes.Or: self._both,
            nodes.Add: self._both,
            nodes.Sub: self._difference,
            nodes.Neg: self._negative,
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
        if not self._variables.is_absent(node.test):
            self.statements(node.body)
        for body in (node.elif_, node.else_):
            self.statements(body)

    def _for(self, node: nodes.For) -> None:
        if self._variables.is_absent(node.iter):
            self.size(node.iter)
            self.statements(node.else_)
            return
        if node.recursive or not self._variables.is_messages(node.iter) or not isinstance(node.target, nodes.Name):
            raise UnboundedError
        self.size(node.iter)
        self._variables.set_message(node.target.name, node.iter)
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
            self._check_kept(value)
            if not self._variables.is_namespace(target.name):
                raise UnboundedError
        elif not isinstance(target, nodes.Name) or self._variables.is_message(target):
            raise UnboundedError
        elif is_call_of(value, "namespace"):
            self._make_namespace(target.name, value)
        else:
            self._variables.set(target.name, self.size(value), value)

    def _make_namespace(self, name: str, call: nodes.Node) -> None:
        assert isinstance(call, nodes.Call)
        if call.args or call.dyn_args or call.dyn_kwargs or self._variables.is_set(name):
            raise UnboundedError
        for keyword in call.kwargs:
            self._check_kept(keyword.value)
        self._variables.set_namespace(name, call)

    def _check_kept(self, value: nodes.Node) -> None:
        """Refuses values that a namespace must not keep."""
        if self._variables.is_from_namespace(value) or self.size(value) > MAX_KEPT:
            raise UnboundedError

    def _printed(self, node: nodes.Node) -> int:
        return self.size(node) * (1 if self._variables.is_text(node) else PRINTED)

    def _items(self, node: nodes.Tuple | nodes.List) -> int:
        return 1 + sum(map(self.size, node.items))

    def _attribute(self, node: nodes.Getattr) -> int:
        if is_loop(node.node):
            if node.attr not in LOOP_VALUES:
                raise UnboundedError
            return 1
        if is_method(node.attr):
            raise UnboundedError
        return self.size(node.node)

    def _item(self, node: nodes.Getitem) -> int:
        """Size of `value[name]`. Jinja reads the attribute `name` if the value has no such key, so names of methods are
        refused.
        """
        if isinstance(node.arg, nodes.Slice):
            bounds = [bound for bound in (node.arg.start, node.arg.stop, node.arg.step) if bound is not None]
        else:
            bounds = [] if is_key(node.arg) else [node.arg]
        if not all(map(is_number, bounds)):
            raise UnboundedError
        for bound in bounds:
            self.size(bound)
        size = self.size(node.node)
        made = node.node
        if isinstance(made, nodes.Call) and isinstance(node.arg, nodes.Const | nodes.Neg):
            method = made.node
            if isinstance(method, nodes.Getattr) and method.attr == "split":
                return self.size(method.node)  # one part of that text
        return size

    def _compare(self, node: nodes.Compare) -> int:
        """Cost of a comparison. Searching a text for another text takes time in proportion to the characters of
        both.
        """
        return self.size(node.expr) + sum(self.size(operand.expr) for operand in node.ops)

    def _and(self, node: nodes.And) -> int:
        """The right side is not evaluated if the left side is certainly false."""
        left = self.size(node.left)
        return left if self._variables.is_absent(node.left) else left + self.size(node.right)

    def _both(self, node: nodes.BinExpr) -> int:
        return self.size(node.left) + self.size(node.right)

    def _mod(self, node: nodes.Mod) -> int:
        """Size of `%` between numbers. With a text on the left it would format the text, which is refused."""
        if not is_number(node.left):
            raise UnboundedError
        self._both(node)
        return 1

    def _difference(self, node: nodes.Sub) -> int:
        if not is_number(node):
            raise UnboundedError
        self._both(node)
        return 1

    def _negative(self, node: nodes.Neg) -> int:
        if not is_number(node):
            raise UnboundedError
        self.size(node.node)
        return 1

    def _choice(self, node: nodes.CondExpr) -> int:
        self.size(node.test)
        first = 0 if self._variables.is_absent(node.test) else self.size(node.expr1)
        return first + (self.size(node.expr2) if node.expr2 is not None else 0)

    def _filter(self, node: nodes.Filter) -> int:
        if node.name == "default" and node.node is not None and _has_one_argument(node):
            return self.size(node.node) + self.size(node.args[0])
        if node.node is None or node.name not in FACTORS_OF_FILTERS or has_arguments(node):
            raise UnboundedError
        takes_text = node.name in TEXT_FILTERS - {"tojson"}
        return FACTORS_OF_FILTERS[node.name] * (self._printed(node.node) if takes_text else self.size(node.node))

    def _test(self, node: nodes.Test) -> int:
        if node.name not in TESTS or has_arguments(node):
            raise UnboundedError
        if node.name not in ("defined", "undefined") or not isinstance(node.node, nodes.Name):
            self.size(node.node)
        return 1

    def _call(self, node: nodes.Call) -> int:
        if node.kwargs or node.dyn_args or node.dyn_kwargs:
            raise UnboundedError
        if is_call_of(node, "raise_exception"):
            return sum(map(self._printed, node.args))
        if is_call_of(node, "strftime_now") and is_date_format(node.args):
            return DATE
        method = node.node
        if not isinstance(method, nodes.Getattr):
            raise UnboundedError
        known = METHODS_WITH_TEXTS if node.args else FACTORS_OF_METHODS
        if method.attr not in known or (method.attr in STRIPS and node.args and not is_short_text(node.args)):
            raise UnboundedError
        for text in node.args:
            self.size(text)
        factor = known[method.attr]
        if method.attr == "split" and (separator := only_text(node.args)):
            factor = 1 + SPLIT // len(separator)
        return factor * self.size(method.node)


def _known(handlers: Mapping[type[nodes.Node], F], node: nodes.Node) -> F:
    if type(node) not in handlers:
        raise UnboundedError
    return handlers[type(node)]


def _one(_: nodes.Node) -> int:
    return 1


def _has_one_argument(node: nodes.Filter) -> bool:
    return len(node.args) == 1 and not (node.kwargs or node.dyn_args or node.dyn_kwargs)


def _nothing(_: nodes.Node) -> None: ...
