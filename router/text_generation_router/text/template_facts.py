"""Facts about a chat template that decide what it is given: which variables it reads, and whether it takes a message's
content as a text or as a list of parts."""

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


def facts_of(template: nodes.Template) -> TemplateFacts:
    reads = frozenset(node.name for node in template.find_all(nodes.Name) if node.ctx == "load")
    contents = _Contents(template)
    takes_parts = contents.are_looped_over()
    return TemplateFacts(reads, takes_parts, not takes_parts or contents.are_tested_for_text())


class _Contents:
    """The expressions whose value is a message's content: `message.content`, and variables and arguments of macros that
    have been given one."""

    def __init__(self, template: nodes.Template) -> None:
        self._template = template
        self._names: set[str] = set()
        given = list(self._given_values())
        while found := {name for name, value in given if name not in self._names and self._is_content(value)}:
            self._names |= found

    def are_looped_over(self) -> bool:
        loops = (loop for loop in self._template.find_all(nodes.For) if self._is_content(loop.iter))
        return any(_reads_parts(loop) for loop in loops)

    def are_tested_for_text(self) -> bool:
        tests = (test for test in self._template.find_all(nodes.Test) if test.name == "string")
        return any(self._is_content(test.node) for test in tests)

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

    def _is_content(self, node: nodes.Node | None) -> bool:
        match node:
            case nodes.Name(name=name):
                return name in self._names
            case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
                return True
            case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value="content"), *_]):
                return True
            case nodes.Filter(node=inner):
                return self._is_content(inner)
            case nodes.CondExpr(expr1=first, expr2=second) | nodes.Or(left=first, right=second):
                return self._is_content(first) or self._is_content(second)
        return False


def _reads_parts(loop: nodes.For) -> bool:
    """Whether the loop reads fields of a part: `part.type`, `part['text']`, `'text' in part`, `selectattr('type')`."""
    read = {node.attr for node in loop.find_all(nodes.Getattr)}
    return any(field in read for field in PART_FIELDS) or any(
        node.value in PART_FIELDS for node in loop.find_all(nodes.Const)
    )
