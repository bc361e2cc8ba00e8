"""A script as the rules read it: imports resolved, scopes, functions, and the objects that are Accelerators."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from drivetrain_lint.reading.documents import Document
from drivetrain_lint.reading.imports import read_imports, resolved, written

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Function = ast.FunctionDef | ast.AsyncFunctionDef

_ACCELERATORS = frozenset({"Accelerator"})
_SHARED_NODES = (ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop)
_FRAMEWORKS = ("accelerate", "drivetrain", "drivetrain_state")
_DISTRIBUTED = (*_FRAMEWORKS, "torch.distributed", "torch.nn.parallel", "deepspeed", "lightning_fabric")


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A parsed script.

    Attributes:
        document: The parsed file.
        imports: The dotted name that each imported name stands for.
        parents: The parent of each node.
        scopes: The innermost function or module of each node that has one.
        nodes: All nodes, in the order of the source.
        own: The nodes of each function and of the module, without those of functions and classes in it.
        all_functions: The functions of the file, methods and functions in functions included.
        functions: The functions of the file by name, methods under `Class.name`; the last definition counts.
        accelerators: The names, such as `accelerator` and `self.accelerator`, that hold an Accelerator.
        uses_accelerator: Whether the script trains through an Accelerator, drivetrain's or Accelerate's.
        is_distributed: Whether the script works with several processes at all, as far as its imports tell.
    """

    document: Document
    imports: Mapping[str, str]
    parents: Mapping[ast.AST, ast.AST]
    scopes: Mapping[ast.AST, Scope]
    nodes: tuple[ast.AST, ...]
    own: Mapping[ast.AST, tuple[ast.AST, ...]]
    all_functions: tuple[Function, ...]
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

    def own_nodes(self, within: ast.AST) -> Iterator[ast.AST]:
        """Iterate over the nodes of a function, the module or a statement, without those of functions in it."""
        if within in self.own:
            yield from self.own[within]
            return
        for child in ast.iter_child_nodes(within):
            yield child
            if not isinstance(child, Function | ast.ClassDef | ast.Lambda):
                yield from self.own_nodes(child)

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
        for node in self.nodes if within is None or within is self.document.tree else ast.walk(within):
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
    nodes = (document.tree, *parents)
    accelerators = frozenset(_accelerators(nodes, imports))
    roots = set(imports.values())
    uses = bool(accelerators) or any(_within(name, _FRAMEWORKS) for name in roots)
    return Script(
        document=document,
        imports=imports,
        parents=parents,
        scopes=scopes,
        nodes=nodes,
        own=_own_nodes(nodes, parents),
        all_functions=tuple(node for node in nodes if isinstance(node, Function)),
        functions=functions,
        accelerators=accelerators,
        uses_accelerator=uses,
        is_distributed=uses
        or any(_within(name, _DISTRIBUTED) for name in roots)
        or any(
            isinstance(node, ast.Attribute) and resolved(node, imports) == "torch.distributed"
            for node in nodes
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
    waiting: list[tuple[ast.AST, ast.AST | None]] = [(tree, None)]
    while waiting:
        node, parent = waiting.pop()
        if parent is not None:
            parents[node] = parent
            scopes[node] = parent if isinstance(parent, ast.Module | Function) else scopes[parent]
        if isinstance(node, Function):
            prefix = f"{parent.name}." if isinstance(parent, ast.ClassDef) else ""
            functions[f"{prefix}{node.name}"] = node
        # Contexts and operators are shared between the nodes of a tree: they have no one parent.
        children = [each for each in ast.iter_child_nodes(node) if not isinstance(each, _SHARED_NODES)]
        waiting += [(child, node) for child in reversed(children)]


def _own_nodes(
    nodes: tuple[ast.AST, ...], parents: Mapping[ast.AST, ast.AST]
) -> dict[ast.AST, tuple[ast.AST, ...]]:
    owners: dict[ast.AST, ast.AST | None] = {}
    found: dict[ast.AST, list[ast.AST]] = {}
    for node in nodes:
        parent = parents.get(node)
        if parent is None:
            owner: ast.AST | None = None
        elif isinstance(parent, ast.Module | Function):
            owner = parent
        else:
            owner = None if isinstance(parent, ast.ClassDef | ast.Lambda) else owners[parent]
        owners[node] = owner
        if owner is not None:
            found.setdefault(owner, []).append(node)
    return {owner: tuple(listed) for owner, listed in found.items()}


def _accelerators(nodes: tuple[ast.AST, ...], imports: Mapping[str, str]) -> Iterator[str]:
    for node in nodes:
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
