"""Several trackers as one: each value is made plain once, the rank that logs is chosen, a failure is named."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from drivetrain_tracking.arguments import check_options, check_tracker
from drivetrain_tracking.errors import TrackerFailedError, TrackerStateError, UnknownTrackerError
from drivetrain_tracking.plain import plain_config, plain_values
from drivetrain_tracking.protocol import PlanTracker, Tracker, Values
from drivetrain_tracking.settings import TrackingSettings

logger = logging.getLogger(__name__)

# Keyword arguments of trackers' own, by the tracker's name.
Options: TypeAlias = Mapping[str, Mapping[str, Any]]


class TrackerGroup:
    """Several trackers as one. It can be called on all ranks: each tracker hears from those that it wants to.

    Args:
        trackers: With names of their own.
        is_main: Whether this is rank 0; elsewhere only trackers with `on_all_ranks` are started and logged to.
        settings: The `tracking` section.

    Raises:
        TypeError: One is no tracker; the message says what it lacks.
        ValueError: Two trackers have one name.
    """

    def __init__(
        self, trackers: Sequence[Tracker], *, is_main: bool = True, settings: TrackingSettings | None = None
    ) -> None:
        for tracker in trackers:
            check_tracker(tracker)
        names = [tracker.name for tracker in trackers]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"trackers={names}: {name!r} is there {names.count(name)} times; name each once"
                )
        self._by_name = {tracker.name: tracker for tracker in trackers}
        self._used = tuple(tracker for tracker in trackers if is_main or tracker.on_all_ranks)
        self._settings = settings or TrackingSettings()
        self._is_started = False
        self._is_main = is_main
        self._left_out: set[str] = set()  # names of options that were told to fit no tracker

    @property
    def used(self) -> tuple[Tracker, ...]:
        """The trackers that this rank logs to."""
        return self._used

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all trackers, whether this rank logs to them or not."""
        return tuple(self._by_name)

    def get(self, name: str) -> Tracker:
        """A tracker by its name, for what only its platform can do.

        Raises:
            UnknownTrackerError: It is not in use; the message lists those that are.
        """
        if name not in self._by_name:
            used = ", ".join(map(repr, self.names)) or "none"
            raise UnknownTrackerError(
                f"tracker {name!r} is not in use, only {used}: add it where trackers are chosen"
            )
        return self._by_name[name]

    def start(
        self,
        run_name: str,
        config: Values | None = None,
        *,
        plan: Values | None = None,
        options: Options | None = None,
    ) -> None:
        """Start every tracker.

        Args:
            run_name: Of the run.
            config: What the run was started with; trackers get it as it is, and nothing else in it.
            plan: The run's effective plan, for those that keep one (`PlanTracker`).
            options: Keyword arguments of a tracker's own `start`, by the tracker's name. Those of a tracker that is
                not in use are left out, with a warning.

        Raises:
            TypeError: A tracker's `start` does not take an option.
            TrackerStateError: They are started already.
            ValueNotLoggableError: `config` holds something that is no plain value.
            TrackerFailedError: A tracker raised; it is named.
        """
        if self._is_started:
            raise TrackerStateError("start() again: the trackers are started already; finish() them first")
        plain, plain_plan = plain_config(config or {}), None if plan is None else plain_config(plan)
        own = self._options("start", options)
        self._is_started = True

        def begin(tracker: Tracker) -> None:
            tracker.start(run_name, plain, **own.get(tracker.name, {}))
            if plain_plan is not None and isinstance(tracker, PlanTracker):
                tracker.record_plan(plain_plan)

        self._call("start", begin)

    def log(self, values: Values, *, step: int | None = None, options: Options | None = None) -> None:
        """Log to every tracker; one that fails keeps no other from its values.

        Args:
            values: By name.
            step: The optimizer step they belong to, if any.
            options: Keyword arguments of a tracker's own `log`, by the tracker's name; see `start`.

        Raises:
            TypeError: A tracker's `log` does not take an option.
            TrackerStateError: They are not started.
            ValueNotLoggableError: A value is none that can be logged.
            TrackerFailedError: A tracker raised; it is named.
        """
        own = self._options("log", options)
        if not self._used:
            return
        if not self._is_started:
            raise TrackerStateError("log() before start(): start the trackers first")
        plain = plain_values(values)
        self._call(
            f"log(step={step})", lambda tracker: tracker.log(plain, step=step, **own.get(tracker.name, {}))
        )

    def finish(self) -> None:
        """Finish every tracker, also after another failed to; without a start it does nothing.

        Raises:
            TrackerFailedError: A tracker raised; it is named.
        """
        if self._is_started:
            self._is_started = False
            self._call("finish()", lambda tracker: tracker.finish())

    def _options(self, method: Literal["start", "log"], options: Options | None) -> Options:
        """Return the options, checked against the trackers in use; on all ranks, so that all raise or none."""
        for name, given in (options or {}).items():
            if name in self._by_name:
                check_options(self._by_name[name], method, given)
            elif name not in self._left_out and self._is_main:
                self._left_out.add(name)
                used = ", ".join(map(repr, self.names)) or "none"
                logger.warning(
                    "options for the tracker %r are left out: it is not in use, only %s", name, used
                )
        return options or {}

    def _call(self, what: str, call: Callable[[Tracker], None]) -> None:
        failures: list[tuple[str, Exception]] = []
        for tracker in self._used:
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001 - told below, once the other trackers had their turn
                failures.append(
                    (f"tracker {tracker.name!r} failed in {what}: {type(error).__name__}: {error}", error)
                )
        if not failures:
            return
        if self._settings.on_error == "warn":
            for told, _ in failures:
                logger.warning("%s", told)
            return
        raise TrackerFailedError("; ".join(told for told, _ in failures)) from failures[0][1]
