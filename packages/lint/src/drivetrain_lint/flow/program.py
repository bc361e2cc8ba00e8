"""A script with its flow: divergences, bindings, collectives and prepared objects."""

import ast
from dataclasses import dataclass

from drivetrain_lint.flow.bindings import Bindings, read_bindings
from drivetrain_lint.flow.collectives import CollectiveNames, read_collectives
from drivetrain_lint.flow.divergences import Cause, Divergence, Parting, text_of
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
from drivetrain_lint.reading.imports import last_name, word_set
from drivetrain_lint.reading.script import Function, Script, read_script

ONE_RANK = word_set(
    "main_process_only master_only on_last_process on_local_main_process on_local_process on_main_process on_process "
    "rank_zero_only"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A script and its flow, for the rules; divergences are the collectives that some ranks miss."""

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
    bindings, names = read_bindings(script), read_collectives(script)
    tests = RankTests(bindings=bindings, collectives=names)
    divergences: list[Divergence] = []
    if script.is_distributed and any(map(names.of, script.calls())):
        signatures = Signatures(names=names, tests=tests)
        for scope in script.all_scopes():
            walk = Walk(signatures=signatures, tests=tests, bindings=bindings)
            cause = None
            for decorator in scope.decorator_list[::-1] if isinstance(scope, Function) else ():
                called = decorator.func if isinstance(decorator, ast.Call) else decorator
                inner = getattr(decorator, "args", [])  # @partial(accelerator.on_process, ...)
                if any(last_name(each) in ONE_RANK for each in (called, *inner)):
                    cause = Cause(kind=Parting.DECORATOR, node=decorator, test=f"@{text_of(decorator)}")
            walk.block(scope.body, cause)
            divergences += walk.divergences()
        # Functions with collectives that are wrapped in a call: `accelerator.on_main_process(function)`.
        for call in script.calls():
            for argument in call.args if last_name(call.func) in ONE_RANK else ():
                function = script.functions.get(argument.id) if isinstance(argument, ast.Name) else None
                if function is None or script.parents.get(call) is function:
                    continue
                if reached := signatures.through(function, call):
                    cause = Cause(kind=Parting.DECORATOR, node=call, test=text_of(call))
                    divergences.append(Divergence(cause=cause, reached=tuple(reached)))
    preparations = read_preparations(script)
    return Program(
        script=script,
        bindings=bindings,
        collectives=names,
        tests=tests,
        divergences=tuple(divergences),
        preparations=tuple(preparations),
        prepared=read_prepared_names(script, preparations),
    )
