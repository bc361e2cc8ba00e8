"""Where each of DeepSpeed's optimizers keeps reduced gradients, and how they are corrected and clipped there."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drivetrain_backends.accumulation import AccumulationWindow
from drivetrain_backends.deepspeed.model import EngineModel
from drivetrain_backends.errors import AccumulationError
from drivetrain_precision import LossScaler

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
        """Clip their global norm at the step, or now; the norm before, shape (). Called on all ranks."""
        ...

    def used(self) -> None:
        """Forget this window's correction and clipping."""
        ...

    def discard(self) -> None:
        """Drop them without a step."""
        ...


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
        self._optimizer.clip_grad = max_norm
        return self.norm()

    def used(self) -> None:
        """Clip as configured again; see `ReducedGradients.used`."""
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
        norm = self.norm()
        if self._measures_again and norm.isfinite().item():
            # Cut by the division too, so that the step need not measure what is known.
            cut = max(1.0, (norm.item() + _CLIP_EPSILON) / max_norm)
            self._optimizer.external_loss_scale *= cut
            self._optimizer.clip_grad, self._optimizer.compute_grad_norm = 0.0, False
        else:
            self._optimizer.clip_grad = max_norm
        return norm

    def used(self) -> None:
        """Clip and scale as before; see `ReducedGradients.used`."""
        self._optimizer.clip_grad = self._configured_norm
        self._optimizer.external_loss_scale = self._scale
        if self._measures_again:
            self._optimizer.compute_grad_norm = True

    def discard(self) -> None:
        """Drop them; see `ReducedGradients.discard`."""
        self._optimizer.zero_grad()
        if hasattr(self._optimizer, "scaled_global_norm"):  # stages 1 and 2, as they do after an overflow
            self._optimizer.micro_step_id = -1  # what a window starts with
            for kept in (self._optimizer.averaged_gradients, self._optimizer.all_grad_tensors):
                kept.update(dict.fromkeys(kept))
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


class EngineCarrier:
    """Runs backwards through the engines of the models, one at a time; see `GradientCarrier`.

    Args:
        window: The accumulation window.
        scaler: The loss scale, for fp16.
    """

    def __init__(self, window: AccumulationWindow, scaler: LossScaler | None) -> None:
        self._window = window
        self._scaler = scaler
        self._engines: dict[nn.Module, tuple[Any, ReducedGradients]] = {}
        self._ready: set[nn.Module] = set()  # whose gradients the last backward made ready for the step
        self._running: nn.Module | None = None

    def add(self, engine: Any) -> ReducedGradients:
        """Take in an engine, by the model it trains."""
        self._engines[engine.module] = engine, (gradients := gradients_of(engine))
        return gradients

    def run(self, loss: Tensor, models: Sequence[nn.Module]) -> None:
        """Run the engine's backward; see `GradientCarrier.run`.

        Raises:
            AccumulationError: The loss is said to train several models, or none that has an engine.
        """
        if len(models) != 1 or models[0] not in self._engines:
            raise AccumulationError(
                f"backward() of a loss of {' and '.join(type(m).__name__ for m in models)}: a DeepSpeed engine "
                "trains one model with one optimizer; put models that one loss trains into one nn.Module, and say "
                "backward(..., model=) where several are prepared"
            )
        engine, gradients = self._engines[models[0]]
        if models[0] in self._ready and self._window.closing:
            raise AccumulationError(
                f"a second backward() of {type(models[0]).__name__} in the micro-batch that closes its window: with "
                "offload_optimizer the first has moved the gradients already; add the losses up and call it once"
            )
        closes = self._window.closing and gradients.in_backward
        if self._scaler is not None:
            gradients.scale_losses(self._scaler.value)
        self._running = models[0]
        try:
            engine.set_gradient_accumulation_boundary(closes)
            engine.backward(loss, scale_wrt_gas=False)
        finally:
            self._running = None
        if closes:
            self._ready.add(models[0])

    def settle(self, models: Sequence[nn.Module], factor: Tensor | float | None) -> bool:
        """Reduce and correct the gradients; overflows are looked for at the step; see `GradientCarrier.settle`."""
        engine, gradients = self._engines[models[0]]
        if models[0] in self._ready:
            self._ready.discard(models[0])
        else:
            _reduce(engine)
        if factor is not None:
            gradients.correct(float(factor))
        return False

    def forget(self, model: nn.Module) -> None:
        """Note that the gradients of a model were dropped."""
        self._ready.discard(model)

    def notice(self, model: EngineModel) -> None:
        """Refuse a backward that reaches an engine which is not the one that runs.

        Raises:
            AccumulationError: It does.
        """
        if self._running is model.module:
            return
        name = type(model.module).__name__
        if self._running is None:
            raise AccumulationError(
                f"loss.backward() reached {name}, whose gradients are its DeepSpeed engine's: call "
                "accelerator.backward(loss) in its place"
            )
        raise AccumulationError(
            f"a loss of {type(self._running).__name__} reached {name}, whose DeepSpeed engine would take its "
            f"gradients for its own: freeze {name} while it is passed through, {name}.requires_grad_(False), and "
            "unfreeze it before its own forward"
        )


def _reduce(engine: Any) -> None:
    """Make an engine's gradients ready for its step, as a backward does that is told it closes a window."""
    engine.set_gradient_accumulation_boundary(True)
    if engine.zero_optimization_partition_gradients():  # stages 2 and 3 have reduced them in backward
        engine.optimizer.finalize_gradient_accumulation_boundary()
    else:
        engine.allreduce_gradients()
