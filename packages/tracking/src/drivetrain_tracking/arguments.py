"""Checks of user input: trackers, and options for calls of a tracker."""

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any, Literal, get_args, get_origin, get_type_hints

from drivetrain_tracking.protocol import Tracker

_CALLS = ("start", "log", "finish")
_SHAPE = (
    "a tracker has a name, on_all_ranks (true or false), start(run_name, config), log(values, *, step=None) and "
    "finish(), as drivetrain_tracking.Tracker says"
)


def check_tracker(tracker: object) -> None:
    """Check that an object is a tracker."""
    if isinstance(tracker, type):
        raise TypeError(f"{tracker.__name__} is a class: pass an instance of it, {tracker.__name__}(...)")
    missing = [call for call in _CALLS if not callable(getattr(tracker, call, None))]
    missing += ["name"] if not isinstance(getattr(tracker, "name", None), str) else []
    missing += ["on_all_ranks"] if not isinstance(getattr(tracker, "on_all_ranks", None), bool) else []
    if missing:
        raise TypeError(
            f"{type(tracker).__name__} is no tracker, for it lacks {', '.join(missing)}: {_SHAPE}"
        )


def check_options(tracker: Tracker, method: Literal["start", "log"], given: Mapping[str, Any]) -> None:
    """Check that a tracker's `start` or `log` takes these options with these values."""
    if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] a user may give any
        raise TypeError(
            f"options of the tracker {tracker.name!r}: {given!r} is no mapping of arguments by name"
        )
    # A tracker that a writer process writes to takes what its platform takes; values it gets by the log.
    takes = getattr(tracker, "platform", tracker) if method == "start" else tracker
    options_type = getattr(takes, "options_type", None) if method == "start" else None
    parameters = signature(options_type or getattr(takes, method)).parameters.values()
    own = {"run_name", "config"} if method == "start" else {"values", "step"}
    taken = [
        parameter.name
        for parameter in parameters
        if parameter.name not in own and parameter.kind is not Parameter.POSITIONAL_ONLY
    ]
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    if unknown := [name for name in given if name in own or not (takes_any or name in taken)]:
        raise TypeError(
            f"options of the tracker {tracker.name!r}: {type(tracker).__name__}.{method}() takes no "
            f"{', '.join(unknown)}; of its own it takes {', '.join(taken) or 'none'}"
        )
    for name, hint in get_type_hints(options_type).items() if options_type is not None else ():
        # The choices of an option whose type is a `Literal`, or one and None.
        literals = [one for one in (hint, *get_args(hint)) if get_origin(one) is Literal]
        choices = [choice for literal in literals for choice in get_args(literal)]
        if choices and name in given and given[name] not in (*choices, None):
            raise ValueError(
                f"options of the tracker {tracker.name!r}: {name}={given[name]!r}: must be one of "
                f"{', '.join(map(repr, choices))}; leave it out for the default"
            )
