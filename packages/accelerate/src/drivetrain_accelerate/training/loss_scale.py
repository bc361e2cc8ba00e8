"""The loss scale of fp16: a run's scale in the form of a GradScaler, and torch's GradScaler for other loops."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from drivetrain import Accelerator
from drivetrain_accelerate.plugins.enums import DistributedType
from drivetrain_accelerate.plugins.kwargs_handlers import GradScalerKwargs

_FACTORS = ("growth_factor", "backoff_factor", "growth_interval")


class LossScaleView:
    """A run's loss scale, for programs to read, save and load. drivetrain scales, unscales and updates by itself."""

    def __init__(self, accelerator: Callable[[], Accelerator], handler: GradScalerKwargs | None) -> None:
        self._accelerator = accelerator
        self._handler = handler or GradScalerKwargs()

    def is_enabled(self) -> bool:
        """Return True, since this view exists only under fp16."""
        return True

    def get_scale(self) -> float:
        """Return the factor for the next loss. Synchronises with the device."""
        return float(self._saved()["scale"])

    def get_growth_factor(self) -> float:
        """Return the factor by which the scale rises after a long run without overflow."""
        return self._handler.growth_factor

    def get_backoff_factor(self) -> float:
        """Return the factor by which the scale falls after an overflow."""
        return self._handler.backoff_factor

    def get_growth_interval(self) -> int:
        """Return the number of steps without overflow after which the scale rises."""
        return self._handler.growth_interval

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `GradScaler.load_state_dict` takes. Synchronises with the device."""
        saved = self._saved()
        factors = {name: getattr(self._handler, name) for name in _FACTORS}
        return {"scale": float(saved["scale"]), **factors, "_growth_tracker": int(saved["growth_tracker"])}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the scale from a saved state, also from a GradScaler's. The factors of this run do not change."""
        self._accelerator().load_loss_scale_state(
            {"scale": state_dict["scale"], "growth_tracker": state_dict["_growth_tracker"]}
        )

    def _saved(self) -> Mapping[str, Any]:
        saved = self._accelerator().loss_scale_state()
        assert saved is not None  # the run computes in fp16
        return saved


def check_scaler(scaler: Any, *, is_scaled: bool) -> None:
    """Raise a ValueError for a scaler that a program sets on its Accelerator, if it would change the run."""
    is_idle = scaler is None or not scaler.is_enabled()
    if isinstance(scaler, LossScaleView) if is_scaled else is_idle:
        return
    given = type(scaler).__name__ + ("" if scaler is None else f", enabled={not is_idle}")
    raise ValueError(
        f"accelerator.scaler = ({given}): drivetrain scales, unscales and updates by itself where the run is in "
        "fp16, and nowhere else; a GradScaler of the program's must have enabled=False, in a run that is not in "
        "fp16. For other numbers of fp16's scale, pass GradScalerKwargs(init_scale=...) in kwargs_handlers"
    )


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a scale for the loss of fp16, for the current accelerator."""
    found = torch.accelerator.current_accelerator()
    device = "cuda" if found is None else found.type
    if distributed_type == DistributedType.FSDP:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(device, **kwargs)
    return torch.amp.GradScaler(device, **kwargs)
