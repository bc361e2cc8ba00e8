"""The protocol of a tracker."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from drivetrain_tracking.run.run_state import RunState
from drivetrain_tracking.values.records import LoggedRecord, MediaKind

# Logged values: numbers, strings, booleans, None, tensors and arrays of shape (), nested in mappings and sequences.
Metrics: TypeAlias = Mapping[str, Any]


class Tracker(Protocol):
    """A tracker that writes a run's values to a platform or a file.

    The calls are, in order:

    1. Construction with a directory, on every rank. It opens and writes nothing.
    2. `start`, once, before anything is logged.
    3. `log`, any number of times.
    4. `finish`, at the end; a second call, or a call without a start, does nothing.

    `start` and `log` may take additional keyword arguments with defaults, which users pass as `options`. A tracker
    that keeps the run's effective plan besides its configuration is a `PlanTracker`.

    Calls 2 to 4 are made only on rank 0, unless `on_all_ranks` is true. `drivetrain_tracking.testing` holds the
    contract that every tracker must pass.
    """

    @property
    def name(self) -> str:
        """The tracker's name in users' code and in errors."""
        ...

    @property
    def on_all_ranks(self) -> bool:
        """True if every rank starts the tracker and logs its own values, instead of only rank 0."""
        ...

    def start(self, run_name: str, config: Metrics) -> None:
        """Start a run, or continue a stopped run of the same name."""

    def log(self, values: Metrics, *, step: int | None = None) -> None:
        """Write values so that they can be read back once the call returns.

        Args:
            values: A mapping from names to values.
            step: The optimizer step that the values belong to, if any.
        """

    def finish(self) -> None:
        """End the run: write all values, and close all files and connections."""


@runtime_checkable
class StateTracker(Tracker, Protocol):
    """A tracker that also shows how a run ended. On a failed run, a tracker without `end` gets no `finish`."""

    def end(self, state: RunState | None) -> None:
        """End the run in place of `finish`; None releases a run that may go on."""


@runtime_checkable
class PlanTracker(Tracker, Protocol):
    """A tracker that also keeps the run's effective plan, as an artifact or file besides the configuration."""

    def record_plan(self, plan: Metrics) -> None:
        """Record the plan: plain values, several kilobytes in size. Called once, after `start`."""


@runtime_checkable
class InfoTracker(Tracker, Protocol):
    """A tracker that also keeps the run's surroundings: commit, versions, hardware, command line."""

    def record_info(self, info: Metrics) -> None:
        """Record the surroundings: plain values, kilobytes or more of them. Called once, after `start`."""


@runtime_checkable
class PlatformTracker(Tracker, Protocol):
    """A tracker that a writer process can feed from the run's log, each record at least once.

    A forwarder calls `write` in place of `log`. After a failed call or a killed process it calls `count_held` with
    the records that were on their way, and writes the rest. `Platform` is a base for such trackers.
    """

    @property
    def media_kinds(self) -> frozenset[MediaKind]:
        """The kinds of media that the platform takes; other media stay in files beside the log."""
        ...

    def write(self, records: Sequence[LoggedRecord]) -> None:
        """Write records, whose times strictly increase; once the call returns, a kill of this process loses none."""

    def count_held(self, records: Sequence[LoggedRecord]) -> int:
        """Return how many of the records, counted from the first, the platform holds; the others are sent again."""
        ...
