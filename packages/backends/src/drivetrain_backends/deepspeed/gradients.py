"""Where each of DeepSpeed's optimizers keeps reduced gradients, and how they are corrected and clipped there."""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

_CLIP_EPSILON = 1e-6  # torch's and DeepSpeed's own, beside the norm


class ReducedGradients(Protocol):
    """The gradients of one engine, between the reduction that closes a window and the engine's step.

    Attributes:
        in_backward: Whether the backward that closes a window makes them ready for the step, and no other may follow.
    """

    in_backward: bool

    def scale_losses(self, scale: float) -> None:
        """Multiply losses by `scale` from now on, and divide gradients by it at the step."""
        ...

    def correct(self, factor: float) -> None:
        """Multiply them by `factor`, at the latest when they are used."""
        ...

    def norm(self) -> Tensor:
        """Their global 2-norm, shape (); infinite or NaN where one of them is. Called on all ranks."""
        ...

    def clip(self, max_norm: float) -> Tensor:
        """Clip their global norm at the step, or now; the norm before, shape (). Called on all ranks.

        A second clip of a window finds the norm that the first has left.
        """
        ...

    def used(self) -> None:
        """Forget this window's correction and clipping."""
        ...

    def discard(self) -> None:
        """Drop them without a step."""
        ...


class Clipping:
    """What the gradients of a window were clipped to: an engine clips once, as it steps, and to one norm.

    Attributes:
        bound: The smallest norm asked for.
    """

    def __init__(self) -> None:
        self.bound = math.inf
        self._left: Tensor | None = None  # the norm after the clips so far

    def add(self, max_norm: float, measure: Callable[[], Tensor]) -> Tensor:
        """Note a clip.

        Args:
            max_norm: What it clips to.
            measure: Gives the norm of gradients that were not clipped yet; called at the first clip alone.

        Returns:
            The norm before it, of shape ().
        """
        before = measure() if self._left is None else self._left
        self._left = before * (max_norm / (before + _CLIP_EPSILON)).clamp(max=1.0)
        self.bound = min(self.bound, max_norm)
        return before


class WholeGradients:
    """Stage 0: `.grad` of the parameters, whole on every rank.

    Args:
        engine: The DeepSpeed engine.
    """

    in_backward = False

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def scale_losses(self, scale: float) -> None:
        """Nothing to do: there is no fp16 in stage 0; see `ReducedGradients.scale_losses`."""
        assert scale == 1.0

    def correct(self, factor: float) -> None:
        """Multiply them in place; see `ReducedGradients.correct`."""
        found = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        torch._foreach_mul_(found, factor)  # pyright: ignore[reportPrivateUsage] as torch's optimizers do

    def norm(self) -> Tensor:
        """Their norm; see `ReducedGradients.norm`."""
        found = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        return nn.utils.get_total_norm(found)

    def clip(self, max_norm: float) -> Tensor:
        """Clip them in place; see `ReducedGradients.clip`."""
        return nn.utils.clip_grad_norm_(self._engine.module.parameters(), max_norm)

    def used(self) -> None:
        """Nothing is kept; see `ReducedGradients.used`."""

    def discard(self) -> None:
        """Drop them; see `ReducedGradients.discard`."""
        self._engine.zero_grad()


class MasterGradients:
    """Stage 1 in bf16: fp32 gradients in flat buffers beside the bf16 parameters.

    Args:
        engine: The DeepSpeed engine.
    """

    in_backward = False

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer
        self._configured_norm: float = engine.gradient_clipping()
        self._clipping = Clipping()

    def scale_losses(self, scale: float) -> None:
        """Nothing to do: bf16 has no loss scale; see `ReducedGradients.scale_losses`."""
        assert scale == 1.0

    def correct(self, factor: float) -> None:
        """Multiply them in place; see `ReducedGradients.correct`."""
        buffers = self._optimizer.fp32_groups_gradients_flat
        torch._foreach_mul_(buffers, factor)  # pyright: ignore[reportPrivateUsage] as torch's optimizers do

    def norm(self) -> Tensor:
        """Their norm; see `ReducedGradients.norm`."""
        from deepspeed.runtime.utils import get_global_norm_of_tensors

        dense, _ = self._optimizer.get_grads_for_norm()
        return _as_nan(torch.as_tensor(get_global_norm_of_tensors(dense)))

    def clip(self, max_norm: float) -> Tensor:
        """Measure them now and let the step clip; see `ReducedGradients.clip`."""
        norm = self._clipping.add(max_norm, self.norm)
        self._optimizer.clip_grad = self._clipping.bound
        return norm

    def used(self) -> None:
        """Clip as configured again; see `ReducedGradients.used`."""
        self._clipping = Clipping()
        self._optimizer.clip_grad = self._configured_norm

    def discard(self) -> None:
        """Drop them; see `ReducedGradients.discard`."""
        self._optimizer.clear_hp_grads()
        self._optimizer.zero_grad()
        self.used()


class PartitionedGradients:
    """ZeRO stages 1 to 3: each rank's part, which the step divides by the loss scale.

    A correction is put into that division, so that it costs no pass over the gradients.

    Args:
        engine: The DeepSpeed engine.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._optimizer = engine.optimizer
        # Offloaded ones travel while the backward runs; done afterwards, each would travel twice more.
        self.in_backward: bool = engine.zero_cpu_offload() or engine.zero_nvme_offload_optimizer()
        self._configured_norm: float = engine.gradient_clipping()
        # Stages 1 and 2 can be told to step without a norm; those that offload need it for more than clipping.
        self._measures_again = (
            bool(getattr(self._optimizer, "compute_grad_norm", False)) and not self.in_backward
        )
        self._scale = 1.0
        self._clipping = Clipping()
        # The optimizer's own scaler moves its scale between measuring and dividing (0.19), so that gradients are
        # halved in the step in which it grows; a scale from outside stays where it is put.
        self._optimizer.custom_loss_scaler = True
        self._optimizer.external_loss_scale = 1.0

    def scale_losses(self, scale: float) -> None:
        """Hand the scale to the optimizer; see `ReducedGradients.scale_losses`."""
        self._scale = scale
        self._optimizer.external_loss_scale = scale

    def correct(self, factor: float) -> None:
        """Put the factor into the step's division; see `ReducedGradients.correct`."""
        self._optimizer.external_loss_scale = self._scale / factor if factor else math.inf

    def norm(self) -> Tensor:
        """Their norm; see `ReducedGradients.norm`."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        if hasattr(self._optimizer, "scaled_global_norm"):  # stages 1 and 2
            scaled = self._optimizer.scaled_global_norm()
        else:
            scaled = combine_grad_norm_groups(self._optimizer._get_norm_groups())
        return _as_nan(torch.as_tensor(scaled)) / self._optimizer.external_loss_scale

    def clip(self, max_norm: float) -> Tensor:
        """Measure them now and let the step clip; see `ReducedGradients.clip`."""
        norm = self._clipping.add(max_norm, self.norm)
        if self._measures_again and norm.isfinite().item():
            # Cut by the division too, so that the step need not measure what is known.
            cut = max(1.0, (norm.item() + _CLIP_EPSILON) / max_norm)
            self._optimizer.external_loss_scale *= cut
            self._optimizer.clip_grad, self._optimizer.compute_grad_norm = 0.0, False
        else:
            self._optimizer.clip_grad = self._clipping.bound
        return norm

    def used(self) -> None:
        """Clip and scale as before; see `ReducedGradients.used`."""
        self._clipping = Clipping()
        self._optimizer.clip_grad = self._configured_norm
        self._optimizer.external_loss_scale = self._scale
        if self._measures_again:
            self._optimizer.compute_grad_norm = True

    def discard(self) -> None:
        """Drop them; see `ReducedGradients.discard`."""
        for parameter in self._engine.module.parameters():
            if parameter.grad is not None and parameter.grad.device.type == "cpu":
                parameter.grad = None  # stage 3's zero_grad asks for its stream, which it has none of (0.19)
        self._optimizer.zero_grad()
        for bucket in self._optimizer.ipg_buckets.values():  # what a backward that failed half-way has left
            getattr(bucket, "clear_params", bucket.clear)()  # stage 3 keeps its buffers
        if hasattr(self._optimizer, "scaled_global_norm"):  # stages 1 and 2, as they do after an overflow
            self._optimizer.micro_step_id = -1  # what a window starts with
            for kept in (self._optimizer.averaged_gradients, self._optimizer.all_grad_tensors):
                kept.update(dict.fromkeys(kept))
            reduced = self._optimizer.params_already_reduced
            reduced[:] = [False] * len(reduced)
            self._optimizer._release_ipg_buffers()
        self.used()


def _as_nan(norm: Tensor) -> Tensor:
    """A norm, NaN where DeepSpeed says -1: of gradients that hold an infinity or NaN."""
    return torch.where(norm < 0, torch.full_like(norm, math.nan), norm)


def gradients_of(engine: Any) -> ReducedGradients:
    """The gradients of an engine, by the kind of its optimizer."""
    if not engine.zero_optimization():
        return WholeGradients(engine)
    if hasattr(engine.optimizer, "fp32_groups_gradients_flat"):
        return MasterGradients(engine)
    return PartitionedGradients(engine)
