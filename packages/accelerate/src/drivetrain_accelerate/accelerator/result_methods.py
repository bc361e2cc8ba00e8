"""The methods of an Accelerator that log values, profile code and end a run."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.profiler import profile as torch_profile

from drivetrain_accelerate.accelerator.composed_run import ComposedRun
from drivetrain_accelerate.plugins.kwargs_handlers import ProfileKwargs
from drivetrain_accelerate.trackers.general_tracker import GeneralTracker
from drivetrain_accelerate.trackers.tracker_choice import (
    filter_trackers,
    for_each_tracker,
    split_trackers,
    tracker_of,
)


class ResultMethods(ComposedRun):
    """The trackers of a run, its profiles and its end."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        own, others = split_trackers(self.options.log_with)
        self.log_with: list[Any] = filter_trackers(own, self.options.project.logging_dir)
        self.options.log_with = others
        self.trackers: list[Any] = []
        self._are_finished = False

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Start the trackers of `log_with`. Called on all ranks; the main process logs."""
        options = init_kwargs or {}
        self._are_finished = False
        if self.options.log_with:
            self.inner.init_trackers(project_name, config, init_kwargs=options)
            self.trackers = list(self.inner.trackers)
        if not self.state.is_main_process:
            return
        folder = self.options.project.logging_dir
        started = [tracker_of(each, project_name, folder, options) for each in self.log_with]
        for tracker in started:
            tracker.start()
        self.trackers = [*started, *self.trackers]
        if config is not None:
            for_each_tracker(started, lambda tracker: tracker.store_init_configuration(config))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by its name; on other ranks and before `init_trackers`, one that does nothing."""
        if not self.trackers:
            return GeneralTracker(_blank=True)
        found = next((each for each in self.trackers if each.name == name), None)
        if found is None:
            used = ", ".join(each.name for each in self.trackers)
            raise ValueError(f"get_tracker({name!r}): this run logs to {used}")
        return getattr(found, "tracker", found) if unwrap else found

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Log values from the main process. If a tracker fails, the others still receive the values."""
        options = log_kwargs or {}
        if self._are_finished and self.options.log_with:
            raise RuntimeError(
                "log() after end_training(), which has finished the trackers: log before it, or call init_trackers() "
                "for another run"
            )
        if self.options.log_with:
            self.inner.log(values, step=step, log_kwargs=options)
        own = [each for each in self.trackers if isinstance(each, GeneralTracker)]
        for_each_tracker(own, lambda tracker: tracker.log(values, step=step, **options.get(tracker.name, {})))

    def end_training(self) -> None:
        """Finish saves and trackers, release the models and leave the process group. Called on all ranks.

        The trackers stay in `trackers`, so that a program can read the run's name or address.
        """
        own = [each for each in self.trackers if isinstance(each, GeneralTracker) and not self._are_finished]
        self._are_finished = True
        for_each_tracker(own, lambda tracker: tracker.finish())
        if self._inner is not None:
            self._inner.end_training()
            self._inner = None
        self.state.context.close()  # which made the group, unless the program did

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Generator[torch_profile]:
        """Profile the block with torch's profiler. May be called on any rank."""
        handler = profile_handler or self.options.handlers.profile or ProfileKwargs()
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            folder = Path(handler.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{self.state.process_index}.json"))

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether a model is spread over several devices, so that no rank can train it on one device."""
        return any(len(getattr(module, "hf_device_map", {})) > 1 for module in model.modules())

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: nn.Module) -> Any:
        """Return a prepared loader as it is: where `sp_size` divides sequences, it adds `shift_labels` by itself."""
        return dl
