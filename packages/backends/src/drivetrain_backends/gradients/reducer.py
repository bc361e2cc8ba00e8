"""The interface that runs a backward and reduces its gradients over ranks, and its form for gradients in `.grad`."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from drivetrain_backends.gradients.multi_tensor import multiply_by_device, stored_values
from drivetrain_precision import LossScaler


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BackwardOptions:
    """The arguments that torch's `backward` takes.

    Attributes:
        retain_graph: Whether the graph is kept for another backward.
        create_graph: Whether the gradients get a graph for second derivatives; True also keeps the loss's graph.
        inputs: The leaves that get gradients; None for all.
        gradient: The gradient of what backward begins with, if that is no loss.
    """

    retain_graph: bool = False
    create_graph: bool = False
    inputs: Sequence[Tensor] | None = None
    gradient: Tensor | None = None

    @property
    def said(self) -> str:
        """The text of the arguments that differ from the defaults, for messages; empty if none differ."""
        found = {"retain_graph=True": self.retain_graph, "create_graph=True": self.create_graph}
        listed = [name for name, is_said in found.items() if is_said]
        listed += [] if self.inputs is None else [f"inputs=({len(self.inputs)} tensors)"]
        return ", ".join(listed)

    def run(self, loss: Tensor) -> None:
        """Run torch's backward of a loss."""
        loss.backward(
            gradient=self.gradient,
            retain_graph=self.retain_graph or self.create_graph,
            create_graph=self.create_graph,
            inputs=self.inputs,
        )


ONCE = BackwardOptions()


class GradientReducer:
    """An object that runs backwards, averages their gradients over ranks, and makes them final. Called on all ranks.

    The base class is that of one process, which averages nothing. `model` is the user's module.

    Attributes:
        not_alone: The reason why no rank can step alone, for the error; None if it can.
        not_joined: The reason why no rank may run out of batches early; None if it may.
        not_split: The reason why a backward cannot come in two parts, of inputs and of weights; None if it can.
        partners: The ranks that compute one sample together with this one, and step or skip as it does; None for this
            rank alone.
    """

    not_alone: ClassVar[str | None] = None
    not_joined: ClassVar[str | None] = None
    not_split: ClassVar[str | None] = None

    def __init__(self, scaler: LossScaler | None) -> None:
        self.scaler = scaler  # the loss scale, for fp16
        self.partners: ProcessGroup | None = None
        self.is_joined = False  # whether ranks may run out of batches at different steps

    def backward(self, loss: Tensor, models: Sequence[nn.Module], *, options: BackwardOptions = ONCE) -> None:
        """Run torch's backward of a loss, of shape (), already divided for its window; for fp16, scale it first.

        `models` are the modules that the loss trains, according to the caller. Options that cannot be honoured raise
        an AccumulationError.
        """
        del models
        scaler = self.scaler if options.gradient is None else None  # a gradient follows from a scaled loss
        options.run(loss if scaler is None else scaler.scale(loss))

    def leaves(self, models: Sequence[nn.Module]) -> list[Tensor]:
        """Return the leaves of these models in a loss's graph: the parameters, or tensors that replace them."""
        return [parameter for model in models for parameter in model.parameters()]

    def finalize(self, models: Sequence[nn.Module], factor: Tensor | float | None) -> bool:
        """Unscale the reduced gradients of a closed window, and multiply them by `factor`, in one pass.

        Return True if a gradient holds an infinity or NaN; only fp16 gradients are checked.
        """
        if factor is None and self.scaler is None:
            return False
        gradients = [stored_values(p.grad) for p in trainable_parameters(models) if p.grad is not None]
        if self.scaler is not None:
            found = self.scaler.unscale(gradients, factor=1.0 if factor is None else factor)
            if self.partners is not None:
                dist.all_reduce(found, dist.ReduceOp.MAX, group=self.partners)
            overflowed = bool(found.item())
            self.scaler.observe(overflowed=overflowed)
            return overflowed
        if factor is not None:
            multiply_by_device(gradients, factor)
        return False

    def local(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep the gradients of a model on their ranks in the block; see `Prepared.no_sync`."""
        del model
        return nullcontext()

    def alone(self, model: nn.Module) -> AbstractContextManager[None]:
        """Step a model on this rank's own gradients in the block; see `SupportsLocalSteps`."""
        if self.not_alone is not None:
            raise RuntimeError(f"{type(model).__name__}: {self.not_alone}")
        return nullcontext()

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[object]:
        """Let ranks run out of batches at different steps in the block; see `Backend.join`."""
        del models
        if self.not_joined is not None:
            raise RuntimeError(f"join_uneven_inputs: {self.not_joined}")
        return nullcontext()

    def steps_together(self, model: nn.Module) -> bool:
        """Return whether all ranks step a model at the same time, so that they may gather an error."""
        del model
        return self.partners is not None

    def cleared(self, models: Sequence[nn.Module]) -> None:
        """Drop what is held beside `.grad`, after `zero_grad` has cleared the gradients of models."""

    def close(self) -> None:
        """Forget all models, and release what the reducer holds."""


class ParameterGradients(GradientReducer):
    """The gradients that a backward leaves in `.grad`, in full or as this rank's shards; other code may edit them."""

    averages = False  # whether ranks hold replicas, so that gradients changed by other code must be averaged

    def have_moved(self, models: Sequence[nn.Module]) -> bool:
        """Return whether gradients moved to other tensors, with unchanged values, since the last call."""
        del models
        return False

    def mark_edited(self, models: Sequence[nn.Module]) -> None:
        """Record that other code changed the gradients of models. Ranks then average these in `finalize`."""
        del models

    def are_averaged(self, models: Sequence[nn.Module]) -> bool:
        """Return whether all gradients of models are averaged, so that `finalize` has nothing to average."""
        del models
        return True

    def average(self, models: Sequence[nn.Module]) -> None:
        """Average the gradients of models over ranks, if this reducer `averages`. Called on all ranks."""
        del models


def trainable_parameters(models: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of models that require a gradient, without duplicates."""
    return list({p: None for model in models for p in model.parameters() if p.requires_grad})
