"""Collectives that only some ranks call: DT101 to DT106."""

from collections.abc import Callable, Iterator

from drivetrain_lint.finding import Hit, Severity
from drivetrain_lint.flow.divergences import Divergence, Parting
from drivetrain_lint.rules.rule import Rule
from drivetrain_lint.rules.visitor import Visitor
from drivetrain_messages import format_count, list_some

_MOST_LINES = 5  # of further calls that a finding names
_DEPARTURES = {"Return": "return", "Break": "break", "Continue": "continue"}


def _visit_partings(
    *kinds: Parting, departures: bool = True, branches: bool = True
) -> Callable[[Visitor], Iterator[Divergence]]:
    """Return a visit of the divergences of some kinds, caused by departures of ranks or by branches."""

    def visit(visitor: Visitor) -> Iterator[Divergence]:
        for divergence in visitor.program.divergences:
            wanted = branches if divergence.cause.departure is None else departures
            if wanted and divergence.cause.kind in kinds:
                yield divergence

    return visit


def _describe(divergence: Divergence) -> Iterator[Hit]:
    cause, first = divergence.cause, divergence.reached[0]
    if cause.departure is not None:
        line = getattr(cause.departure, "lineno", 0)
        waiting = [each for each in divergence.reached if not each.collective.trains] or divergence.reached
        missed = next((each for each in waiting if each.line > line), waiting[0])
        word = _DEPARTURES.get(type(cause.departure).__name__, "exit")
        where = f"line {missed.line}" if missed.line > line else f"line {missed.line}, in the next round"
        what = (
            f"`{word}` on the ranks where `{cause.test}` (line {cause.line}) holds: they skip "
            f"{missed.described()} at {where}"
        )
        yield Hit(cause.departure, what)
    elif cause.kind is Parting.HANDLER and first.line < cause.line:
        what = (
            f"`{cause.test}` lets a rank go on after an error in the block that calls {first.described()} "
            f"(line {first.line}): a rank that fails before it skips it"
        )
        yield Hit(cause.node, what)
    else:
        place = {
            Parting.CONDITION: "only on the ranks that `{}` (line {}) lets in",
            Parting.DECORATOR: "in a function that `{}` (line {}) runs on one rank",
            Parting.LOOP: "once a round of `for ... in {}` (line {}), which may have another number of rounds "
            "on each rank",
            Parting.HANDLER: "in `{}` (line {}), which one rank may enter alone",
            Parting.TURNS: "in `with {}:` (line {}), where ranks take turns",
            Parting.DATA: "only on ranks where `{}` (line {}) is true",
        }[cause.kind].format(cause.test, cause.line)
        what = f"{first.described()} is called {place}"
        if others := divergence.reached[1:]:
            lines = list_some((each.line for each in others), most=_MOST_LINES)
            where = "line" if len(others) == 1 else "lines"
            what += f"; and {format_count(len(others), 'more call')} ({where} {lines})"
        if first.collective.trains and cause.kind in (Parting.CONDITION, Parting.DECORATOR):
            what += "; the weights of these ranks change, those of the others do not"
        yield Hit(first.call, what)


RULES = (
    Rule(
        code="DT101",
        name="collective-on-some-ranks",
        severity=Severity.ERROR,
        summary="A call that all ranks must make stands under a test of the rank.",
        why="The ranks that call it wait for the others, until the timeout ends the run.",
        repair="Call it on all ranks, before the test, and keep under the test only what one rank does with the "
        "result.",
        visits=_visit_partings(Parting.CONDITION, Parting.DECORATOR, departures=False),
        check=_describe,
    ),
    Rule(
        code="DT102",
        name="departure-of-some-ranks",
        severity=Severity.ERROR,
        summary="Some ranks return, break, continue or exit, and skip a call that all ranks must make.",
        why="The ranks that stay wait in it for those that left, until the timeout ends the run.",
        repair="Let all ranks decide alike: reduce or broadcast the decision, or use set_trigger() and "
        "check_trigger().",
        visits=_visit_partings(
            Parting.CONDITION, Parting.DECORATOR, Parting.LOOP, Parting.TURNS, branches=False
        ),
        check=_describe,
    ),
    Rule(
        code="DT103",
        name="collective-in-uneven-loop",
        severity=Severity.WARNING,
        summary="A loop over a rank's share of the data calls what all ranks must call as often.",
        why="Shares differ by one item when the data do not divide: the rank with more rounds waits in the last "
        "one.",
        repair="Collect the results in a list and gather once after the loop, or pad the shares "
        "(split_between_processes(..., apply_padding=True)).",
        visits=_visit_partings(Parting.LOOP, departures=False),
        check=_describe,
    ),
    Rule(
        code="DT104",
        name="collective-and-exception",
        severity=Severity.WARNING,
        summary="A rank that catches an exception calls, or skips, what all ranks must call.",
        why="An exception on one rank is not one on the others: they wait, or a later call meets the wrong one.",
        repair="Let the exception end the run, or tell all ranks of it first (set_trigger() and check_trigger()), "
        "and act on all of them.",
        visits=_visit_partings(Parting.HANDLER),
        check=_describe,
    ),
    Rule(
        code="DT105",
        name="collective-while-taking-turns",
        severity=Severity.ERROR,
        summary="A call that all ranks must make stands inside main_process_first().",
        why="The first rank waits in it for ranks that wait at the block's entry for the first one.",
        repair="Move it before or after the block.",
        visits=_visit_partings(Parting.TURNS, departures=False),
        check=_describe,
    ),
    Rule(
        code="DT106",
        name="departure-on-own-data",
        severity=Severity.WARNING,
        summary="A rank skips a call that all ranks must make because its own loss is not finite.",
        why="The loss of one rank's batch may be NaN while those of the others are not: they wait for this rank.",
        repair="Decide on a value that all ranks share: accelerator.reduce(loss) or dist.all_reduce before the test, "
        "or set_trigger() and check_trigger().",
        visits=_visit_partings(Parting.DATA),
        check=_describe,
    ),
)
