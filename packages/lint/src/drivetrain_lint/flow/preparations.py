"""The calls of `prepare` in a script, and the names that go in and come out."""

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from drivetrain_lint.reading.imports import last_name, word_set, written
from drivetrain_lint.reading.script import Scope, Script

# Calls that take a model, an optimizer or a loader and prepare nothing.
_HARMLESS = word_set(
    "enumerate tqdm iter len next zip range print isinstance hasattr id type islice track sum list get_scheduler "
    "ceil"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """A call of `prepare`: the names of its arguments (empty for other expressions) and of its results."""

    node: ast.Call
    scope: Scope
    arguments: list[str]
    results: list[str]
    is_unpacked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedNames:
    """The names around `prepare` in a script; objects passed to other functions may be prepared there."""

    arguments: frozenset[str]
    results: frozenset[str]
    handed_on: frozenset[str]


def read_preparations(script: Script) -> list[Preparation]:
    """Return the calls of an Accelerator's `prepare`, in the order of the source."""
    found: list[Preparation] = []
    for call in script.method_calls("prepare"):
        match script.parents.get(call):
            case ast.Assign(targets=[ast.Tuple(elts=results) | ast.List(elts=results)]):
                is_unpacked = not any(isinstance(each, ast.Starred) for each in results)
                results = results if is_unpacked else []
            case ast.Assign(targets=results) if len(results) == 1:
                is_unpacked = False
            case _:
                results, is_unpacked = [], False
        starred = any(isinstance(each, ast.Starred) for each in call.args)
        found.append(
            Preparation(
                node=call,
                scope=script.scope_of(call),
                arguments=[""] if starred else [written(each) for each in call.args],
                results=[written(each) for each in results],
                is_unpacked=is_unpacked,
            )
        )
    return found


def read_prepared_names(script: Script, preparations: Iterable[Preparation]) -> PreparedNames:
    """Return the names around `prepare` in a script."""
    arguments: set[str] = set()
    handed_on: set[str] = set()
    for node in script.nodes:  # what containers, attributes, other names and callers take
        match node:
            case ast.Return() | ast.Yield() if node.value is not None:
                handed_on |= set(map(written, ast.walk(node.value)))
            case ast.List(ctx=ast.Load()) | ast.Tuple(ctx=ast.Load()) | ast.Set():
                handed_on |= set(map(written, node.elts))
            case ast.Dict():
                handed_on |= set(map(written, node.values))
            case ast.Assign():
                handed_on.add(written(node.value))
            case _:
                pass
    for call in script.calls():
        last = last_name(call.func)
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if "prepare" in last:
            arguments |= {written(each) for argument in given for each in ast.walk(argument)}
        elif last not in _HARMLESS and not last.endswith(("LR", "Scheduler", "schedule", "scheduler")):
            handed_on |= set(map(written, given))
    return PreparedNames(
        arguments=frozenset(arguments - {""}),
        results=frozenset(name for each in preparations for name in each.results),
        handed_on=frozenset(handed_on - {""}),
    )
