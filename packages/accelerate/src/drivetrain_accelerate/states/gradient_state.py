"""The run's position between two optimizer steps, shared in the whole process, with the loaders being read."""

from typing import Any, ClassVar, Protocol, TypedDict

from drivetrain_accelerate.plugins.run_configuration import GradientAccumulationPlugin
from drivetrain_accelerate.states.partial_state import SharedState


class ActiveLoader(Protocol):
    """The attributes of a prepared loader that the state reads."""

    end_of_dataloader: bool
    remainder: int


class DataPosition(TypedDict):
    """The position of a loop in its data, as plain values that are saved in an optimizer's state dict."""

    epoch: int
    position: int  # samples read of the epoch; batches if those are distributed whole
    stride: int  # by which each batch of all ranks moves the position


class GradientState(SharedState):
    """The run's position: whether the optimizer steps with this micro-batch, and the loaders being read."""

    _shared_state: ClassVar[dict[str, Any]] = {}

    sync_gradients: bool
    plugin_kwargs: dict[str, Any]  # options of accumulation that differ from their defaults
    # Whether the program itself says which micro-batch closes a window, as transformers' Trainer does.
    is_window_set: bool
    is_xla_gradients_synced: bool = False
    # Saved with the optimizer's state that was loaded last; None once the program has said where it reads on.
    resumed_from: DataPosition | None
    _loaders: list[ActiveLoader]

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        if not self.initialized:
            self.sync_gradients = True
            self.is_window_set = False
            self.resumed_from = None
            self.plugin_kwargs = {}
            self._loaders = []
        if gradient_accumulation_plugin is not None:
            self.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
        )

    @property
    def num_steps(self) -> int:
        """The number of micro-batches in one optimizer step."""
        return self.plugin_kwargs.get("num_steps", 1)

    @num_steps.setter
    def num_steps(self, num_steps: int) -> None:
        self.plugin_kwargs["num_steps"] = num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """True if a scheduler counts its calls in open windows; learning rates change when the optimizer steps."""
        return self.plugin_kwargs.get("adjust_scheduler", False)

    @property
    def sync_with_dataloader(self) -> bool:
        """True if the last batch of a loader closes the window before it is full."""
        return self.plugin_kwargs.get("sync_with_dataloader", True)

    @property
    def active_dataloader(self) -> ActiveLoader | None:
        """The innermost loader that is being read; None outside all loops."""
        return self._loaders[-1] if self._loaders else None

    @property
    def data_position(self) -> DataPosition | None:
        """The position of the innermost loop in its data; None outside all loops, or if unknown."""
        return getattr(self.active_dataloader, "data_position", None)  # programs may add loaders of their own

    @property
    def dataloader_references(self) -> list[ActiveLoader | None]:
        """A None (for no loader) and then the loaders that are being read, the innermost last."""
        return [None, *self._loaders]

    @dataloader_references.setter
    def dataloader_references(self, references: list[ActiveLoader | None]) -> None:
        self._loaders = [each for each in references if each is not None]

    @property
    def in_dataloader(self) -> bool:
        """True while a loader is being read."""
        return bool(self._loaders)

    @property
    def end_of_dataloader(self) -> bool:
        """True if the current batch is the last of the loader that is being read."""
        active = self.active_dataloader
        return active is not None and active.end_of_dataloader

    @property
    def remainder(self) -> int:
        """The number of samples of the loader's last step over all ranks; -1 outside all loops or if unknown."""
        active = self.active_dataloader
        return -1 if active is None else active.remainder

    def set_sync_gradients(self, sync_gradients: bool) -> None:
        """Set whether the next micro-batch closes the window; for programs that count micro-batches themselves."""
        self.sync_gradients = sync_gradients
        self.is_window_set = True

    def add_dataloader(self, dataloader: ActiveLoader) -> None:
        """Record that a loop over a loader begins."""
        self._loaders.append(dataloader)

    def remove_dataloader(self, dataloader: ActiveLoader) -> None:
        """Record that a loop over a loader has ended; of several loops over the loader, the innermost."""
        places = [place for place, each in enumerate(self._loaders) if each is dataloader]
        if places:
            del self._loaders[places[-1]]

    # The names that programs written for Accelerate call.
    _set_sync_gradients = set_sync_gradients
    _add_dataloader = add_dataloader
    _remove_dataloader = remove_dataloader
