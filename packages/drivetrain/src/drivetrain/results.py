"""Where a run's results go: trackers and profiles."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from drivetrain.compose import Parts
from drivetrain.plan import EffectivePlan
from drivetrain_memory import profile
from drivetrain_tracking import Tracker


class Results:
    """The part of an Accelerator that logs and profiles."""

    _parts: Parts

    @property
    def plan(self) -> EffectivePlan:
        """What was asked and what is applied; the Accelerator tells."""
        raise NotImplementedError

    def init_trackers(self, project_name: str, config: Mapping[str, Any] | None = None) -> None:
        """Start the trackers of `log_with` with the run's configuration and effective plan; rank 0 logs."""
        self._parts.trackers.start(project_name, {**(config or {}), "plan": self.plan.as_dict()})

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log values from rank 0. May be called on all ranks.

        Args:
            values: Numbers, strings, or tensors of shape (), by name.
            step: The optimizer step they belong to.
        """
        self._parts.trackers.log(values, step=step)

    def get_tracker(self, name: str) -> Tracker:
        """A tracker by its name in `log_with`; of another name, an error that lists those in use."""
        return self._parts.trackers.get(name)

    def profile(self, directory: Path | str | None = None) -> AbstractContextManager[Any]:
        """Profile the block; each rank writes a trace into `directory` (`project_dir`/profile by default)."""
        chosen = (
            Path(directory) if directory is not None else self._parts.project_dir("profile()") / "profile"
        )
        return profile(chosen, rank=self._parts.context.topology.rank)
