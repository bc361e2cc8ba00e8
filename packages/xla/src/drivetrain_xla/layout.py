"""The states of models and optimizers on XLA devices: saved from host memory, loaded into the devices' tensors.

A save ends no graph: after a step each tensor has its value, and what has none yet is computed as it is read. An
empty graph would move XLA's generator on, so that a run that saves would draw other numbers than one that does not.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.composed.state_layout import StateLayout
from drivetrain_state import Context
from drivetrain_xla.compat import tree_map_only
from drivetrain_xla.sharding import Sharder


class XLALayout(StateLayout):
    """The layout of tensors that a process holds in full, however many devices they are cut over.

    Args:
        context: The run's context.
        sharder: Cuts optimizer states as parameters are cut; None if parameters are whole on each device.
    """

    def __init__(self, context: Context, sharder: Sharder | None) -> None:
        super().__init__(context)
        self._sharder = sharder

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return a model's state dict on the host."""
        return _on_host(super().model_state(model))

    def optimizer_state(self, optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
        """Return an optimizer's state on the host."""
        return _on_host(super().optimizer_state(optimizer, names))

    def divide(self, saved: Mapping[str, Any], names: Mapping[Tensor, str]) -> Mapping[str, Any]:
        """Return a saved state on the devices, cut as parameters are."""
        del names
        return saved if self._sharder is None else tree_map_only(Tensor, self._cut, saved)

    def _cut(self, value: Tensor) -> Tensor:
        if not value.dim() or self._sharder is None:  # a number stays on the host, as optimizers keep it
            return value
        placed = value.to(self.context.device)
        self._sharder.cut_as_parameter(placed)
        return placed


def _on_host(state: Any) -> Any:
    """Return a state with copies of its tensors in host memory; those cut over devices are joined."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), state)
