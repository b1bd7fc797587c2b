"""The mutants of a source file. Each is one small change of one expression or statement, made in the text.

A mutant replaces a piece of the file by another text, so that it can be shown as a diff. Assertions, annotations,
messages, docstrings and calls of a logger are not changed, because no test should depend on their words.
"""

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.Pow: ast.Mult,
}  # fmt: skip
EXCHANGED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Mutant:
    id: str  # stays the same while the function keeps its name and the changed statement its text
    path: str
    operator: str
    where: str  # name of the function
    start: int  # the replaced text: characters from the start of the file
    end: int
    text: str  # the new text

    def applied(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]

    def diff(self, source: str) -> str:
        lines = unified_diff(source.splitlines(), self.applied(source).splitlines(), n=1, lineterm="")
        return "\n".join(line for line in lines if not line.startswith(("---", "+++")))


def mutants_of(path: Path, name: str) -> list[Mutant]:
    """All mutants of a file, in its order. `name` is the path under which they are listed."""
    source = path.read_text()
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    seen: Counter[tuple[str, ...]] = Counter()
    mutants = []
    for change in finder.changes:
        key = (name, change.where, change.operator, change.statement, source[change.start : change.end], change.text)
        seen[key] += 1
        number = hashlib.sha256("\0".join([*key, str(seen[key])]).encode()).hexdigest()[:10]
        mutant = Mutant(
            id=number,
            path=name,
            operator=change.operator,
            where=change.where,
            start=change.start,
            end=change.end,
            text=change.text,
        )
        if _compiles(mutant.applied(source)):
            mutants.append(mutant)
    return mutants


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Change:
    operator: str
    where: str
    statement: str
    start: int
    end: int
    text: str


class _Finder(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self.changes: list[_Change] = []
        self._source = source
        # kept as bytes, because ast's columns count bytes of UTF-8
        self._lines = [line.encode() for line in source.splitlines(keepends=True)]
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line.decode()))
        self._where = ["module"]
        self._statement = ""

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self._statement = ast.unparse(node).splitlines()[0]
            self._change_statement(node)
        elif isinstance(node, ast.expr):
            for operator, changed in _changed_expressions(node):
                self._add(operator, node, f"({ast.unparse(changed)})")
        self._descend(node)

    def _descend(self, node: ast.AST) -> None:
        name = getattr(node, "name", None) if isinstance(node, ast.stmt) else None  # name of a function or class
        if name:
            self._where.append(name)
        for child in _children(node):
            self.visit(child)
        if name:
            self._where.pop()

    def _change_statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() | ast.Delete():
                self._add("a statement left out", node, "pass")
            case ast.Continue():
                self._add("continue becomes break", node, "break")
            case ast.Break():
                self._add("break becomes continue", node, "continue")
            case ast.Return(value=ast.expr() as value) if not _is_none(value):
                self._add("returns None", node, "return None")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                self._add("an assignment left out", node, "pass")
            case ast.If(test=test) | ast.While(test=test) if not isinstance(test, ast.Compare | ast.UnaryOp):
                self._add("a condition turned round", test, f"(not ({ast.unparse(test)}))")

    def _add(self, operator: str, node: ast.stmt | ast.expr, text: str) -> None:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, end = self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)
        self.changes.append(
            _Change(
                operator=operator,
                where=".".join(self._where),
                statement=self._statement,
                start=start,
                end=end,
                text=text,
            )
        )

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1][:column].decode())


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes inside `node` that may be changed."""
    if _is_log(node) or isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases", "type_params", "type_comment"):
            continue
        if isinstance(node, ast.Raise) and field == "exc" and isinstance(value, ast.Call):
            continue  # the text of an error is not changed
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not (_is_log(child) or _is_for_types(child) or _asserts(child)):
                yield child


def _is_log(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "logger" | "logging")))):
            return True
    return False


def _asserts(node: ast.AST) -> bool:
    """Whether `node` is an assertion, or the `strict` of a zip: both state a fact that holds anyway."""
    return isinstance(node, ast.Assert) or (isinstance(node, ast.keyword) and node.arg == "strict")


def _is_for_types(node: ast.AST) -> bool:
    """Whether `node` is an `if TYPE_CHECKING`, or an alias of a type, which has a name with a capital letter."""
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name[0].isupper() and not name.isupper()
    return False


def _changed_expressions(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                changed = copy.deepcopy(node)
                changed.ops[i] = COMPARISONS[type(op)]()
                yield "a comparison", changed
        case ast.BinOp(op=op, left=left) if type(op) in ARITHMETIC and not _is_text(left):
            yield "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(op)](), node.right)
        case ast.BoolOp(op=op):
            yield "and or", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "a not left out", operand
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield "a sign left out", operand
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield "a choice turned round", ast.IfExp(test, orelse, body)
        case ast.Call():
            yield from _changed_calls(node)
        case ast.Constant(value=int() | float() as value):
            yield "a constant", ast.Constant(not value if isinstance(value, bool) else value + 1)


def _changed_calls(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    match node.func:
        case ast.Name(id=name) if name in EXCHANGED:
            yield f"{name} becomes {EXCHANGED[name]}", ast.Call(ast.Name(EXCHANGED[name]), node.args, node.keywords)
    if len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
        first, second, *rest = node.args
        if ast.dump(first) != ast.dump(second) and not _is_symmetric(node.func):
            yield "two arguments exchanged", ast.Call(node.func, [second, first, *rest], node.keywords)


def _is_symmetric(function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and function.id in ("min", "max", "zip", "isinstance", "cast")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
