"""Sharded gradients: averaged by FSDP, made final here."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain_backends.errors import AccumulationError
from drivetrain_backends.fsdp.frozen_blocks import FrozenBlocks
from drivetrain_backends.fsdp.misuse import check_unconverted
from drivetrain_backends.fsdp.retained_models import RetainedModel
from drivetrain_backends.fsdp.sharded_model import ShardedModel
from drivetrain_backends.gradients.averaging import average
from drivetrain_backends.gradients.backward_options import ONCE, BackwardOptions
from drivetrain_backends.gradients.multi_tensor import multiply_by_device, unscale_on_host
from drivetrain_backends.gradients.reducer import ParameterGradients
from drivetrain_backends.modules.wrap_policy import class_name
from drivetrain_backends.state_dict.dtensor import local
from drivetrain_precision import LossScaler


class ShardedGradients(ParameterGradients):
    """The gradients that FSDP leaves in `.grad`: shards of the mean over all ranks; full ones of plain parameters.

    Attributes:
        holding: The models whose backwards are not reduced at present.
        held: The models whose last backward was not reduced: their gradients are full, and not in `.grad`.
        retained: The retained parts of the sharded models, by model.
    """

    def __init__(
        self,
        scaler: LossScaler | None,
        device: torch.device,
        sharded: Mapping[nn.Module, ShardedModel],
        frozen: FrozenBlocks,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(scaler)
        self._device = device
        self._sharded = sharded
        self._frozen = frozen
        self._dtype = dtype
        self.holding: set[nn.Module] = set()
        self.held: set[nn.Module] = set()
        self.retained: dict[nn.Module, RetainedModel] = {}

    def backward(self, loss: Tensor, models: Sequence[nn.Module], *, options: BackwardOptions = ONCE) -> None:
        """Run torch's backward; see `GradientReducer.backward`."""
        if options.said:
            raise AccumulationError(
                f"backward({options.said}): FSDP frees the gathered parameters behind one backward, and "
                "reduces the gradients of all; add the losses of one forward up and call backward(loss) once"
            )
        for model in models:
            if self._sharded[model].in_backward():
                raise AccumulationError(
                    f"an earlier backward of {class_name(model)} ended in an error half way, and FSDP waits for "
                    "its end: gradients would never be reduced again. Go on from a checkpoint, with a model that is "
                    "built and prepared anew"
                )
        self._frozen.give_dtypes()
        with ExitStack() as stack:
            for one in self.retained.values():
                stack.enter_context(one.use.paused())
                one.hooks.carry()
            try:
                super().backward(loss, models)
            except RuntimeError as error:
                check_unconverted(self._sharded.values(), error)
                raise
        for model in models:
            if model in self.holding:
                self.held.add(model)
            elif model in self.held and not self._sharded[model].holds_gradients():
                self.held.discard(model)  # otherwise the loss did not reach it

    def leaves(self, models: Sequence[nn.Module]) -> list[Tensor]:
        """Return the shards, and the gathered parameters that forwards use; see `GradientReducer.leaves`."""
        sharded = [self._sharded[model] for model in models]
        return [p for one in sharded for p in (*one.known, *one.standing_in())]

    @torch.no_grad()
    def finalize(self, models: Sequence[nn.Module], factor: Tensor | float | None) -> bool:
        """Average plain gradients over the ranks, then unscale and correct all; see `GradientReducer.finalize`."""
        for model in models:
            if model in self.held:
                raise AccumulationError(
                    f"the window closed without a backward of {class_name(model)}: its gradients so far are held "
                    "back on their ranks. Let the last micro-batch of a window run backward, or leave the step out"
                )
        sharded = [self._sharded[model] for model in models]
        parameters = [p for one in sharded for p in one.parameters.values() if p.requires_grad]
        plain = [p for one in sharded for p in one.plain.values() if p.requires_grad]
        average(plain, self._device, dtype=self._dtype)
        if factor is None and self.scaler is None:
            return False
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        if self.scaler is not None:
            return self._unscale(self.scaler, gradients, 1.0 if factor is None else factor)
        assert factor is not None
        multiply_by_device(gradients, factor)
        return False

    def _unscale(self, scaler: LossScaler, gradients: list[Tensor], factor: Tensor | float) -> bool:
        """Unscale this rank's shards, and return whether a gradient overflowed on any rank."""
        here = [gradient for gradient in gradients if gradient.device == self._device]
        found = scaler.unscale(here, factor=factor)
        offloaded = [gradient for gradient in gradients if gradient.device != self._device]
        if offloaded:
            inverse = torch.as_tensor(factor, dtype=torch.float32).cpu() / scaler.value
            found = torch.maximum(found, unscale_on_host(offloaded, inverse).to(found.device))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        overflowed = bool(found.item())
        scaler.observe(overflowed=overflowed)
        return overflowed
