"""A prepared model of which this rank holds some stages: all of a batch's micro-batches are trained in one call."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_backends.composed.prepared import ComposedPrepared
from drivetrain_backends.composed.stages import KeepStages, StagedModel, cut_batch, num_samples
from drivetrain_backends.errors import AccumulationError
from drivetrain_backends.gradients.reducer import BackwardOptions
from drivetrain_backends.modules.compile import unwrap_compiled
from drivetrain_backends.state_dict.dtensor import local
from drivetrain_parallel.stages.stage_model import find_absent, not_handed_on
from drivetrain_state import reduce

BY_TRAIN_STEP = (
    "backward() under parallel.pipeline: micro-batches go forward and backward by turns, and no rank has the whole "
    "graph. In place of `loss = ...; accelerator.backward(loss)` and the optimizer's step, call "
    "accelerator.train_step(batch, loss=lambda model, batch: ...), which runs under every backend"
)


class StagedPrepared(ComposedPrepared):
    """A model with its optimizers, of which this rank holds some stages; see `SupportsPieces`."""

    def backward(self, loss: Tensor, *, count: Tensor | float | None = None) -> None:
        """Refuse a backward outside of `train_pieces`."""
        del loss, count
        raise AccumulationError(BY_TRAIN_STEP)

    def train_pieces(self, batch: Any, loss: Callable[[Any, Any], Any], model: Any) -> Tensor:
        """Run forward and backward of a batch, in micro-batches; see `SupportsPieces`. Called on all ranks."""
        stages, tracker = self._stages, self._tracker
        assert isinstance(stages, KeepStages)
        staged: StagedModel = stages.models[unwrap_compiled(self.unwrap())]
        cuts = cut_batch(batch, self._num_pieces(batch, stages.num_pieces))
        losses = PieceLosses(
            [share for _, share in cuts], tracker.begin_pieces(self.group), self._context.device
        )
        try:
            with ExitStack() as held:
                held.enter_context(self.no_sync())

                def backward(output: Tensor, gradient: Tensor | None, *, is_last: bool) -> None:
                    if is_last and self._window.closing:
                        held.close()  # the last backward of this rank reduces the gradients of all
                    # Of the loss, too: it is scaled where it begins, which a backward in two parts does by itself.
                    options = BackwardOptions(
                        gradient=torch.ones_like(output) if gradient is None else gradient
                    )
                    self._gradients.backward(output, self.group.models, options=options)

                def root(piece: int, found: Any) -> Tensor:
                    value, scaler = losses.root(piece, found), self._gradients.scaler
                    return value if scaler is None else scaler.scale(value)

                pieces = [partial(loss, model, piece) for piece, _ in cuts]
                staged.runner.train(pieces, root, backward)
            if self._window.closing:
                self._add_up_shared(staged)
        finally:
            tracker.in_backward = False
        ranks, last = self._context.ranks("pipeline"), staged.runner.model.plan.ranks[-1]
        dist.broadcast(losses.sums, ranks.ranks[last], group=ranks.process_group)
        total, count = losses.sums
        tracker.end_pieces(self.group, count)
        return total

    def _num_pieces(self, batch: Any, most: int) -> int:
        """Return the number of micro-batches that every rank cuts its batch into: shards gather in each of them."""
        own = torch.tensor(min(num_samples(batch), most), device=self._context.device)
        return int(reduce(self._context, own, op="min", over="reads").item())

    @torch.no_grad()
    def _add_up_shared(self, staged: StagedModel) -> None:
        """Add up the gradients of parameters that several stages hold, such as a tied embedding."""
        parameters = self._layout.parameters(self.unwrap())
        for name, group in staged.shared.items():
            if (parameter := parameters.get(name)) is not None and parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(local(parameter.grad), group=group)


class PieceLosses:
    """The losses of the micro-batches of a batch.

    Args:
        shares: The share of the batch's samples that each micro-batch has.
        divisor: The number that all losses are divided by, before their window's correction.
        device: The device of the losses.

    Attributes:
        sums: The sum of the losses, a mean by its share; and the number of items, 1 for all means together.
    """

    def __init__(self, shares: Sequence[float], divisor: Tensor, device: torch.device) -> None:
        self._shares, self._divisor = shares, divisor
        self._is_counted: bool | None = None
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)

    def root(self, piece: int, found: Any) -> Tensor:
        """Return where backward begins, from the loss that a function of `train_step` returned; add it up."""
        if (missing := find_absent(found)) is not None:
            raise AccumulationError(f"the loss takes {not_handed_on(missing)}")
        value, count = found if isinstance(found, tuple) else (found, None)
        if not isinstance(value, Tensor) or value.dim():
            raise TypeError(f"train_step(loss=) returned {value!r}: a tensor of shape () is needed")
        if self._is_counted not in (None, count is not None):
            raise AccumulationError(
                "the loss of a micro-batch was a mean, and that of another a sum with its count: return the same for "
                "all of them"
            )
        self._is_counted = count is not None
        part = value if count is not None else value * self._shares[piece]
        self.sums[0] += part.detach()
        self.sums[1] += self._shares[piece] if count is None else count
        return part / self._divisor
