"""The methods of an Accelerator that log and profile, and that end a run."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.profiler import profile as torch_profile

from drivetrain_accelerate.accelerator.basis import Basis
from drivetrain_accelerate.plugins.kwargs_handlers import ProfileKwargs


class Results(Basis):
    """The trackers of a run, its profiles and its end."""

    @property
    def trackers(self) -> list[Any]:
        """The trackers that this process logs to, once `init_trackers` has started them."""
        return [] if self._inner is None else list(self.inner.trackers)

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Start the trackers of `log_with`. Called on all ranks; the main process logs.

        Args:
            project_name: The project that the run belongs to.
            config: The configuration of the run.
            init_kwargs: Arguments of a tracker's own start, by the tracker's name.
        """
        self.inner.init_trackers(project_name, config, init_kwargs=init_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by its name.

        Args:
            name: The name.
            unwrap: Whether to return the platform's own object.

        Raises:
            ValueError: The run has no such tracker.
        """
        found = self.inner.get_tracker("comet" if name == "comet_ml" else name)
        return getattr(found, "tracker", found) if unwrap else found

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Log values from the main process.

        Args:
            values: Numbers, strings and tensors of shape (), by name.
            step: The step they belong to.
            log_kwargs: Arguments of a tracker's own log, by the tracker's name.
        """
        self.inner.log(values, step=step, log_kwargs=log_kwargs or {})

    def end_training(self) -> None:
        """Finish saves and trackers, release the models and leave the process group. Called on all ranks."""
        if self._inner is not None:
            self._inner.end_training()
            self._inner = None

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Generator[torch_profile]:
        """Profile the block with torch's profiler. May be called on any rank.

        Args:
            profile_handler: What to record, and the folder to write a trace of each rank to.
        """
        handler = profile_handler or self.options.handlers.profile or ProfileKwargs()
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            folder = Path(handler.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{self.state.process_index}.json"))

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether a model was dispatched over several devices, so that it cannot be trained on one each."""
        return any(len(getattr(module, "hf_device_map", {})) > 1 for module in model.modules())

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: nn.Module) -> Any:
        """Refuse: drivetrain has no sequence parallel dimension yet.

        Raises:
            NotImplementedError: Always.
        """
        del dl
        raise NotImplementedError(
            f"deepspeed_ulysses_dl_adapter({type(model).__name__}): drivetrain has no sequence parallel dimension; "
            "train with data parallelism, or shard the model (FSDP, DeepSpeed)"
        )
