"""The results of a run: its plan, trackers, profiles and throughput."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerAction
from torch.profiler import profile as torch_profile

from drivetrain.accelerator.log_reduction import LoggedCount, LogReducer, LogReduction
from drivetrain.parts.parts import HasParts, Parts, needs_run
from drivetrain.plan.effective import plan_of, store_plan
from drivetrain.plan.effective_plan import EffectivePlan
from drivetrain_memory import profile
from drivetrain_throughput import Throughput
from drivetrain_tracking import Tracker, collect_info

if TYPE_CHECKING:
    from drivetrain_throughput.step_watch import StepWatch


class Results(HasParts):
    """The part of an Accelerator that logs, measures and reports the effective plan."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._log_reducer = LogReducer(parts.context)

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

    @needs_run
    def init_trackers(
        self,
        project_name: str,
        config: Any = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the trackers of `log_with` with the run's configuration. Called on all ranks; rank 0 logs.

        The effective plan is written to plan.json of `project_dir`, and to trackers that store plans. The log gets
        the commit and its changes, versions, hardware and command line. Secrets are masked by name and form.

        Args:
            project_name: The project that the run belongs to.
            config: The configuration of the run: a nested mapping, a dataclass, a namespace or a library's config.
            init_kwargs: Extra arguments of a tracker's `start`, by the tracker's name. Arguments for trackers not in
                use are ignored, with a warning.

        Raises:
            TypeError: A tracker's `start` does not take one of its arguments.
            SpoolInUseError: Another run writes to the log of this `project_dir`.
        """
        plan = self.plan
        is_main = self.context.topology.is_main
        if is_main:
            store_plan(plan, self._parts.settings)
        records_info = (
            is_main and self._parts.trackers.used and self._parts.resolved["tracking"].value.record_info
        )
        self._parts.trackers.start(
            project_name,
            config,
            plan=plan.as_dict(),
            info=collect_info() if records_info else None,
            options=init_kwargs,
        )

    @needs_run
    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        reduce: LogReduction | None = None,
        count: LoggedCount | None = None,
    ) -> None:
        """Log the values of rank 0, or with `reduce` the values of all ranks.

        May be called on all ranks or some; with `reduce`, must be called on all ranks, with the same names. Tensors
        on an accelerator are not waited for: they are read a step later.

        Args:
            values: Numbers, strings, tensors of shape (), in nested dicts, by name; and media such as `Image`.
            step: The optimizer step that the values belong to.
            log_kwargs: Extra arguments of a tracker's `log`, by the tracker's name; see `init_trackers`.
            reduce: None logs the values of rank 0. "mean", "sum", "max" and "min" combine the values of all ranks, by
                one collective for all names. "per_rank" logs the values of each rank, as `NAME/rank_0` and so on.
            count: The weight of this rank's values in a mean, such as its number of tokens; equal weights if None.

        Raises:
            TypeError: A tracker's `log` does not take one of its arguments.
            ValueNotLoggableError: A value has a type that cannot be logged or reduced.
            CollectiveMismatchError: Ranks logged different names with `reduce`.
        """
        if reduce is not None:
            values = self._log_reducer.reduce(values, reduce, count)
        elif count is not None:
            raise ValueError(
                f"count={count!r} without reduce: say reduce='mean', which count weighs; or leave it out"
            )
        if self._parts.words is not None and not self._parts.words.keeps_logs:
            self._parts.words.tell_of_lost_log()
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

    @property
    def throughput(self) -> Throughput:
        """The throughput of the last `tracking.throughput_every_steps` steps; of the last 50 if it is not set.

        Samples are those of all ranks. Phases are those of this rank. May be read on any rank.

        Raises:
            RuntimeError: No setting has the throughput measured.
        """
        return self._watch().over_window()

    @property
    def total_throughput(self) -> Throughput:
        """The throughput since training began, including evaluation and saves between steps; see `throughput`."""
        return self._watch().in_total()

    @needs_run
    def count_tokens(self, function: Callable[[Any], float]) -> None:
        """Count tokens by a function, in place of the elements of `tracking.token_field`. Called on all ranks.

        Args:
            function: A function from a batch of this rank to its number of tokens. The function runs in the loop: if
                it reads a number from a device, the host waits.

        Raises:
            RuntimeError: No setting has the throughput measured.
        """
        self._watch().counts.count_tokens = function

    def _watch(self) -> "StepWatch":
        if self._parts.watch is None:
            raise RuntimeError(
                "the throughput is not measured: turn it on before the run with "
                'Accelerator(sections={"tracking": {"throughput": True}}), or log it regularly with '
                '{"throughput_every_steps": 50}'
            )
        return self._parts.watch
