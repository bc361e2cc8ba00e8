"""The backend for torch-xla: one process, on one device or on several by SPMD."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain_backends.composed.backend import ComposedBackend
from drivetrain_backends.composed.strategy import ModelTransform, Strategy
from drivetrain_backends.composed.transforms import HoldDtypes, MoveToDevice, PreparedForwards
from drivetrain_backends.modules.activation_checkpointing import checkpointing_of
from drivetrain_backends.protocol import AutoValue
from drivetrain_xla.layout import XLALayout
from drivetrain_xla.library import load_library
from drivetrain_xla.settings import XLASettings
from drivetrain_xla.sharding import Sharder, ShardParameters, WatchInputs
from drivetrain_xla.steps import EndGraphs, Graphs, XLAGradients

logger = logging.getLogger(__name__)


class XLABackend(ComposedBackend):
    """A backend for torch-xla 2.9, which is its last version: for programs that have it today.

    Raises:
        BackendNotInstalledError: torch-xla is missing, or does not fit torch or the run's device.
        RuntimeError: There are several processes, or SPMD cannot begin in this one.
    """

    settings_section: ClassVar[str | None] = "xla"
    settings_type: ClassVar[type[Any] | None] = XLASettings

    def compose(self) -> Strategy:
        """Return the strategy: one process, whose graphs XLA cuts over devices."""
        settings: XLASettings = self.settings
        library = load_library(self.context, settings.spmd, settings.cache_dir)
        self._library, graphs = library, Graphs(library)
        sharder = None if library.mode == "off" else Sharder(library)
        sharded: tuple[ModelTransform, ...] = ()
        if sharder is not None and library.mode == "shard":
            sharded = (ShardParameters(library, sharder, settings.blocks),)
        return Strategy(
            transforms=(
                MoveInPlace(self.context),
                HoldDtypes(self.context, self.policy),
                *sharded,
                WatchInputs(graphs, sharder),
                PreparedForwards(self.context, self.policy),
            ),
            gradients=XLAGradients(graphs),
            layout=XLALayout(self.context, sharder if library.mode == "shard" else None),
            guards=(EndGraphs(graphs),),
        )

    def applied(self) -> Mapping[str, object]:
        """Return the values in force; see `Backend.applied`."""
        settings: XLASettings = self.settings
        mode, count = self._library.mode, self._library.num_devices
        since = "none could be opened" if self._library.cache is None else "the folder of this process"
        chosen = AutoValue(
            value=mode, reason=f"this process has {count} {'device' if count == 1 else 'devices'}"
        )
        return {
            **super().applied(),
            "spmd": chosen if settings.spmd is None else mode,
            "cache_dir": AutoValue(value=self._library.cache, reason=since),
        }


class MoveInPlace(MoveToDevice):
    """Move a model to the XLA device, whose parameters stay the objects that optimizers hold."""

    def plan(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Refuse blocks that torch would compute again, whose random states on an XLA device it does not know."""
        super().plan(models, optimizers)
        if any(checkpointing_of(module) != "none" for model in models for module in model.modules()):
            raise ValueError(
                "model.activation_checkpointing with backend='xla': torch cannot compute blocks again on an XLA "
                "device; leave it out, or call torch_xla.utils.checkpoint in the model"
            )

    def apply(self, model: nn.Module) -> nn.Module:
        """Exchange what the parameters hold; torch would make other parameters on another kind of device."""
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return super().apply(model)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)
