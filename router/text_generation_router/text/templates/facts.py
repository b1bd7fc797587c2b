"""Facts about a chat template that decide what it is given: which variables it reads, and in which forms it takes a
message's content and the arguments of its calls."""

from collections.abc import Iterator
from dataclasses import dataclass

from jinja2 import nodes

# Fields of a part of a message's content, by which a loop over parts is recognised.
PART_FIELDS = ("type", "text")


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    reads: frozenset[str]  # names of the variables that it reads, its own ones included
    takes_parts: bool  # whether it reads the parts of a message's content
    takes_texts: bool  # whether it takes a content that is a text
    takes_none: bool  # whether it looks for a content that is null
    takes_objects: bool  # whether it takes arguments of calls that are objects, and not only JSON texts
    takes_developer: bool  # whether its source names the role `developer`


def facts_of(template: nodes.Template) -> TemplateFacts:
    reads = frozenset(node.name for node in template.find_all(nodes.Name) if node.ctx == "load")
    contents, arguments = _Field(template, "content"), _Field(template, "arguments")
    takes_parts = contents.is_looped_over()
    return TemplateFacts(
        reads,
        takes_parts,
        takes_texts=not takes_parts or contents.is_tested("string"),
        # Beside other tests for an empty content, null has no meaning of its own.
        takes_none=contents.is_tested("none", outside=nodes.Or) and _Field(template, "tool_calls").is_read(),
        takes_objects=not arguments.is_added_to_text() or arguments.is_converted() or arguments.is_tested("string"),
        takes_developer=any(constant.value == "developer" for constant in template.find_all(nodes.Const)),
    )


class _Field:
    """The expressions whose value is one field of messages or calls: `message.content`, and variables and arguments of
    macros that have been given such a value."""

    def __init__(self, template: nodes.Template, name: str) -> None:
        self._template = template
        self._field = name
        self._names: set[str] = set()
        given = list(self._given_values())
        while found := {name for name, value in given if name not in self._names and self._is_field(value)}:
            self._names |= found

    def is_read(self) -> bool:
        return any(map(self._is_field, self._template.find_all((nodes.Getattr, nodes.Getitem))))

    def is_looped_over(self) -> bool:
        loops = (loop for loop in self._template.find_all(nodes.For) if self._is_field(loop.iter))
        return any(_reads_parts(loop) for loop in loops)

    def is_tested(self, test: str, outside: type[nodes.Node] | None = None) -> bool:
        """Whether there is a test such as `message.content is string`, other than within a node of type `outside`."""
        within = self._template.find_all(outside) if outside else ()
        left_out = {id(found) for node in within for found in node.find_all(nodes.Test)}
        tests = (found for found in self._template.find_all(nodes.Test) if found.name == test)
        return any(self._is_field(found.node) and id(found) not in left_out for found in tests)

    def is_added_to_text(self) -> bool:
        sums = self._template.find_all(nodes.Add)
        return any(self._is_field(operand) for node in sums for operand in (node.left, node.right))

    def is_converted(self) -> bool:
        """Whether it is written as JSON somewhere, or its items are read."""
        filters = (node.node for node in self._template.find_all(nodes.Filter) if node.name == "tojson")
        reads = (node.node for node in self._template.find_all(nodes.Getattr) if node.attr == "items")
        return any(self._is_field(node) for node in (*filters, *reads))

    def _given_values(self) -> Iterator[tuple[str, nodes.Node]]:
        """Each variable with a value that it is set to, and each argument of a macro with a value that it gets."""
        for assignment in self._template.find_all(nodes.Assign):
            if isinstance(assignment.target, nodes.Name):
                yield assignment.target.name, assignment.node
        macros = {macro.name: macro for macro in self._template.find_all(nodes.Macro)}
        for call in self._template.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in macros:
                arguments = macros[call.node.name].args
                yield from ((argument.name, value) for argument, value in zip(arguments, call.args, strict=False))

    def _is_field(self, node: nodes.Node | None) -> bool:
        match node:
            case nodes.Name(name=name):
                return name in self._names
            case nodes.Getattr(attr=name) | nodes.Getitem(arg=nodes.Const(value=name)):
                return bool(name == self._field)
            case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value=name), *_]):
                return bool(name == self._field)
            case nodes.Filter(node=inner, name=name) if name != "tojson":
                return self._is_field(inner)
            case nodes.CondExpr(expr1=first, expr2=second) | nodes.Or(left=first, right=second):
                return self._is_field(first) or self._is_field(second)
        return False


def _reads_parts(loop: nodes.For) -> bool:
    """Whether the loop reads fields of a part: `part.type`, `part['text']`, `'text' in part`, `selectattr('type')`."""
    read = {node.attr for node in loop.find_all(nodes.Getattr)}
    return any(field in read for field in PART_FIELDS) or any(
        node.value in PART_FIELDS for node in loop.find_all(nodes.Const)
    )
