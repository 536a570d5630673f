"""The shape of a function: what is left of it without its names and its constants."""

import ast
import copy


def shape(function: ast.FunctionDef) -> str:
    """The same text for two functions that differ in no more than the names of the function, its
    arguments and its local variables, in constants, and in the docstring."""
    function = copy.deepcopy(function)
    local = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            local.add(node.id)
        elif isinstance(node, ast.FunctionDef):
            local.add(node.name)
            if ast.get_docstring(node) is not None:
                del node.body[0]
    return ast.dump(_Plain(local).visit(function))


def statements(function: ast.FunctionDef) -> int:
    """How many statements a function has, its own head and docstring not counted."""
    inner = sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1
    return inner - (ast.get_docstring(function) is not None)


class _Plain(ast.NodeTransformer):
    """Numbers the local names in their order, and leaves of a constant its type."""

    def __init__(self, local: set[str]):
        self.local, self.numbers = local, {}

    def plain(self, name: str) -> str:
        if name not in self.local:
            return name
        return f"name {self.numbers.setdefault(name, len(self.numbers))}"

    def visit_Name(self, node):
        return ast.Name(self.plain(node.id), node.ctx)

    def visit_arg(self, node):
        return ast.arg(self.plain(node.arg))

    def visit_FunctionDef(self, node):
        node.name = self.plain(node.name)
        return self.generic_visit(node)

    def visit_Constant(self, node):
        return ast.Constant(type(node.value).__name__)

    def visit_JoinedStr(self, node):
        return ast.Constant("str")
