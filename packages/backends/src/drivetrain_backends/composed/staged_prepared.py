"""A prepared model of which this rank holds some stages: all of a batch's micro-batches are trained in one call."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_backends.composed.prepared import ComposedPrepared
from drivetrain_backends.composed.stages import KeepStages, StagedModel, cut_batch
from drivetrain_backends.errors import AccumulationError
from drivetrain_backends.gradients.reducer import BackwardOptions
from drivetrain_backends.modules.compile import unwrap_compiled
from drivetrain_backends.state_dict.dtensor import local
from drivetrain_parallel.stages.stage_model import find_absent, not_handed_on

BY_TRAIN_STEP = (
    "backward() under parallel.pipeline: micro-batches go forward and backward by turns, and no rank has the whole "
    "graph. In place of `loss = ...; accelerator.backward(loss)` and the optimizer's step, call "
    "accelerator.train_step(batch, loss=lambda model, batch: ...), which runs under every backend"
)


class StagedPrepared(ComposedPrepared):
    """A model with its optimizers, of which this rank holds some stages; see `SupportsStages`."""

    def backward(self, loss: Tensor, *, count: Tensor | float | None = None) -> None:
        """Refuse a backward outside of `train_pieces`."""
        raise AccumulationError(BY_TRAIN_STEP)

    def train_pieces(self, batch: Any, loss: Callable[[Any, Any], Any], model: Any) -> Tensor:
        """Run forward and backward of a batch, in micro-batches; see `SupportsStages`. Called on all ranks."""
        stages = self._stages
        assert isinstance(stages, KeepStages)
        staged: StagedModel = stages.models[unwrap_compiled(self.unwrap())]
        tracker, is_counted = self._tracker, set[bool]()
        cuts = cut_batch(batch, stages.num_pieces)
        divisor = tracker.begin_pieces(self.group)
        # The sum of what the micro-batches' losses contribute, the number of items, and whether they are counted.
        sums = torch.zeros(3, dtype=torch.float64, device=self._context.device)

        def root(piece: int, found: Any) -> Tensor:
            value, count = found if isinstance(found, tuple) else (found, None)
            is_counted.add(count is not None)
            if len(is_counted) > 1:
                raise AccumulationError(
                    "the loss of a micro-batch was a mean, and that of another a sum with its count: return the same "
                    "for all"
                )
            if (missing := find_absent(found)) is not None:
                raise AccumulationError(f"the loss takes {not_handed_on(missing)}")
            if not isinstance(value, Tensor) or value.dim():
                raise TypeError(f"train_step(loss=): returned {type(value).__name__}; a tensor of shape () is needed")
            share = cuts[piece][1]
            part = value * share if count is None else value
            sums[0] += part.detach()
            sums[1] += share if count is None else count
            sums[2] = float(count is not None)
            return part / divisor

        pieces = [lambda piece=piece: loss(model, piece) for piece, _ in cuts]
        try:
            with ExitStack() as stack:
                stack.enter_context(self.no_sync())

                def backward(output: Tensor, gradient: Tensor | None, *, is_last: bool) -> None:
                    if is_last and self._window.closing:
                        stack.close()  # the last backward of this rank averages the gradients of all
                    options = BackwardOptions(gradient=gradient)
                    self._gradients.backward(output, self.group.models, options=options)

                staged.runner.train(pieces, root, backward)
            if self._window.closing:
                self._add_up_shared(staged)
        finally:
            tracker.in_backward = False
        ranks = self._context.ranks("pipeline")
        dist.broadcast(sums, ranks.ranks[staged.runner.model.plan.ranks[-1]], group=ranks.process_group)
        tracker.end_pieces(self.group, sums[1])
        return sums[0]

    @torch.no_grad()
    def _add_up_shared(self, staged: StagedModel) -> None:
        """Add up the gradients of parameters that several stages hold, such as a tied embedding."""
        parameters = self._layout.parameters(self.unwrap())
        for name, group in staged.shared.items():
            if (parameter := parameters.get(name)) is not None and parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(local(parameter.grad), group=group)
