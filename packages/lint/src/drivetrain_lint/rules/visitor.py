"""The visitor of scripts, which passes calls and scopes with their surroundings to the rules."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drivetrain_lint.flow.collectives import names_optimizer
from drivetrain_lint.flow.program import Program
from drivetrain_lint.reading.imports import last_name, written
from drivetrain_lint.reading.script import Function, Loop, own_nodes

# Schedules of other things than the learning rate.
_OTHER_SCHEDULES = ("noise", "ema", "diff", "weight", "temp", "wd_", "beta", "timestep", "momentum")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitedCall:
    """A call of a script.

    Attributes:
        name: The dotted name of the function, with imports resolved; empty for other expressions.
        owner: The object whose method is called; for other calls, the function itself.
        method: The method; empty for other calls.
    """

    program: Program
    node: ast.Call
    name: str
    owner: ast.expr
    method: str

    @property
    def written(self) -> str:
        """The function as written; empty for other expressions than dotted names."""
        return written(self.node.func)

    @property
    def last(self) -> str:
        """The last part of the function's dotted name."""
        return self.name.rpartition(".")[2]

    @property
    def is_backward(self) -> bool:
        """True for a `backward`, the Accelerator's or a loss's."""
        return self.method == "backward" and not self.name.startswith("torch.autograd")

    @property
    def is_optimizer_step(self) -> bool:
        """True for the step of an optimizer."""
        return self.method == "step" and is_optimizer(self.program, self.owner)

    @property
    def is_schedule_step(self) -> bool:
        """True for the step of a learning rate schedule."""
        if self.method != "step" or len(self.node.args) > 1:
            return False
        makers = _find_makers(self.program, self.owner)
        last = last_name(self.owner).lower()
        is_named = "sched" in last and not any(word in last for word in _OTHER_SCHEDULES)
        return is_named or any(each.startswith("torch.optim.lr_scheduler.") for each in makers)

    @property
    def loops(self) -> list[Loop]:
        """The loops of the same function around this call, the inner first."""
        return [each for each in self.program.script.around(self.node) if isinstance(each, Loop)]

    def conditions(self, *, until: ast.AST | None = None) -> list[ast.If]:
        """Return the `if` statements of the same function around this call, up to another node."""
        found: list[ast.If] = []
        for each in self.program.script.around(self.node):
            if each is until:
                break
            if isinstance(each, ast.If):
                found.append(each)
        return found

    def is_chosen_against(self, method: str) -> bool:
        """Return whether another branch around this call calls `method` of the Accelerator instead."""
        script = self.program.script
        return any(
            any(script.method_calls(method, within=each)) or "accelerator" in ast.unparse(each.test).lower()
            for each in script.around(self.node)
            if isinstance(each, ast.If | ast.IfExp)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitedScope:
    """The module or a function of a script, with its nodes and calls outside inner functions."""

    program: Program
    node: ast.Module | Function
    nodes: tuple[ast.AST, ...]
    calls: tuple[VisitedCall, ...]

    def sequences(self) -> Iterator[list[ast.stmt]]:
        """Iterate over the blocks of this scope, each as a sequence of statements that run in order."""
        for node in (self.node, *self.nodes):
            if node is not self.node and isinstance(node, Function | ast.ClassDef):
                continue
            for block in ("body", "orelse", "finalbody"):
                statements = getattr(node, block, None)
                if isinstance(statements, list) and statements:
                    yield list(_straight_line(statements))


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """The single walk through a script; each rule visits some parts of it."""

    program: Program
    calls: tuple[VisitedCall, ...]
    scopes: tuple[VisitedScope, ...]


def visit(program: Program) -> Visitor:
    """Walk through a script."""
    visited = {call: _visited_call(program, call) for call in program.script.calls()}
    scopes: list[VisitedScope] = []
    for scope in program.script.all_scopes():
        nodes = tuple(own_nodes(ast.iter_child_nodes(scope)))
        calls = tuple(visited[node] for node in nodes if isinstance(node, ast.Call))
        scopes.append(VisitedScope(program=program, node=scope, nodes=nodes, calls=calls))
    return Visitor(program=program, calls=tuple(visited.values()), scopes=tuple(scopes))


def is_optimizer(program: Program, node: ast.expr) -> bool:
    """Return whether an expression is an optimizer, by its name or by the call that made the object."""
    last = last_name(node)
    if "sched" in last.lower():
        return False
    return names_optimizer(last) or any(
        maker.startswith("torch.optim.") and ".lr_scheduler." not in maker
        for maker in _find_makers(program, node)
    )


def _find_makers(program: Program, node: ast.expr) -> list[str]:
    """Return the names of the functions whose results a name is bound to."""
    values = program.bindings.values(node)
    return [program.script.name_of(each.func) for each in values if isinstance(each, ast.Call)]


def calls_in(program: Program, node: ast.AST) -> Iterator[VisitedCall]:
    """Iterate over the calls in a scope or statement, but not in its inner functions."""
    for each in own_nodes(ast.iter_child_nodes(node)):
        if isinstance(each, ast.Call):
            yield _visited_call(program, each)


def _visited_call(program: Program, call: ast.Call) -> VisitedCall:
    owner, method = call.func, ""
    if isinstance(owner, ast.Attribute):
        owner, method = owner.value, owner.attr
    name = program.script.name_of(call.func)
    return VisitedCall(program=program, node=call, name=name, owner=owner, method=method)


def _straight_line(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in statements:
        if isinstance(statement, ast.With | ast.AsyncWith):
            yield from _straight_line(statement.body)
        else:
            yield statement
