"""A script with what the flow model found in it."""

import ast
from dataclasses import dataclass

from drivetrain_lint.flow.bindings import Bindings, read_bindings
from drivetrain_lint.flow.branches import text_of
from drivetrain_lint.flow.collectives import CollectiveNames, collective_names
from drivetrain_lint.flow.divergences import Cause, Divergence, Parting
from drivetrain_lint.flow.preparations import (
    Preparation,
    PreparedNames,
    read_preparations,
    read_prepared_names,
)
from drivetrain_lint.flow.rank_tests import RankTests
from drivetrain_lint.flow.signatures import Signatures
from drivetrain_lint.flow.walk import Walk
from drivetrain_lint.reading.documents import Document
from drivetrain_lint.reading.imports import word_set, written
from drivetrain_lint.reading.script import Function, Script, read_script

ONE_RANK = word_set(
    "main_process_only master_only on_last_process on_local_main_process on_local_process on_main_process on_process "
    "rank_zero_only"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A script and its flow, which the rules read.

    Attributes:
        script: The script, as the rules read it.
        bindings: The values of its names.
        collectives: The judge of its collectives.
        tests: The judge of its rank conditions.
        divergences: The collectives that some ranks miss.
        preparations: The calls of `prepare`.
        prepared: The names around these calls.
    """

    script: Script
    bindings: Bindings
    collectives: CollectiveNames
    tests: RankTests
    divergences: tuple[Divergence, ...]
    preparations: tuple[Preparation, ...]
    prepared: PreparedNames


def read_program(document: Document) -> Program:
    """Return a parsed file with its flow."""
    script = read_script(document)
    bindings, names = read_bindings(script), collective_names(script)
    tests = RankTests(bindings=bindings, collectives=names)
    preparations = read_preparations(script)
    return Program(
        script=script,
        bindings=bindings,
        collectives=names,
        tests=tests,
        divergences=tuple(_divergences(script, bindings, names, tests)) if script.is_distributed else (),
        preparations=tuple(preparations),
        prepared=read_prepared_names(script, preparations),
    )


def _divergences(
    script: Script, bindings: Bindings, names: CollectiveNames, tests: RankTests
) -> list[Divergence]:
    if not any(names.of(call) for call in script.calls()):
        return []
    signatures = Signatures(names=names, tests=tests)
    found: list[Divergence] = []
    for scope in [script.document.tree, *script.all_functions]:
        walk = Walk(signatures=signatures, tests=tests, bindings=bindings)
        walk.block(scope.body, _decorated(scope) if isinstance(scope, Function) else None)
        found += walk.divergences()
    return [*found, *_wrapped(script, signatures)]


def _decorated(function: Function) -> Cause | None:
    """Return the decorator that has a function run on one rank."""
    for decorator in function.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        inner = getattr(decorator, "args", [])
        names = [written(called), *(written(each) for each in inner)]  # @partial(accelerator.on_process, ...)
        if any(name.rpartition(".")[2] in ONE_RANK for name in names):
            return Cause(kind=Parting.DECORATOR, node=decorator, test=f"@{text_of(decorator)}")
    return None


def _wrapped(script: Script, signatures: Signatures) -> list[Divergence]:
    """Return functions with collectives that are wrapped in a call, `accelerator.on_main_process(function)`."""
    found: list[Divergence] = []
    for call in script.calls():
        if written(call.func).rpartition(".")[2] not in ONE_RANK:
            continue
        for argument in call.args:
            stand_in = ast.Call(func=argument, args=[], keywords=[])
            function = script.functions.get(written(argument))
            if function is None or (script.parents.get(call) is function):
                continue
            ast.copy_location(stand_in, call)
            reached = signatures.of_call(stand_in) if isinstance(argument, ast.Name) else []
            if reached:
                cause = Cause(kind=Parting.DECORATOR, node=call, test=text_of(call))
                found.append(Divergence(cause=cause, reached=tuple(reached)))
    return found
