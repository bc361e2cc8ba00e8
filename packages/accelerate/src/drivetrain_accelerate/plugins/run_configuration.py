"""The dataclasses that say how a run reads its data, where it stores its results, and when it steps."""

from drivetrain_accelerate.plugins.known_fields import options
from drivetrain_accelerate.plugins.kwargs_handlers import KwargsHandler


@options
class DataLoaderConfiguration:
    """Options of how prepared loaders divide their data.

    Attributes:
        split_batches: Whether a loader's batch size is the sum over processes.
        dispatch_batches: Whether the main process reads for all; None: for iterable datasets.
        even_batches: Whether the tail is filled with repeats, so that all processes have equal batches.
        use_seedable_sampler: Whether the order follows from `data_seed` and the epoch alone.
        data_seed: The seed of that order.
        non_blocking: Whether to copy pinned batches to the device without waiting.
        use_stateful_dataloader: Whether loaders have `state_dict`; drivetrain's always have one.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@options
class ProjectConfiguration:
    """Options of where a run stores checkpoints and logs.

    Attributes:
        project_dir: The folder of the run.
        logging_dir: The folder of logs; `project_dir` if it is not said.
        automatic_checkpoint_naming: Whether checkpoints are named `checkpoint_0`, `checkpoint_1` and so on.
        total_limit: The number of checkpoints to keep with automatic names; None keeps all.
        iteration: The number of the next checkpoint.
        save_on_each_node: Whether the first process of each node stores what all processes share.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        """Take the project's folder for that of logs."""
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the folder of the run, and that of logs if it is not said."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@options
class GradientAccumulationPlugin(KwargsHandler):
    """Options of gradient accumulation.

    Attributes:
        num_steps: The number of micro-batches in one optimizer step.
        adjust_scheduler: Whether a scheduler counts its calls in open windows, see `GradientState`. What is said here
            does not reach that, as in Accelerate: a program sets it in the state's `plugin_kwargs`.
        sync_with_dataloader: Whether the last batch of a loader closes the window before it is full.
        sync_each_batch: Without effect: gradients are reduced once in a window, with the same sum.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
