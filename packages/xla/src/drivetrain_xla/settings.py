"""The configuration section of the backend: `xla`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, get_args

Spmd = Literal["off", "data", "shard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class XLASettings:
    """The settings of a run on torch-xla.

    Attributes:
        requires: The modules that the backend needs; `drivetrain config` names a missing module.
        refused_axes: The parallel dimensions that the backend does not have, each with what to do.
    """

    requires: ClassVar[tuple[str, ...]] = ("torch_xla",)
    refused_axes: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("pipeline", "data", "shard", "context", "tensor", "expert"),
        "one process drives all devices, and XLA divides its work over them; leave it out, and say xla.spmd=data to "
        "cut batches, or xla.spmd=shard to cut parameters too",
    )

    spmd: Spmd | None = field(
        default=None,
        metadata={
            "help": "Division of the work over this process's devices: off trains on one; data cuts batches; "
            "shard cuts parameters and optimizer states too; unset: data if there are several devices."
        },
    )
    blocks: tuple[str, ...] | None = field(
        default=None,
        metadata={
            "help": "Class names of the modules that are gathered at a time; unset: those that the model names, "
            "or the items of its module lists.",
            "needs": "spmd=shard",
        },
    )
    cache_dir: Path | None = field(
        default=None,
        metadata={
            "help": "Folder of compiled graphs, which later runs load; unset: xla_cache in the project's folder, "
            "if the run has one.",
            "project_folder": "xla_cache",
        },
    )

    def __post_init__(self) -> None:
        """Refuse a value outside its range; the message begins with the field's name."""
        if self.spmd is not None and self.spmd not in get_args(Spmd):
            raise ValueError(f"spmd={self.spmd!r}: must be one of {', '.join(get_args(Spmd))}")
        if self.blocks is not None and self.spmd != "shard":
            raise ValueError(
                f"blocks={self.blocks!r}: modules are gathered under spmd='shard' alone, not {self.spmd!r}"
            )
