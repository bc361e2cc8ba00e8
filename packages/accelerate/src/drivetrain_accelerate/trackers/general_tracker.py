"""The base classes of trackers in Accelerate's form: one for programs, one for the platforms' trackers."""

import importlib
from collections.abc import Callable
from functools import wraps
from logging import getLogger
from math import prod
from typing import Any, ClassVar, TypeVar

from drivetrain_accelerate.states.partial_state import PartialState

logger = getLogger(__name__)
Kind = TypeVar("Kind", bound=type["GeneralTracker"])
_REQUIRED = ("name", "requires_logging_directory", "tracker")


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a tracker's method so that the main process alone runs it, if `main_process_only` is true."""

    @wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not PartialState().is_main_process:
            return None
        return function(self, *args, **kwargs)

    return wrapper


class GeneralTracker:
    """A tracker. A subclass defines `name`, `requires_logging_directory` and `tracker`, the platform's own object.

    A run calls `start`, `store_init_configuration` if it has a configuration, `log` any number of times, and
    `finish`. With `_blank`, the tracker stands for a tracker of another process, and does nothing.
    """

    # Whether the methods that `on_main_process` decorates run on the main process alone.
    main_process_only: ClassVar[bool] = True

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        if missing := [
            name for name in _REQUIRED if not hasattr(type(self), name) and name not in vars(self)
        ]:
            raise NotImplementedError(
                f"{type(self).__name__} lacks {', '.join(missing)}: define name (a str), requires_logging_directory "
                "(a bool) and tracker (a property that returns the platform's own object)"
            )

    def start(self) -> None:
        """Open the run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values by name."""

    def finish(self) -> None:
        """Close the run."""


def calls_on_main_process(kind: Kind) -> Kind:
    """Decorate a class: apply `on_main_process` to each public method that it defines."""
    for name, value in list(vars(kind).items()):
        if callable(value) and not name.startswith("_"):
            setattr(kind, name, on_main_process(value))
    return kind


class LibraryTracker(GeneralTracker):
    """A tracker over the module `name`. `start` stores the platform's object in the attribute named by `opened`.

    Keyword arguments go to the platform's function that opens a run.
    """

    name: ClassVar[str]
    requires_logging_directory: ClassVar[bool] = False
    opened: ClassVar[str] = "run"
    configured_by: ClassVar[str]  # the method of the platform's object that stores a configuration
    ended_by: ClassVar[str] = "finish"

    def __init__(self, run_name: str | None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @property
    def tracker(self) -> Any:
        """The platform's own object."""
        return getattr(self, self.opened)

    @property
    def module(self) -> Any:
        """The platform's library."""
        return importlib.import_module(self.name)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration of the run, as the platform does."""
        getattr(self.tracker, self.configured_by)(values)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        getattr(self.tracker, self.ended_by)()

    def numbers(self, values: dict[str, Any]) -> dict[str, int | float]:
        """Return the values that are numbers, and warn of the other values."""
        found: dict[str, int | float] = {}
        for name, value in values.items():
            if (number := number_of(value)) is None:
                self.warn_left_out(name, value, "no number")
            else:
                found[name] = number
        return found

    def warn_left_out(self, name: str, value: Any, reason: str) -> None:
        """Warn that a value is not logged. `reason` completes "it is ...", such as "no number"."""
        logger.warning(
            "%s: %s of type %s is left out: it is %s", self.name, name, type(value).__name__, reason
        )


def number_of(value: Any) -> int | float | None:
    """Return a value that is a number, or the number in a tensor or array of one element; else None."""
    shape = getattr(value, "shape", None)
    found = value.item() if hasattr(value, "item") and shape is not None and prod(shape) == 1 else value
    return found if isinstance(found, int | float) else None
