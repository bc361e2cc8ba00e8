"""The settings of checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

Staging: TypeAlias = Literal["copy", "overlap"]

_IF_DUE = "a call of save_if_due()"


def _setting(default: Any, text: str, *, needs: str | None = "a save", **more: object) -> Any:
    """Return a field with its help `text` and the condition `needs` of its effect; a `secret` field is not shown."""
    known = {"help": text, "needs": needs, **more}
    metadata = {name: value for name, value in known.items() if value is not None}
    return field(default=default, repr="secret" not in more, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """The `checkpoint` section: where checkpoints are saved, when, and how many are kept.

    Example:
        >>> CheckpointSettings(save_every_steps=500, keep_last=3).keep_last
        3
    """

    directory: str | Path | None = _setting(  # noqa: RUF009 it returns a field
        None,
        "Folder of the checkpoints, visible to every host, or a URL such as s3://bucket/run; unset: below the "
        "project's folder.",
        needs=None,
    )
    storage_options: Mapping[str, Any] | None = _setting(
        None,
        "Options of the URL's file system, such as endpoint_url; unset: its own defaults.",
        needs="a checkpoint at a URL",
        secret=True,
    )
    keep_last: int | None = _setting(
        None,
        "Number of newest checkpoints to keep; unset: all.",
        ask="drivetrain_checkpoint.checkpoint_advice:ask_keep_last",
        brief="Newest checkpoints to keep",
        topic="Results",
    )
    keep_every: int | None = _setting(
        None, "Interval in steps of checkpoints to keep in addition, such as 10000."
    )
    keep_best: int = _setting(0, "Number of best checkpoints by best_metric to keep in addition.")
    best_metric: str | None = _setting(
        None, "Name of the metric, among those given to a save, that rates checkpoints."
    )
    best_mode: Literal["min", "max"] = _setting(
        "min", "Whether the smallest or the largest value of best_metric is the best.", needs="best_metric"
    )
    save_every_steps: int | None = _setting(
        None,
        "Number of optimizer steps after which save_if_due() saves.",
        needs=_IF_DUE,
        brief="Steps between saves of save_if_due()",
        topic="Results",
    )
    save_every_minutes: float | None = _setting(
        None, "Minutes since the last save after which save_if_due() saves.", needs=_IF_DUE
    )
    save_on_signals: tuple[str, ...] = _setting(
        ("SIGTERM", "SIGUSR1"),
        "Signals on which save_if_due() saves and ends the program with exit code 75, which requests a restart.",
        needs=_IF_DUE,
    )
    background: bool = _setting(
        False, "Whether training continues while a checkpoint is written from a copy in host memory."
    )
    staging: Staging = _setting(  # noqa: RUF009 it returns a field
        "copy",
        "When a background save copies weights and optimizer states: copy before training continues, overlap "
        "while it continues, until the next optimizer step, which alone changes them.",
    )
    allow_pickle: bool = _setting(
        False,
        "Whether objects of any kind may be saved as pickles, and loaded, which runs code of whoever saved them.",
        needs="a checkpoint",
    )
    stall_seconds: float = _setting(
        600.0,
        "Seconds without a byte written by any rank after which a background save fails.",
        needs=f"a save or {_IF_DUE}",
    )

    def __post_init__(self) -> None:
        """Check every field."""
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(
                f"keep_last={self.keep_last!r}: must be at least 1 checkpoint; leave it unset to keep all"
            )
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every={self.keep_every!r}: must be at least 1 step")
        if self.keep_best < 0:
            raise ValueError(f"keep_best={self.keep_best!r}: must be 0 or more checkpoints")
        if self.keep_best and self.best_metric is None:
            raise ValueError(
                f"keep_best={self.keep_best!r} without best_metric: name the metric that rates checkpoints"
            )
        if self.keep_last is None and (self.keep_best or self.keep_every):
            rule = "keep_best" if self.keep_best else "keep_every"
            raise ValueError(
                f"{rule}={getattr(self, rule)!r} without keep_last: all stay; set keep_last=1 or more too"
            )
        if self.save_every_steps is not None and self.save_every_steps < 1:
            raise ValueError(f"save_every_steps={self.save_every_steps!r}: must be at least 1 step")
        if self.save_every_minutes is not None and not self.save_every_minutes > 0:
            raise ValueError(f"save_every_minutes={self.save_every_minutes!r}: must be above 0 minutes")
        for name in self.save_on_signals:
            if not name.startswith("SIG") or name in ("SIGKILL", "SIGSTOP"):
                raise ValueError(
                    f"save_on_signals={name!r}: must be the name of a signal that can be handled, such as SIGTERM"
                )
        if self.staging not in get_args(Staging):
            raise ValueError(f"staging={self.staging!r}: must be one of {', '.join(get_args(Staging))}")
        if not self.stall_seconds > 0:
            raise ValueError(f"stall_seconds={self.stall_seconds!r}: must be above 0 seconds")
