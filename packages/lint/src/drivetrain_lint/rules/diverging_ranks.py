"""Collectives that only some ranks call: DT101 to DT106."""

from collections.abc import Iterator

from drivetrain_lint.finding import Hit, Severity
from drivetrain_lint.flow.divergences import Divergence, Parting
from drivetrain_lint.flow.program import Program
from drivetrain_lint.rules.rule import Rule
from drivetrain_messages import format_count, list_some

_WAITS = "The ranks that call it wait for the others, until the timeout ends the run."
_MOST_LINES = 5  # of further calls that a finding names
_ON_SOME = frozenset({Parting.CONDITION, Parting.DECORATOR})


def _some_ranks(program: Program) -> Iterator[Hit]:
    for divergence in _of(program, _ON_SOME, departs=False):
        cause, first = divergence.cause, divergence.reached[0]
        under = f"`{cause.test}` (line {cause.line})"
        what = f"{first.described()} is called only on the ranks that {under} lets in{_more(divergence)}"
        if cause.kind is Parting.DECORATOR:
            what = f"{first.described()} is called in a function that {under} runs on one rank{_more(divergence)}"
        if first.collective.trains:
            what += "; the weights of these ranks change, those of the others do not"
        yield Hit(node=first.call, what=what)


def _departures(
    program: Program, kinds: frozenset[Parting] = _ON_SOME | {Parting.LOOP, Parting.TURNS}
) -> Iterator[Hit]:
    for divergence in _of(program, kinds, departs=True):
        assert divergence.cause.departure is not None
        yield Hit(node=divergence.cause.departure, what=_skips(divergence))


def _loops(program: Program) -> Iterator[Hit]:
    for divergence in _of(program, {Parting.LOOP}, departs=False):
        cause, first = divergence.cause, divergence.reached[0]
        what = (
            f"{first.described()} is called once a round of `for ... in {cause.test}` (line {cause.line}), "
            f"which may have another number of rounds on each rank{_more(divergence)}"
        )
        yield Hit(node=first.call, what=what)


def _handlers(program: Program) -> Iterator[Hit]:
    for divergence in _of(program, {Parting.HANDLER}, departs=False):
        cause, first = divergence.cause, divergence.reached[0]
        if first.line < cause.line:
            what = (
                f"`{cause.test}` lets a rank go on after an error in the block that calls {first.described()} "
                f"(line {first.line}): a rank that fails before it skips it"
            )
            yield Hit(node=cause.node, what=what)
        else:
            what = f"{first.described()} is called in `{cause.test}` (line {cause.line})"
            yield Hit(node=first.call, what=f"{what}, which one rank may enter alone{_more(divergence)}")
    yield from _departures(program, frozenset({Parting.HANDLER}))


def _turns(program: Program) -> Iterator[Hit]:
    for divergence in _of(program, {Parting.TURNS}, departs=False):
        cause, first = divergence.cause, divergence.reached[0]
        what = f"{first.described()} is called in `with {cause.test}:` (line {cause.line}), where ranks take turns"
        yield Hit(node=first.call, what=f"{what}{_more(divergence)}")


def _data(program: Program) -> Iterator[Hit]:
    yield from _departures(program, frozenset({Parting.DATA}))
    for divergence in _of(program, {Parting.DATA}, departs=False):
        cause, first = divergence.cause, divergence.reached[0]
        what = f"{first.described()} is called only on ranks where `{cause.test}` (line {cause.line}) is true"
        yield Hit(node=first.call, what=f"{what}{_more(divergence)}")


def _of(program: Program, kinds: set[Parting] | frozenset[Parting], *, departs: bool) -> Iterator[Divergence]:
    for divergence in program.divergences:
        if divergence.cause.kind in kinds and (divergence.cause.departure is not None) is departs:
            yield divergence


def _skips(divergence: Divergence) -> str:
    cause = divergence.cause
    line = getattr(cause.departure, "lineno", 0)
    waiting = [each for each in divergence.reached if not each.collective.trains] or list(divergence.reached)
    first = next((each for each in waiting if each.line > line), waiting[0])
    word = {"Return": "return", "Break": "break", "Continue": "continue"}.get(
        type(cause.departure).__name__, "exit"
    )
    where = f"line {first.line}" if first.line > line else f"line {first.line}, in the next round"
    return (
        f"`{word}` on the ranks where `{cause.test}` (line {cause.line}) holds: they skip "
        f"{first.described()} at {where}"
    )


def _more(divergence: Divergence) -> str:
    others = divergence.reached[1:]
    if not others:
        return ""
    lines = list_some((each.line for each in others), most=_MOST_LINES)
    where = "line" if len(others) == 1 else "lines"
    return f"; and {format_count(len(others), 'more call')} ({where} {lines})"


RULES = (
    Rule(
        code="DT101",
        name="collective-on-some-ranks",
        severity=Severity.ERROR,
        summary="A call that all ranks must make stands under a test of the rank.",
        why=_WAITS,
        mend="Call it on all ranks, before the test, and keep under the test only what one rank "
        "does with the result.",
        check=_some_ranks,
    ),
    Rule(
        code="DT102",
        name="departure-of-some-ranks",
        severity=Severity.ERROR,
        summary="Some ranks return, break, continue or exit, and skip a call that all ranks must make.",
        why="The ranks that stay wait in it for those that left, until the timeout ends the run.",
        mend="Let all ranks decide alike: reduce or broadcast the decision, or use set_trigger() "
        "and check_trigger().",
        check=_departures,
    ),
    Rule(
        code="DT103",
        name="collective-in-uneven-loop",
        severity=Severity.WARNING,
        summary="A loop over a rank's share of the data calls what all ranks must call as often.",
        why="Shares differ by one item when the data do not divide: the rank with more rounds waits in the last one.",
        mend="Collect the results in a list and gather once after the loop, or pad the shares "
        "(split_between_processes(..., apply_padding=True)).",
        check=_loops,
    ),
    Rule(
        code="DT104",
        name="collective-and-exception",
        severity=Severity.WARNING,
        summary="A rank that catches an exception calls, or skips, what all ranks must call.",
        why="An exception on one rank is not one on the others: they wait, or a later call meets the wrong one.",
        mend="Let the exception end the run, or tell all ranks of it first (set_trigger() and check_trigger()), "
        "and act on all of them.",
        check=_handlers,
    ),
    Rule(
        code="DT105",
        name="collective-while-taking-turns",
        severity=Severity.ERROR,
        summary="A call that all ranks must make stands inside main_process_first().",
        why="The first rank waits in it for ranks that wait at the block's entry for the first one.",
        mend="Move it before or after the block.",
        check=_turns,
    ),
    Rule(
        code="DT106",
        name="departure-on-own-data",
        severity=Severity.WARNING,
        summary="A rank skips a call that all ranks must make because its own loss is not finite.",
        why="The loss of one rank's batch may be NaN while those of the others are not: they wait for this rank.",
        mend="Decide on a value that all ranks share: accelerator.reduce(loss) or dist.all_reduce "
        "before the test, or set_trigger() and check_trigger().",
        check=_data,
    ),
)
