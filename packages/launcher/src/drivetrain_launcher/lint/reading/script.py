"""A script as the rules read it: imports resolved, scopes, functions, and the objects that are Accelerators."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from drivetrain_launcher.lint.reading.documents import Document
from drivetrain_launcher.lint.reading.imports import read_imports, resolved, written

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Function = ast.FunctionDef | ast.AsyncFunctionDef

_ACCELERATORS = frozenset({"Accelerator"})
_FRAMEWORKS = ("accelerate", "drivetrain", "drivetrain_state")
_DISTRIBUTED = (*_FRAMEWORKS, "torch.distributed", "torch.nn.parallel", "deepspeed", "lightning_fabric")


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A parsed script.

    Attributes:
        document: The file.
        imports: The dotted name that each imported name stands for.
        parents: The parent of each node.
        scopes: The innermost function or module of each node that has one.
        functions: The functions of the file by name, methods under `Class.name`; the last definition counts.
        accelerators: The names, such as `accelerator` and `self.accelerator`, that hold an Accelerator.
        uses_accelerator: Whether the script trains through an Accelerator, drivetrain's or Accelerate's.
        is_distributed: Whether the script works with several processes at all, as far as its imports tell.
    """

    document: Document
    imports: Mapping[str, str]
    parents: Mapping[ast.AST, ast.AST]
    scopes: Mapping[ast.AST, Scope]
    functions: Mapping[str, Function]
    accelerators: frozenset[str]
    uses_accelerator: bool
    is_distributed: bool

    def name_of(self, node: ast.AST) -> str:
        """Return the dotted name of an expression with imports resolved; empty for other expressions."""
        return resolved(node, self.imports)

    def is_accelerator(self, node: ast.AST) -> bool:
        """Return whether an expression holds an Accelerator."""
        name = written(node)
        last = name.rpartition(".")[2]
        if name in self.accelerators or last == "accelerator" or last.endswith("_accelerator"):
            return True
        return isinstance(node, ast.Call) and self.name_of(node.func).rpartition(".")[2] in _ACCELERATORS

    def scope_of(self, node: ast.AST) -> Scope:
        """Return the innermost function that contains a node, or the module."""
        return self.scopes.get(node, self.document.tree)

    def enclosing(self, node: ast.AST) -> Iterator[ast.AST]:
        """Iterate over the ancestors of a node, from the inside."""
        parent = self.parents.get(node)
        while parent is not None:
            yield parent
            parent = self.parents.get(parent)

    def callee(self, call: ast.Call) -> Function | None:
        """Return the function of this file that a call runs, if the name tells."""
        if isinstance(call.func, ast.Name):
            return self.functions.get(call.func.id)
        name = written(call.func)
        if name.startswith(("self.", "cls.")) and name.count(".") == 1:
            owner = next((each for each in self.enclosing(call) if isinstance(each, ast.ClassDef)), None)
            return None if owner is None else self.functions.get(f"{owner.name}.{name.partition('.')[2]}")
        return None

    def calls(self, within: ast.AST | None = None) -> Iterator[ast.Call]:
        """Iterate over all calls of the script, or of a node."""
        for node in ast.walk(within or self.document.tree):
            if isinstance(node, ast.Call):
                yield node

    def method_calls(self, *methods: str, within: ast.AST | None = None) -> Iterator[ast.Call]:
        """Iterate over the calls of an Accelerator's methods."""
        for call in self.calls(within):
            if (
                isinstance(call.func, ast.Attribute)
                and call.func.attr in methods
                and self.is_accelerator(call.func.value)
            ):
                yield call


def read_script(document: Document) -> Script:
    """Return what the rules need to know about a parsed file."""
    imports = read_imports(document.tree)
    parents: dict[ast.AST, ast.AST] = {}
    scopes: dict[ast.AST, Scope] = {}
    functions: dict[str, Function] = {}
    _map_tree(document.tree, parents, scopes, functions)
    accelerators = frozenset(_accelerators(document.tree, imports))
    roots = set(imports.values())
    uses = bool(accelerators) or any(_within(name, _FRAMEWORKS) for name in roots)
    return Script(
        document=document,
        imports=imports,
        parents=parents,
        scopes=scopes,
        functions=functions,
        accelerators=accelerators,
        uses_accelerator=uses,
        is_distributed=uses
        or any(_within(name, _DISTRIBUTED) for name in roots)
        or any(
            isinstance(node, ast.Attribute) and resolved(node, imports) == "torch.distributed"
            for node in ast.walk(document.tree)
        ),
    )


def _within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _map_tree(
    tree: ast.Module,
    parents: dict[ast.AST, ast.AST],
    scopes: dict[ast.AST, Scope],
    functions: dict[str, Function],
) -> None:
    waiting: list[tuple[ast.AST, Scope]] = [(tree, tree)]
    while waiting:
        node, scope = waiting.pop()
        inner = node if isinstance(node, Function) else scope
        for child in ast.iter_child_nodes(node):
            parents[child] = node
            scopes[child] = inner
            waiting.append((child, inner))
            if isinstance(child, Function):
                prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
                functions[f"{prefix}{child.name}"] = child


def _accelerators(tree: ast.Module, imports: Mapping[str, str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _makes_accelerator(node.value, imports):
            yield from (written(target) for target in node.targets)
        elif isinstance(node, ast.AnnAssign) and node.value and _makes_accelerator(node.value, imports):
            yield written(node.target)
        elif isinstance(node, ast.withitem) and node.optional_vars:
            if _makes_accelerator(node.context_expr, imports):
                yield written(node.optional_vars)
        elif isinstance(node, ast.arg) and node.annotation is not None:
            annotation = ast.unparse(node.annotation).strip("\"'")
            if annotation.removesuffix(" | None").rpartition(".")[2] in _ACCELERATORS:
                yield node.arg


def _makes_accelerator(value: ast.expr, imports: Mapping[str, str]) -> bool:
    return isinstance(value, ast.Call) and resolved(value.func, imports).rpartition(".")[2] in _ACCELERATORS
