"""The private names of torch that this package uses, in one place.

torch has no public API for them. They are the same in torch 2.9 to 2.15; tests/precision/test_compat.py holds each
one to what is relied on, and docs/platforms.md lists them.
"""

import torch
from torch import Tensor


def unscale(gradients: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Multiply gradients in place, and write 1.0 to `found_inf` if one is not finite, in one kernel.

    Args:
        gradients: The gradients, of one dtype on one device.
        found_inf: A tensor of shape () in fp32 on the host or on that device, which is otherwise left as it is.
        inverse: The factor, a tensor of shape () in fp32 there.
    """
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse)


def update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> None:
    """Write the scale of the next step, and the number of steps since it last changed, without reading the device.

    Args:
        scale: The scale, of shape () in fp32.
        growth_tracker: The number of steps, of shape () in int32.
        found_inf: A tensor of shape () in fp32 that is not 0 if the step overflowed.
        growth_factor: The factor of the scale after `growth_interval` steps without an overflow.
        backoff_factor: The factor of the scale after an overflow.
        growth_interval: The number of steps.
    """
    torch.ops.aten._amp_update_scale_(
        scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval
    )


def has_bf16_units() -> bool:
    """Return whether this processor has bf16 instructions; False where torch cannot tell, as off x86."""
    return getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
