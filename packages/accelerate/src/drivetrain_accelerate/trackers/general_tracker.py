"""The base of trackers in Accelerate's form, which programs subclass."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar

from drivetrain_accelerate.states.partial_state import PartialState

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
    """A tracker: a subclass has `name`, `requires_logging_directory` and `tracker`, the platform's own object.

    The calls are `start`, `store_init_configuration` if the run has one, `log` any number of times, and `finish`.

    Args:
        _blank: Whether it stands for a tracker of another process, and does nothing.

    Attributes:
        main_process_only: Whether the methods that `on_main_process` decorates run on the main process alone.
    """

    main_process_only: ClassVar[bool] = True

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        if missing := [
            name for name in _REQUIRED if not hasattr(type(self), name) and name not in vars(self)
        ]:
            raise NotImplementedError(
                f"{type(self).__name__} lacks {', '.join(missing)}: define name (a word), requires_logging_directory "
                "(true or false) and tracker (a property that returns the platform's own object)"
            )

    def start(self) -> None:
        """Open the run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values by name."""

    def finish(self) -> None:
        """Close the run."""
