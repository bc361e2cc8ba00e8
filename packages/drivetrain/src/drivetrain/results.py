"""The results of a run: trackers and profiles."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerAction
from torch.profiler import profile as torch_profile

from drivetrain.effective import plan_of, store_plan
from drivetrain.effective_plan import EffectivePlan
from drivetrain.parts import HasParts
from drivetrain_memory import profile
from drivetrain_tracking import Tracker


class Results(HasParts):
    """The part of an Accelerator that logs and profiles, and tells what was applied."""

    @property
    def plan(self) -> EffectivePlan:
        """The current effective plan: the requested and the applied value of each setting, and its source.

        Raises:
            PlanMismatchError: An applied value differs from the requested one.
        """
        return plan_of(self._parts)

    @property
    def trackers(self) -> tuple[Tracker, ...]:
        """The trackers that this rank logs to: all on rank 0; elsewhere only those that log on every rank."""
        return self._parts.trackers.used

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the trackers of `log_with` with the run's configuration. Called on all ranks; rank 0 logs.

        The effective plan is written to plan.json of `project_dir`, and to trackers that store one.

        Args:
            project_name: The project that the run belongs to.
            config: The configuration of the run; trackers write it unchanged.
            init_kwargs: Arguments of a tracker's own `start`, by the tracker's name; those of trackers that are not
                in use are ignored, with a warning.

        Raises:
            TypeError: A tracker's `start` does not take one of its arguments.
        """
        plan = self.plan
        if self.context.topology.is_main:
            store_plan(plan, self._parts.settings)
        self._parts.trackers.start(project_name, config, plan=plan.as_dict(), options=init_kwargs)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log values from rank 0. May be called on all ranks.

        Args:
            values: Numbers, strings, or tensors of shape (), by name.
            step: The optimizer step they belong to.
            log_kwargs: Arguments of a tracker's own `log`, by the tracker's name; see `init_trackers`.

        Raises:
            TypeError: A tracker's `log` does not take one of its arguments.
        """
        self._parts.trackers.log(values, step=step, options=log_kwargs)

    def get_tracker(self, name: str) -> Tracker:
        """Return a tracker by its name; an unknown name raises an error that lists the trackers in use."""
        return self._parts.trackers.get(name)

    def profile(
        self,
        directory: Path | str | None = None,
        *,
        schedule: Callable[[int], ProfilerAction] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        with_modules: bool = False,
    ) -> AbstractContextManager[torch_profile]:
        """Profile the block with torch's profiler. May be called on any rank.

        Args:
            directory: The folder where each rank writes its trace; `project_dir`/profile by default. Without a
                `project_dir` no trace is written: query the profiler instead.
            schedule: The steps to record, from `torch.profiler.schedule(...)`; call the profiler's `step()` after
                each step.
            record_shapes: Whether to record the shapes of operators' inputs.
            profile_memory: Whether to record the memory that operators allocate and free.
            with_stack: Whether to record the Python line that called each operator; slow.
            with_flops: Whether to estimate the floating point operations of matrix products and convolutions.
            with_modules: Whether to record the module that called each operator.

        Raises:
            TypeError: `directory` is not a path.
        """
        if not isinstance(directory, Path | str | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"profile({type(directory).__name__}): the first argument is a folder; select what to record by "
                "name, such as profile(record_shapes=True, profile_memory=True, with_stack=True, schedule=...)"
            )
        project = self._parts.settings.project_dir
        default = None if project is None else project / "profile"
        return profile(
            default if directory is None else directory,
            rank=self.context.topology.rank,
            schedule=schedule,
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
            with_flops=with_flops,
            with_modules=with_modules,
        )
