"""Dynamic loss scaling for fp16: scale the loss up, bring gradients back, skip the step that overflowed.

The scale lives on the device. Reading back whether a step overflowed is the one synchronisation of a step. The
method is that of Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from drivetrain_precision.settings import PrecisionSettings


class LossScaler:
    """The loss scale of one training run.

    A step is: `scale` the loss, backward, `unscale` the gradients (once for each group of parameters), ask
    `overflowed`, step or skip, then `update` before the next window's first loss is scaled.

    Args:
        device: Where the scale is kept: the device of the gradients.
        settings: How the scale starts and moves.
    """

    def __init__(self, device: torch.device, settings: PrecisionSettings | None = None) -> None:
        self.settings = settings or PrecisionSettings()
        self._scale = torch.full((), self.settings.initial_scale, dtype=torch.float32, device=device)
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self._found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self._unscaled = False

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the current scale, in fp32 at least."""
        return loss * self._scale

    def unscale(self, gradients: Iterable[Tensor], *, factor: Tensor | float = 1.0) -> Tensor:
        """Divide gradients by the scale in place, times `factor`, and look for overflow in the same pass.

        Args:
            gradients: The gradients; any mix of floating dtypes but fp16.
            factor: Multiplied in at no cost: a correction of the loss's normalisation.

        Returns:
            A float tensor of shape (): 1.0 if a gradient held an infinity or NaN, else 0.0. It is also added to
            what `overflowed` and `update` look at. Ranks that hold different gradients must agree on it first.

        Raises:
            ValueError: A gradient is fp16: its parameters are, and an update of those loses small steps.
        """
        found_inf = torch.zeros_like(self._found_inf)
        inverse = (self._scale.reciprocal() * factor).float()
        for group in _by_device_and_dtype(gradients):
            if group[0].dtype is torch.float16:
                raise ValueError(
                    "mixed_precision='fp16': a parameter is fp16 itself; keep the parameters in fp32 "
                    "(model.float()) and let autocast compute in fp16"
                )
            torch.ops.aten._amp_foreach_non_finite_check_and_unscale_(group, found_inf, inverse)
        self._found_inf = torch.maximum(self._found_inf, found_inf)
        self._unscaled = True
        return found_inf

    @property
    def value(self) -> float:
        """The current scale. Waits for the device."""
        return self._scale.item()

    def observe(self, *, overflowed: bool) -> None:
        """Note a step whose gradients another unscaled, as an engine does, and whether one of them overflowed."""
        if overflowed:
            self._found_inf.fill_(1.0)
        self._unscaled = True

    def overflowed(self) -> bool:
        """Whether a gradient unscaled since the last `update` held an infinity or NaN. Waits for the device."""
        return bool(self._found_inf.item())

    def update(self) -> None:
        """Move the scale: down if a gradient overflowed since the last update, up after a long run without."""
        if not self._unscaled:
            return
        s = self.settings
        torch.ops.aten._amp_update_scale_(
            self._scale,
            self._growth_tracker,
            self._found_inf,
            s.growth_factor,
            s.backoff_factor,
            s.growth_interval,
        )
        self._found_inf.zero_()
        self._unscaled = False

    def state_dict(self) -> dict[str, float | int]:
        """The scale and the number of steps since it last moved. Waits for the device."""
        return {"scale": self._scale.item(), "growth_tracker": int(self._growth_tracker.item())}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Take up the scale of a saved run."""
        self._scale.fill_(state["scale"])
        self._growth_tracker.fill_(state["growth_tracker"])
        self._found_inf.zero_()
        self._unscaled = False


def _by_device_and_dtype(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    groups: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device, tensor.dtype].append(tensor)
    return groups.values()
