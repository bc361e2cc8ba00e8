"""A script for the rules: resolved imports, scopes, functions, and the names of Accelerators."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from drivetrain_lint.reading.documents import Document
from drivetrain_lint.reading.imports import last_name, read_imports, resolved, written

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While

_ACCELERATOR = "Accelerator"
_SHARED_NODES = (ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop)
_FRAMEWORKS = ("accelerate", "drivetrain", "drivetrain_state")
_DISTRIBUTED = (*_FRAMEWORKS, "torch.distributed", "torch.nn.parallel", "deepspeed", "lightning_fabric")


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A parsed script.

    Attributes:
        scopes: The innermost function, or the module, that contains each node.
        nodes: All nodes, in the order of the source.
        functions: The functions of the file by name, methods under `Class.name`; the last definition counts.
        accelerators: The names, such as `self.accelerator`, that hold an Accelerator, drivetrain's or Accelerate's.
        is_distributed: Whether the script's imports show that it works with several processes.
    """

    document: Document
    imports: Mapping[str, str]
    parents: Mapping[ast.AST, ast.AST]
    scopes: Mapping[ast.AST, ast.Module | Function]
    nodes: tuple[ast.AST, ...]
    functions: Mapping[str, Function]
    accelerators: frozenset[str]
    uses_accelerator: bool
    is_distributed: bool

    def name_of(self, node: ast.AST) -> str:
        """Return the dotted name of an expression with imports resolved; empty for other expressions."""
        return resolved(node, self.imports)

    def is_accelerator(self, node: ast.AST) -> bool:
        """Return whether an expression holds an Accelerator."""
        last = last_name(node)
        if written(node) in self.accelerators or last == "accelerator" or last.endswith("_accelerator"):
            return True
        return _makes_accelerator(node, self.imports)

    def scope_of(self, node: ast.AST) -> ast.Module | Function:
        """Return the innermost function that contains a node, or the module."""
        return self.scopes.get(node, self.document.tree)

    def all_scopes(self) -> list[ast.Module | Function]:
        """Return the module and its functions, methods and functions in functions included."""
        return [self.document.tree, *(node for node in self.nodes if isinstance(node, Function))]

    def enclosing(self, node: ast.AST) -> Iterator[ast.AST]:
        """Iterate over the ancestors of a node, from the inside."""
        parent = self.parents.get(node)
        while parent is not None:
            yield parent
            parent = self.parents.get(parent)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Iterate over the ancestors of a node that are in the same function, from the inside."""
        for each in self.enclosing(node):
            if isinstance(each, Function):
                return
            yield each

    def callee(self, call: ast.Call) -> Function | None:
        """Return the function of this file that a call runs; None if the name does not tell."""
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


def own_nodes(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Iterate over nodes and their descendants in source order, without bodies of inner functions and classes."""
    waiting = [*nodes][::-1]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            waiting += [*ast.iter_child_nodes(node)][::-1]


def read_script(document: Document) -> Script:
    """Resolve the imports, scopes, functions and Accelerators of a parsed file."""
    imports = read_imports(document.tree)
    parents: dict[ast.AST, ast.AST] = {}
    scopes: dict[ast.AST, ast.Module | Function] = {}
    functions: dict[str, Function] = {}
    nodes: list[ast.AST] = []
    accelerators: set[str] = set()
    waiting: list[ast.AST] = [document.tree]
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        match node:
            case ast.Assign() if _makes_accelerator(node.value, imports):
                accelerators |= set(map(written, node.targets))
            case ast.AnnAssign() if node.value and _makes_accelerator(node.value, imports):
                accelerators.add(written(node.target))
            case ast.withitem() if node.optional_vars and _makes_accelerator(node.context_expr, imports):
                accelerators.add(written(node.optional_vars))
            case ast.arg() if node.annotation:
                annotation = ast.unparse(node.annotation).strip("\"'").removesuffix(" | None")
                if annotation.rpartition(".")[2] == _ACCELERATOR:
                    accelerators.add(node.arg)
            case _:
                pass
        if isinstance(node, Function):
            parent = parents[node]
            prefix = f"{parent.name}." if isinstance(parent, ast.ClassDef) else ""
            functions[f"{prefix}{node.name}"] = node
        # Contexts and operators are shared between the nodes of a tree: they have no one parent.
        children = [each for each in ast.iter_child_nodes(node) if not isinstance(each, _SHARED_NODES)]
        parents |= dict.fromkeys(children, node)
        scopes |= dict.fromkeys(children, node if isinstance(node, ast.Module | Function) else scopes[node])
        waiting += reversed(children)
    uses = bool(accelerators) or _comes_from(imports.values(), _FRAMEWORKS)
    return Script(
        document=document,
        imports=imports,
        parents=parents,
        scopes=scopes,
        nodes=tuple(nodes),
        functions=functions,
        accelerators=frozenset(accelerators),
        uses_accelerator=uses,
        is_distributed=uses
        or _comes_from(imports.values(), _DISTRIBUTED)
        or any(
            isinstance(node, ast.Attribute) and resolved(node, imports) == "torch.distributed"
            for node in nodes
        ),
    )


def _comes_from(names: Iterable[str], packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in names for package in packages)


def _makes_accelerator(value: ast.AST, imports: Mapping[str, str]) -> bool:
    return isinstance(value, ast.Call) and resolved(value.func, imports).rpartition(".")[2] == _ACCELERATOR
