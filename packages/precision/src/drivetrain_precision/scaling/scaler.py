"""Dynamic loss scaling for fp16: scale the loss, unscale the gradients, and skip steps that overflow.

The scale is a tensor on the device. Reading whether a step overflowed is the only device synchronisation of a step.
The method follows Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from drivetrain_precision.compat import unscale, update_scale
from drivetrain_precision.settings import PrecisionSettings

_LARGEST = torch.finfo(torch.float32).max


class LossScaler:
    """The loss scale of one training run, on the device of the gradients.

    A step is: `scale` the loss, run backward, `unscale` the gradients (once for each parameter group), check
    `overflowed`, step or skip, then `update` before scaling the first loss of the next accumulation window. The scale
    never falls below the settings' `min_scale`; `SkippedSteps` ends a run that overflows there.
    """

    def __init__(self, device: torch.device, settings: PrecisionSettings | None = None) -> None:
        self.settings = settings or PrecisionSettings()
        # In fp32, as the scale can be equal to it.
        self._floor = torch.tensor(self.settings.min_scale, dtype=torch.float32).item()
        self._scale = torch.full((), self.settings.initial_scale, dtype=torch.float32, device=device)
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self._found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self._unscaled = False
        # Whether an overflow since the last update is known to the host; None while it has not read all checks.
        self._overflow_known: bool | None = False
        # The scale, and the steps since it changed, as the host computes them; None after a step it knows nothing of.
        self._on_host: tuple[float, int] | None = (self.settings.initial_scale, 0)

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the current scale, in at least fp32."""
        return loss * self._scale

    def unscale(self, gradients: Iterable[Tensor], *, factor: Tensor | float = 1.0) -> Tensor:
        """Divide gradients in place by the scale, multiply them by `factor`, and check for overflow, in one pass.

        Args:
            gradients: The gradients, of any floating-point dtype but fp16. ValueError for fp16: their parameters are
                in fp16 too, which loses small updates.
            factor: A factor applied at no extra cost, such as a correction of the loss's normalization.

        Returns:
            A float tensor of shape (): 1.0 if a gradient held an infinity or NaN, else 0.0. `overflowed` and `update`
            use the result too. Ranks that hold different gradients must first agree on it.
        """
        found_inf = torch.zeros_like(self._found_inf)
        inverse = (self._scale.reciprocal() * factor).float()
        groups: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for gradient in gradients:
            groups[gradient.device, gradient.dtype].append(gradient)
        for group in groups.values():
            if group[0].dtype is torch.float16:
                raise ValueError(
                    "mixed_precision='fp16': a parameter is fp16 itself; keep the parameters in fp32 "
                    "(model.float()) and let autocast compute in fp16"
                )
            unscale(group, found_inf, inverse)
        self._found_inf = torch.maximum(self._found_inf, found_inf)
        self._unscaled = True
        self._overflow_known = self._overflow_known or None
        return found_inf

    @property
    def value(self) -> float:
        """The current loss scale. Reading it synchronises with the device."""
        return self._scale.item()

    def observe(self, *, overflowed: bool) -> None:
        """Record whether the gradients of the last `unscale` overflowed, or gradients that an engine unscaled.

        Without an overflow, `update` then needs one kernel less.
        """
        if overflowed:
            self._found_inf.fill_(1.0)
        self._overflow_known = bool(self._overflow_known or overflowed)
        self._unscaled = True

    def can_fall(self, *, after_overflows: int = 0) -> bool:
        """Return whether an overflow, after `after_overflows` others, leaves a smaller scale to try.

        The call does not synchronize with the device while the host knows whether each step overflowed.
        """
        if self._on_host is None:
            self._on_host = self.value, int(self._growth_tracker.item())
        scale = self._on_host[0]
        for _ in range(after_overflows):
            scale *= self.settings.backoff_factor
        return scale > self._floor

    def overflowed(self) -> bool:
        """Return whether a gradient since the last `update` held an infinity or NaN. Synchronises with the device."""
        self._overflow_known = bool(self._found_inf.item())
        return self._overflow_known

    def update(self) -> None:
        """Lower the scale if a gradient overflowed since the last update; raise it after a long run without overflow.

        Without an `unscale` or `observe` since the last update, do nothing.
        """
        if not self._unscaled:
            return
        s = self.settings
        tensors = self._scale, self._growth_tracker, self._found_inf
        update_scale(*tensors, s.growth_factor, s.backoff_factor, s.growth_interval)
        if self._overflow_known is not False:
            self._scale.clamp_(min=self._floor)
        self._on_host = self._compute_on_host()
        self._found_inf.zero_()
        self._unscaled = self._overflow_known = False

    def state_dict(self) -> dict[str, float | int]:
        """Return the scale and the number of steps since it last changed. Synchronises with the device."""
        return {"scale": self._scale.item(), "growth_tracker": int(self._growth_tracker.item())}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Load the scale of a saved run; ValueError if it is below the settings' `min_scale`, or no number."""
        if not state["scale"] >= self._floor:
            raise ValueError(
                f"the checkpoint's loss scale of {state['scale']!r} is below precision.min_scale="
                f"{self.settings.min_scale!r}: set min_scale to that of the saved run, or lower"
            )
        self._scale.fill_(state["scale"])
        self._growth_tracker.fill_(state["growth_tracker"])
        self._on_host = float(state["scale"]), int(state["growth_tracker"])
        self._found_inf.zero_()
        self._unscaled = self._overflow_known = False

    def _compute_on_host(self) -> tuple[float, int] | None:
        """Return the scale and steps since its last change that `update` will set; None if the host cannot know."""
        s = self.settings
        if self._on_host is None or self._overflow_known is None:
            return None
        scale, num_steps = self._on_host
        if self._overflow_known:
            return max(scale * s.backoff_factor, self._floor), 0
        if num_steps + 1 < s.growth_interval:
            return scale, num_steps + 1
        grown = scale * s.growth_factor  # as on the device: not beyond the range of fp32
        return (grown if grown <= _LARGEST else scale), 0
