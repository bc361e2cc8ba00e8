"""What a tracker is."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

# What users log: numbers, strings, booleans, None, tensors and arrays of shape (), nested in mappings and sequences.
Values: TypeAlias = Mapping[str, Any]


class Tracker(Protocol):
    """Writes a run's values to one platform, or one kind of file.

    The calls, in order:

    1. Construction with a directory, on every rank. It opens and writes nothing.
    2. `start`, once, before anything is logged.
    3. `log`, any number of times.
    4. `finish`, at the end; a second call, or one without a start, does nothing.

    `start` and `log` may take keyword arguments of their own, with defaults: users give them as `options`. A tracker
    that keeps the run's effective plan beside its configuration is a `PlanTracker`.

    Calls 2 to 4 are made on rank 0 alone, unless `on_all_ranks` is true. `drivetrain_tracking.testing` has the
    contract that every tracker passes.
    """

    @property
    def name(self) -> str:
        """What users call it, and errors too."""
        ...

    @property
    def on_all_ranks(self) -> bool:
        """Whether every rank starts it and logs its own values, instead of rank 0 alone."""
        ...

    def start(self, run_name: str, config: Values) -> None:
        """Begin a run, or go on with the one of this name that was stopped.

        Args:
            run_name: Of the run.
            config: What the run was started with.
        """
        ...

    def log(self, values: Values, *, step: int | None = None) -> None:
        """Write values; they can be read back when this returns.

        Args:
            values: By name.
            step: The optimizer step they belong to, if any.
        """
        ...

    def finish(self) -> None:
        """End the run: everything is written, everything is closed."""
        ...


@runtime_checkable
class PlanTracker(Tracker, Protocol):
    """A tracker that keeps the run's effective plan too, as an artifact or a file beside the configuration."""

    def record_plan(self, plan: Values) -> None:
        """Keep the plan. Called once, after `start`.

        Args:
            plan: Plain values, several kilobytes of them.
        """
        ...
