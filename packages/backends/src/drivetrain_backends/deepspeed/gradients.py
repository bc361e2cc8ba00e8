"""The reduced gradients of DeepSpeed's optimizers: where each keeps them, and how they are corrected and clipped."""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

_CLIP_EPSILON = 1e-6  # torch's and DeepSpeed's own, added to the norm


class ReducedGradients(Protocol):
    """The gradients of one engine, between the reduction that closes a window and the engine's step.

    Attributes:
        in_backward: Whether the backward that closes a window makes the gradients ready for the step, so that no
            other backward may follow.
    """

    in_backward: bool

    def scale_losses(self, scale: float) -> None:
        """Multiply losses by `scale` from now on, and divide gradients by it at the step."""
        ...

    def correct(self, factor: float) -> None:
        """Multiply the gradients by `factor`, at the latest when they are used."""
        ...

    def norm(self) -> Tensor:
        """Return the global 2-norm, shape (); infinite or NaN if a gradient is. Called on all ranks."""
        ...

    def clip(self, max_norm: float) -> Tensor:
        """Clip the global norm, now or at the step, and return the norm before, shape (). Called on all ranks.

        A second clip in a window starts from the norm that the first one left.
        """
        ...

    def used(self) -> None:
        """Forget this window's correction and clipping."""
        ...

    def discard(self) -> None:
        """Drop the gradients without a step."""
        ...


class Clipping:
    """The clipping of a window's gradients: an engine clips only once, at its step, and to a single norm.

    Attributes:
        bound: The smallest of the requested norms.
    """

    def __init__(self) -> None:
        self.bound = math.inf
        self._left: Tensor | None = None  # the norm after the clips so far

    def add(self, max_norm: float, measure: Callable[[], Tensor]) -> Tensor:
        """Record a clip.

        Args:
            max_norm: The norm to clip to.
            measure: A function that returns the norm of unclipped gradients; called at the first clip only.

        Returns:
            The norm before this clip, of shape ().
        """
        before = measure() if self._left is None else self._left
        self._left = before * (max_norm / (before + _CLIP_EPSILON)).clamp(max=1.0)
        self.bound = min(self.bound, max_norm)
        return before


class WholeGradients:
    """The gradients of stage 0: `.grad` of the parameters, in full on every rank.

    Args:
        engine: The DeepSpeed engine.
    """

    in_backward = False

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def scale_losses(self, scale: float) -> None:
        """Do nothing, because stage 0 has no fp16; see `ReducedGradients.scale_losses`."""
        assert scale == 1.0

    def correct(self, factor: float) -> None:
        """Multiply the gradients in place; see `ReducedGradients.correct`."""
        found = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        torch._foreach_mul_(found, factor)  # pyright: ignore[reportPrivateUsage] as torch's optimizers do

    def norm(self) -> Tensor:
        """Return the norm; see `ReducedGradients.norm`."""
        found = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        return nn.utils.get_total_norm(found)

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients in place; see `ReducedGradients.clip`."""
        return nn.utils.clip_grad_norm_(self._engine.module.parameters(), max_norm)

    def used(self) -> None:
        """Do nothing, because nothing is recorded; see `ReducedGradients.used`."""

    def discard(self) -> None:
        """Drop the gradients; see `ReducedGradients.discard`."""
        self._engine.zero_grad()


class MasterGradients:
    """The gradients of stage 1 in bf16: flat fp32 buffers beside the bf16 parameters.

    Args:
        engine: The DeepSpeed engine.
    """

    in_backward = False

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer
        self._configured_norm: float = engine.gradient_clipping()
        self._clipping = Clipping()

    def scale_losses(self, scale: float) -> None:
        """Do nothing, because bf16 has no loss scale; see `ReducedGradients.scale_losses`."""
        assert scale == 1.0

    def correct(self, factor: float) -> None:
        """Multiply the gradients in place; see `ReducedGradients.correct`."""
        buffers = self._optimizer.fp32_groups_gradients_flat
        torch._foreach_mul_(buffers, factor)  # pyright: ignore[reportPrivateUsage] as torch's optimizers do

    def norm(self) -> Tensor:
        """Return the norm; see `ReducedGradients.norm`."""
        from deepspeed.runtime.utils import get_global_norm_of_tensors

        dense, _ = self._optimizer.get_grads_for_norm()
        return _as_nan(torch.as_tensor(get_global_norm_of_tensors(dense)))

    def clip(self, max_norm: float) -> Tensor:
        """Measure the norm now and let the step clip; see `ReducedGradients.clip`."""
        norm = self._clipping.add(max_norm, self.norm)
        self._optimizer.clip_grad = self._clipping.bound
        return norm

    def used(self) -> None:
        """Restore the configured clipping; see `ReducedGradients.used`."""
        self._clipping = Clipping()
        self._optimizer.clip_grad = self._configured_norm

    def discard(self) -> None:
        """Drop the gradients; see `ReducedGradients.discard`."""
        self._optimizer.clear_hp_grads()
        self._optimizer.zero_grad()
        self.used()


class PartitionedGradients:
    """The gradients of ZeRO stages 1 to 3: each rank's partition, which the step divides by the loss scale.

    A correction is folded into that division, so that it needs no pass over the gradients.

    Args:
        engine: The DeepSpeed engine.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._optimizer = engine.optimizer
        # Offloaded gradients are copied during backward; reduced afterwards, each would be copied twice more.
        self.in_backward: bool = engine.zero_cpu_offload() or engine.zero_nvme_offload_optimizer()
        self._configured_norm: float = engine.gradient_clipping()
        # Stages 1 and 2 can step without computing a norm; offloading optimizers need it for more than clipping.
        self._measures_again = (
            bool(getattr(self._optimizer, "compute_grad_norm", False)) and not self.in_backward
        )
        self._scale = 1.0
        self._clipping = Clipping()
        # The optimizer's own scaler changes its scale between measuring and dividing (0.19), so that gradients are
        # halved in the step in which it grows; an external scale is left unchanged.
        self._optimizer.custom_loss_scaler = True
        self._optimizer.external_loss_scale = 1.0

    def scale_losses(self, scale: float) -> None:
        """Set the scale of the optimizer; see `ReducedGradients.scale_losses`."""
        self._scale = scale
        self._optimizer.external_loss_scale = scale

    def correct(self, factor: float) -> None:
        """Fold the factor into the step's division; see `ReducedGradients.correct`."""
        self._optimizer.external_loss_scale = self._scale / factor if factor else math.inf

    def norm(self) -> Tensor:
        """Return the norm; see `ReducedGradients.norm`."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        if hasattr(self._optimizer, "scaled_global_norm"):  # stages 1 and 2
            scaled = self._optimizer.scaled_global_norm()
        else:
            scaled = combine_grad_norm_groups(self._optimizer._get_norm_groups())
        return _as_nan(torch.as_tensor(scaled)) / self._optimizer.external_loss_scale

    def clip(self, max_norm: float) -> Tensor:
        """Measure the norm now and let the step clip; see `ReducedGradients.clip`."""
        norm = self._clipping.add(max_norm, self.norm)
        if self._measures_again and norm.isfinite().item():
            # Clipped by the division too, so that the step need not measure the norm again.
            cut = max(1.0, (norm.item() + _CLIP_EPSILON) / max_norm)
            self._optimizer.external_loss_scale *= cut
            self._optimizer.clip_grad, self._optimizer.compute_grad_norm = 0.0, False
        else:
            self._optimizer.clip_grad = self._clipping.bound
        return norm

    def used(self) -> None:
        """Restore clipping and scale; see `ReducedGradients.used`."""
        self._clipping = Clipping()
        self._optimizer.clip_grad = self._configured_norm
        self._optimizer.external_loss_scale = self._scale
        if self._measures_again:
            self._optimizer.compute_grad_norm = True

    def discard(self) -> None:
        """Drop the gradients; see `ReducedGradients.discard`."""
        for parameter in self._engine.module.parameters():
            if parameter.grad is not None and parameter.grad.device.type == "cpu":
                parameter.grad = None  # stage 3's zero_grad needs a stream, which the CPU lacks (0.19)
        self._optimizer.zero_grad()
        for bucket in self._optimizer.ipg_buckets.values():  # left by a backward that failed midway
            getattr(bucket, "clear_params", bucket.clear)()  # stage 3 keeps its buffers
        if hasattr(self._optimizer, "scaled_global_norm"):  # stages 1 and 2, as they do after an overflow
            self._optimizer.micro_step_id = -1  # the value at the start of a window
            for kept in (self._optimizer.averaged_gradients, self._optimizer.all_grad_tensors):
                kept.update(dict.fromkeys(kept))
            reduced = self._optimizer.params_already_reduced
            reduced[:] = [False] * len(reduced)
            self._optimizer._release_ipg_buffers()
        self.used()


def _as_nan(norm: Tensor) -> Tensor:
    """Return a norm with NaN in place of -1, DeepSpeed's value for gradients that hold an infinity or NaN."""
    return torch.where(norm < 0, torch.full_like(norm, math.nan), norm)


def gradients_of(engine: Any) -> ReducedGradients:
    """Return the gradients of an engine, by the kind of its optimizer."""
    if not engine.zero_optimization():
        return WholeGradients(engine)
    if hasattr(engine.optimizer, "fp32_groups_gradients_flat"):
        return MasterGradients(engine)
    return PartitionedGradients(engine)
