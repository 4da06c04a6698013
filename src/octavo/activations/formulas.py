"""Read what a `forward` computes from its code, as a formula.

    formula_of(LlamaMLP).expression    ("call", ("attr", "down_proj"), ((Mult, ("call", …), …),), ())

A short forward is evaluated symbolically, plain methods of the same class inlined. Loops, in-place operators, closures,
decorators and `super()` may do more than an expression says: such a forward has no formula. The source is compiled
again and compared with the code object that runs. `Formula.holds` checks on every use that nothing was replaced since.
"""

import ast
import inspect
import linecache
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

Expression = Any  # Nested tuples: an operator or kind, then its operands

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub, ast.In, ast.MatMult, ast.Is, ast.IsNot)
_DEPTH = 3  # Maximum depth of method calls to inline


class _Unknown(Exception):
    """Code without an expression."""


@dataclass(frozen=True)
class Formula:
    # Result in terms of `("argument", index)` and `("attr", name)`, attributes of the module; and all calls, in order.
    expression: Expression
    functions: tuple[tuple[str, Any, CodeType], ...]  # The functions read: name in the class, function, and its code
    # Global names that they use: a namespace, a name in it, and its value.
    outside: tuple[tuple[dict[str, Any], str, Any], ...] = ()

    def holds(self, owner: type, module: nn.Module) -> bool:
        """Return whether the class still has these functions and the module overrides none but `forward`."""
        own = vars(module)
        return all(
            (name == "forward" or name not in own)
            and (getattr(owner, name, None), getattr(function, "__code__", None)) == (function, code)
            for name, function, code in self.functions
        ) and all(space.get(name) is value for space, name, value in self.outside)


def formula_of(owner: type, method: str = "forward") -> Formula | None:
    reader = _Reader(owner)
    try:
        result = reader.call(method, None, _DEPTH)
    except _Unknown:
        return None
    return Formula((result, tuple(reader.calls)), tuple(reader.functions), tuple(reader.outside))


def matches(pattern: Expression, expression: Expression, names: dict[str, str]) -> bool:
    """Return whether two expressions are equal up to names of attributes; add pattern name → actual name to `names`."""
    if isinstance(pattern, tuple) and isinstance(expression, tuple):
        if pattern[:1] == ("attr",) == expression[:1]:
            if pattern[1] in names:
                return bool(names[pattern[1]] == expression[1])
            if expression[1] in names.values():
                return False
            names[pattern[1]] = expression[1]
            return True
        return len(pattern) == len(expression) and all(
            matches(one, other, names) for one, other in zip(pattern, expression, strict=True)
        )
    return type(pattern) is type(expression) and bool(pattern == expression)


class _Reader:
    def __init__(self, owner: type) -> None:
        self.owner = owner
        self.functions: list[tuple[str, Any, CodeType]] = []
        self.outside: list[tuple[dict[str, Any], str, Any]] = []
        self.calls: list[Expression] = []

    def call(self, name: str, arguments: list[Expression] | None, depth: int) -> Expression:
        """Return the result of a method; without arguments, as a function of symbols."""
        function = inspect.getattr_static(self.owner, name, None)
        if depth == 0 or not isinstance(function, FunctionType):
            raise _Unknown
        definition = _definition(function)
        names = [argument.arg for argument in definition.args.args]
        if arguments is None:
            arguments = [("argument", index) for index in range(len(names) - 1)]
        if not names or len(arguments) != len(names) - 1:
            raise _Unknown
        self.functions.append((name, function, function.__code__))
        scope = dict(zip(names[1:], arguments, strict=True)) | {names[0]: ("self",)}
        return _Body(self, function.__globals__, scope, depth).run(definition.body)


class _Body:
    def __init__(self, reader: _Reader, outside: dict[str, Any], scope: dict[str, Expression], depth: int) -> None:
        self.reader, self.outside, self.scope, self.depth = reader, outside, scope, depth

    def run(self, body: list[ast.stmt]) -> Expression:
        """Return the value of the statements: a final return, and early returns under a condition."""
        for index, statement in enumerate(body):
            if isinstance(statement, ast.Return) and statement.value is not None and index == len(body) - 1:
                return self.value(statement.value)
            if isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[-1], ast.Return):
                condition, before = self.value(statement.test), dict(self.scope)
                early = self.run(statement.body)
                self.scope = before
                return ("if", condition, early, self.run(body[index + 1 :]))
            self.assign([statement])
        raise _Unknown

    def assign(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # a docstring
            if isinstance(statement, ast.If) and not statement.orelse:
                condition, before = self.value(statement.test), dict(self.scope)
                self.assign(statement.body)
                if self.scope.keys() != before.keys():
                    raise _Unknown
                for name, value in self.scope.items():
                    if value != before[name]:
                        self.scope[name] = ("if", condition, value, before[name])
            elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                self.bind(statement.targets[0], self.value(statement.value))
            else:
                raise _Unknown

    def bind(self, target: ast.expr, value: Expression) -> None:
        if isinstance(target, ast.Name):
            self.scope[target.id] = value
        elif isinstance(target, ast.Tuple):
            for index, part in enumerate(target.elts):
                self.bind(part, ("part", index, len(target.elts), value))
        else:
            raise _Unknown

    def value(self, node: ast.expr) -> Expression:
        if isinstance(node, ast.Constant):
            return ("constant", node.value)
        if isinstance(node, ast.Name):
            return self.scope[node.id] if node.id in self.scope else ("outside", self.read(self.outside, node.id))
        if isinstance(node, ast.Attribute):
            return self.attribute(self.value(node.value), node.attr)
        if isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS):
            return (type(node.op), self.value(node.left), self.value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, _OPERATORS):
            return (type(node.op), self.value(node.operand))
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], _OPERATORS):
            return (type(node.ops[0]), self.value(node.left), self.value(node.comparators[0]))
        if isinstance(node, ast.IfExp):
            return ("if", self.value(node.test), self.value(node.body), self.value(node.orelse))
        if isinstance(node, ast.List):
            return ("list", *(self.value(part) for part in node.elts))
        if isinstance(node, ast.Call):
            return self.called(node)
        raise _Unknown

    def read(self, space: dict[str, Any], name: str) -> Any:
        """Return a value of a namespace, and record it for `Formula.holds`."""
        if name not in space:
            raise _Unknown
        self.reader.outside.append((space, name, space[name]))
        return space[name]

    def attribute(self, owner: Expression, name: str) -> Expression:
        if owner == ("self",):
            return ("attr", name)
        if owner[0] == "outside":
            if not isinstance(owner[1], ModuleType):
                raise _Unknown
            return ("outside", self.read(vars(owner[1]), name))
        return ("get", name, owner)

    def called(self, node: ast.Call) -> Expression:
        if any(keyword.arg is None for keyword in node.keywords):
            raise _Unknown
        arguments = [self.value(argument) for argument in node.args]
        keywords = tuple(sorted((str(k.arg), self.value(k.value)) for k in node.keywords))
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value)
            static = inspect.getattr_static(self.reader.owner, node.func.attr, None)
            if owner == ("self",) and static is not None:
                if keywords:
                    raise _Unknown
                return self.reader.call(node.func.attr, arguments, self.depth - 1)
            if owner[0] not in ("self", "outside"):
                self.reader.calls.append(_method(node.func.attr, owner, arguments, keywords))
                return self.reader.calls[-1]
        call = ("call", self.value(node.func), tuple(arguments), keywords)
        self.reader.calls.append(call)
        return call


def _method(name: str, owner: Expression, arguments: list[Expression], keywords: tuple[Any, ...]) -> Expression:
    """Return a call of a tensor's method, in a canonical form."""
    if name == "float" and not arguments and not keywords:
        name, arguments = "to", [("outside", torch.float32)]
    elif name == "type_as" and len(arguments) == 1 and not keywords:
        name, arguments = "to", [("get", "dtype", arguments[0])]
    elif name == "to" and not arguments and len(keywords) == 1 and keywords[0][0] == "dtype":
        arguments, keywords = [keywords[0][1]], ()
    return ("method", name, owner, tuple(arguments), keywords)


def _definition(function: FunctionType) -> ast.FunctionDef:
    """Return the AST of a function; raise _Unknown unless its code matches."""
    code = function.__code__
    if function.__closure__ or function.__defaults__ or function.__kwdefaults__:
        raise _Unknown
    definition, compiled = _definitions("".join(linecache.getlines(code.co_filename))).get(
        (code.co_firstlineno, code.co_name), (None, None)
    )
    if definition is None or compiled is None or _body(compiled) != _body(code) or definition.decorator_list:
        raise _Unknown
    arguments = definition.args
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs:
        raise _Unknown
    return definition


@lru_cache(maxsize=64)
def _definitions(source: str) -> dict[tuple[int, str], tuple[ast.FunctionDef, CodeType]]:
    """Return the functions of a file by first line and name, as AST and code: its imports change how they compile."""
    try:
        tree = ast.parse(source)
        waiting = [compile(tree, "", "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return {}
    texts = {(node.lineno, node.name): node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    definitions = {}
    while waiting:
        code = waiting.pop()
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        key = code.co_firstlineno, code.co_name
        if key in texts:
            definitions[key] = texts[key], code
    return definitions


def _body(code: CodeType) -> Any:
    return code.co_name, code.co_code, code.co_consts, code.co_names, code.co_varnames, code.co_freevars
