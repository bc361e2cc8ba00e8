"""The options of a run's data loading, of its folders, and of gradient accumulation."""

from drivetrain_accelerate.plugins.kwargs_handlers import KwargsHandler
from drivetrain_accelerate.plugins.option_fields import (
    becomes,
    check_refused,
    options,
    refusal,
    refused,
    settings_of,
    without_effect,
)


@options
class DataLoaderConfiguration:
    """Options of prepared loaders, which divide the data among ranks."""

    split_batches: bool = becomes("data.split_batches", default=False)
    dispatch_batches: bool | None = becomes("data.dispatch", default=None)
    even_batches: bool = becomes("data.even", default=True)
    use_seedable_sampler: bool = without_effect(
        "an order always follows from a seed and the epoch", default=False
    )
    data_seed: int | None = becomes("data.seed", default=None)
    non_blocking: bool = becomes("data.non_blocking", default=False)
    use_stateful_dataloader: bool = without_effect("prepared loaders always have state_dict", default=False)


@options
class ProjectConfiguration:
    """Options of the folders for a run's checkpoints and logs."""

    project_dir: str | None = becomes("save_state(): the folder around `checkpoints`", default=None)
    logging_dir: str | None = without_effect(
        "trackers get it from the program's tracker, not from settings", default=None
    )
    automatic_checkpoint_naming: bool = becomes("save_state(): the names of folders", default=False)
    total_limit: int | None = becomes("checkpoint.keep_last", default=None)
    iteration: int = without_effect(
        "the number of the next checkpoint, which the Accelerator counts", default=0
    )
    save_on_each_node: bool = refused(
        "checkpoint.directory",
        "a checkpoint is one folder that all nodes see; leave it out, and name a shared folder or a URL",
        default=False,
    )

    def __post_init__(self) -> None:
        """Use the project's folder for logs if no other folder is given."""
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the project's folder; if no folder for logs is given, use it for logs too."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@options
class GradientAccumulationPlugin(KwargsHandler):
    """Options of gradient accumulation.

    As in Accelerate, `adjust_scheduler` does not reach `GradientState`: a program sets it in the state's
    `plugin_kwargs`.
    """

    num_steps: int | None = becomes("run.gradient_accumulation_steps", default=None)
    adjust_scheduler: bool = becomes("AcceleratedScheduler: its steps in an open window", default=True)
    sync_with_dataloader: bool = becomes("accumulate(last=)", default=True)
    sync_each_batch: bool = without_effect(
        "the sum over a window is the same, reduced once; to hold less under FSDP, take smaller micro-batches or "
        "offload",
        default=False,
    )


def data_sections(configuration: DataLoaderConfiguration) -> dict[str, object]:
    """Return the fields of the `data` section.

    With `even_batches`, samples from the epoch's beginning fill the tail, and `gather_for_metrics` removes them
    again; drivetrain's "pad" does both. Without it, no sample is repeated, and ranks stay in step.
    """
    return {**settings_of(configuration), "even": "pad" if configuration.even_batches else "uneven"}


def check_project(configuration: ProjectConfiguration) -> None:
    """Refuse options about a project's checkpoints that would have no effect."""
    check_refused(configuration)
    limit = configuration.total_limit
    if limit is not None and not configuration.automatic_checkpoint_naming:
        instead = (
            "old checkpoints are known by their automatic names; say automatic_checkpoint_naming=True too"
        )
        raise refusal(configuration, "total_limit", limit, instead)
    if limit is not None and limit < 1:
        instead = "it would delete the checkpoint that was just written; say 1 or more, or None to keep all"
        raise refusal(configuration, "total_limit", limit, instead)
