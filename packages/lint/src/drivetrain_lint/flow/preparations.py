"""The calls of `prepare` in a script, and the names that go in and come out."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from drivetrain_lint.reading.imports import word_set, written
from drivetrain_lint.reading.script import Scope, Script

# Calls that take a model, an optimizer or a loader and prepare nothing.
_HARMLESS = word_set(
    "enumerate tqdm iter len next zip range print isinstance hasattr id type islice track sum list get_scheduler "
    "ceil"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """A call of `prepare`.

    Attributes:
        node: The statement or call.
        scope: The function or module with the call.
        arguments: The names of the objects; empty text for those without one.
        results: The names that take the results; empty if none does.
        is_unpacked: Whether a tuple of names takes them.
    """

    node: ast.AST
    scope: Scope
    arguments: list[str]
    results: list[str]
    is_unpacked: bool

    @property
    def line(self) -> int:
        """The line of the call."""
        return getattr(self.node, "lineno", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedNames:
    """The names around `prepare` in a whole script.

    Attributes:
        arguments: The names that go in, in any call whose name says `prepare`.
        results: The names that come out.
        handed_on: The names that other functions, containers or attributes take, which may prepare them.
    """

    arguments: frozenset[str]
    results: frozenset[str]
    handed_on: frozenset[str]


def read_preparations(script: Script) -> list[Preparation]:
    """Return the calls of an Accelerator's `prepare`, in order."""
    found: list[Preparation] = []
    for call in script.method_calls("prepare"):
        starred = any(isinstance(each, ast.Starred) for each in call.args)
        statement = script.parents.get(call)
        results, is_unpacked = _results(statement)
        found.append(
            Preparation(
                node=call,
                scope=script.scope_of(call),
                arguments=[""] if starred else [written(each) for each in call.args],
                results=results,
                is_unpacked=is_unpacked,
            )
        )
    return sorted(found, key=lambda each: each.line)


def read_prepared_names(script: Script, preparations: list[Preparation]) -> PreparedNames:
    """Return the names around `prepare` in a script."""
    arguments: set[str] = set()
    results: set[str] = set()
    handed_on: set[str] = set()
    for call in script.calls():
        last = written(call.func).rpartition(".")[2]
        names = {written(each) for argument in _arguments(call) for each in ast.walk(argument)} - {""}
        if "prepare" in last:
            arguments |= names
        elif last not in _HARMLESS and not last.endswith(("LR", "Scheduler", "schedule", "scheduler")):
            handed_on |= {written(argument) for argument in _arguments(call)} - {""}
    for each in preparations:
        results |= set(each.results)
    handed_on |= set(_kept(script))
    return PreparedNames(
        arguments=frozenset(arguments), results=frozenset(results), handed_on=frozenset(handed_on)
    )


def _results(statement: ast.AST | None) -> tuple[list[str], bool]:
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return [], False
    target = statement.targets[0]
    if isinstance(target, ast.Tuple | ast.List):
        if any(isinstance(each, ast.Starred) for each in target.elts):
            return [], False
        return [written(each) for each in target.elts], True
    return [written(target)], False


def _arguments(call: ast.Call) -> Iterator[ast.expr]:
    yield from call.args
    yield from (keyword.value for keyword in call.keywords)


def _kept(script: Script) -> Iterator[str]:
    """Iterate over the names that containers, attributes, other names and callers take."""
    for node in script.nodes:
        if isinstance(node, ast.Return | ast.Yield) and node.value is not None:
            yield from (written(each) for each in ast.walk(node.value))
        elif isinstance(node, ast.List | ast.Tuple | ast.Set) and not isinstance(
            getattr(node, "ctx", None), ast.Store
        ):
            yield from (written(each) for each in node.elts)
        elif isinstance(node, ast.Dict):
            yield from (written(each) for each in node.values)
        elif isinstance(node, ast.Assign) and written(node.value):
            yield written(node.value)
