"""The arguments of the commands of `drivetrain checkpoint`, read without torch."""

from dataclasses import dataclass
from typing import Literal

from drivetrain_checkpoint.export.shard_size import parse_shard_size
from drivetrain_checkpoint.settings import CheckpointSettings
from drivetrain_messages import argument

NUM_SHOWN = 10  # tensors per part, without --tensors

_DIRECTORY_HELP = "Folder of checkpoints, or its URL."
_CHECKPOINT_HELP = "Folder of a checkpoint, such as runs/step-100, or its URL."


@dataclass(frozen=True, slots=True, kw_only=True)
class ListArguments:
    """The arguments of `drivetrain checkpoint list`."""

    directory: str = argument(..., _DIRECTORY_HELP, positional=True)
    json: bool = argument(False, "Print JSON, for programs.")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyArguments:
    """The arguments of `drivetrain checkpoint verify`."""

    folder: str = argument(
        ..., "Folder of a checkpoint or of several checkpoints, or its URL.", positional=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowArguments:
    """The arguments of `drivetrain checkpoint show`."""

    checkpoint: str = argument(..., _CHECKPOINT_HELP, positional=True)
    tensors: bool = argument(False, f"List all tensors, not the first {NUM_SHOWN} of each part.")
    json: bool = argument(False, "Print JSON, for programs: all tensors too.")


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeArguments:
    """The arguments of `drivetrain checkpoint merge`."""

    checkpoint: str = argument(..., _CHECKPOINT_HELP, positional=True)
    output: str = argument(..., "Folder of the export; an export in the folder is replaced.", positional=True)
    model: str | None = argument(None, "Name of the model in the checkpoint; by default the only model.")
    max_shard_size: str = argument("5GB", "Largest size of the tensors in one file: bytes, 5GB, 512MiB.")

    def __post_init__(self) -> None:
        _ = self.max_shard_bytes

    @property
    def max_shard_bytes(self) -> int:
        """The largest size of the tensors in one file, in bytes."""
        text = self.max_shard_size
        return parse_shard_size(int(text) if text.isdecimal() else text)


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneArguments:
    """The arguments of `drivetrain checkpoint prune`."""

    directory: str = argument(..., _DIRECTORY_HELP, positional=True)
    keep_last: int = argument(..., "Number of valid checkpoints to keep, those saved last.")
    keep_every: int | None = argument(None, "Interval in steps of checkpoints to keep too, such as 10000.")
    keep_best: int = argument(0, "Number of best checkpoints by best_metric to keep too.")
    best_metric: str | None = argument(None, "Name of a save's metric that rates checkpoints.")
    best_mode: Literal["min", "max"] = argument(
        "min", "Whether the smallest or the largest value is the best."
    )
    dry_run: bool = argument(False, "List the folders to delete, and delete nothing.")

    def __post_init__(self) -> None:
        """Check the rules in the same way as the `checkpoint` section."""
        _ = self.keep

    @property
    def keep(self) -> CheckpointSettings:
        """The rules for which checkpoints to keep."""
        return CheckpointSettings(
            keep_last=self.keep_last,
            keep_every=self.keep_every,
            keep_best=self.keep_best,
            best_metric=self.best_metric,
            best_mode=self.best_mode,
        )
