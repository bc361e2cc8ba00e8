"""Sharded gradients: FSDP averages them; this module unscales, corrects and measures them."""

from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from drivetrain_backends.errors import AccumulationError
from drivetrain_backends.fsdp import compat
from drivetrain_backends.fsdp.guards.misuse import check_unconverted
from drivetrain_backends.fsdp.models.sharded_model import ShardedModel
from drivetrain_backends.fsdp.sharded_run import ShardedRun
from drivetrain_backends.gradients.averaging import average
from drivetrain_backends.gradients.multi_tensor import multiply_by_device, norms, unscale_on_host
from drivetrain_backends.gradients.reducer import ONCE, BackwardOptions, ParameterGradients
from drivetrain_backends.modules.wrap_policy import class_name
from drivetrain_backends.state_dict.dtensor import local
from drivetrain_precision import LossScaler


class ShardedGradients(ParameterGradients):
    """The gradients that FSDP leaves in `.grad`: shards of the mean over ranks; full ones for plain parameters."""

    not_joined = (
        "sharded ranks wait for each other in every forward, so none may run out early; prepare the loader, whose "
        "tails keep ranks in step, or use backend='ddp'"
    )
    not_split = (
        "FSDP reduces gradients at the end of whole backwards; say 1f1b, interleaved_1f1b, looped_bfs or gpipe, or "
        "use backend='ddp'"
    )

    def __init__(self, scaler: LossScaler | None, run: ShardedRun) -> None:
        super().__init__(scaler)
        self._device = run.context.device
        self._context = run.context
        self._run, self._models = run, run.models
        # Blocks that have not run their first forward; weak, because a program may drop a model that never ran.
        self._without_dtypes: WeakSet[FSDPModule] = WeakSet()
        self._dtype = run.policy.dtypes.reduce
        self._holding: set[nn.Module] = set()  # the models whose backwards are not reduced at present
        # The models whose last backward was not reduced: their gradients are full, and not in `.grad`.
        self._held: set[nn.Module] = set()
        self._alone: set[nn.Module] = set()  # the models whose replicas step apart

    def watch(self, model: ShardedModel) -> None:
        """Set the gradient dtypes of blocks that are frozen at their first forward, and trained later.

        FSDP of torch 2.9 reads the dtypes from the trainable parameters at the first forward. If all are frozen then,
        as in a GAN's discriminator, FSDP later gives fp32 parameters half-precision gradients, which torch refuses.
        Drop this once the oldest supported torch finds the dtypes by itself, as 2.15 does.
        """
        self._without_dtypes.update(
            block
            for block in model.blocks
            if any(map(compat.needs_gradient_dtypes, compat.parameter_groups(block)))
        )

    def backward(self, loss: Tensor, models: Sequence[nn.Module], *, options: BackwardOptions = ONCE) -> None:
        """Run torch's backward; see `GradientReducer.backward`."""
        if options.said:
            raise AccumulationError(
                f"backward({options.said}): FSDP frees the gathered parameters behind one backward, and "
                "reduces the gradients of all; add the losses of one forward up and call backward(loss) once"
            )
        for model in models:
            if self._models[model].sharded.in_backward():
                raise AccumulationError(
                    f"an earlier backward of {class_name(model)} ended in an error half way, and FSDP waits for "
                    "its end: gradients would never be reduced again. Go on from a checkpoint, with a model that is "
                    "built and prepared anew"
                )
        self._without_dtypes -= {
            block
            for block in self._without_dtypes
            if all(map(compat.give_gradient_dtypes, compat.parameter_groups(block)))
        }
        with self._run.direct():
            for one in self._models.values():
                one.hooks.carry()
            try:
                super().backward(loss, models, options=options)
            except RuntimeError as error:
                check_unconverted((one.sharded for one in self._models.values()), error)
                raise
        for model in models:
            if model in self._holding:
                self._held.add(model)
            elif model in self._held and not self._models[model].sharded.holds_gradients():
                self._held.discard(model)  # otherwise the loss did not reach it

    @contextmanager
    def local(self, model: nn.Module) -> Generator[None]:
        """Keep full gradients on their ranks in the block; see `GradientReducer.local`."""
        if model in self._holding:  # the block around this one ends it
            yield
            return
        root = self._models[model].sharded.blocks[-1]
        root.set_requires_gradient_sync(False)
        self._holding.add(model)
        try:
            yield
        finally:
            self._holding.discard(model)
            root.set_requires_gradient_sync(True)

    @contextmanager
    def alone(self, model: nn.Module) -> Generator[None]:
        """Step each replica on its own gradients in the block; see `SupportsLocalSteps`."""
        groups = [
            group for block in self._models[model].sharded.blocks for group in compat.parameter_groups(block)
        ]
        if any(compat.replica_ranks(group) != self._context.ranks("data").ranks for group in groups):
            raise RuntimeError(
                f"{class_name(model)}: its replicas are not those of the run's mesh; say parallel.data, their "
                "number, and parallel.shard, or fsdp.shard_size where context alone divides one; leave "
                "parallel.expert out"
            )
        with ExitStack() as stack:
            for group in groups:
                stack.enter_context(compat.reduced_in_replica(group))
            self._alone.add(model)
            stack.callback(self._alone.discard, model)
            yield

    def steps_together(self, model: nn.Module) -> bool:
        """Return True, because every rank holds a part of the model."""
        del model
        return True

    def cleared(self, models: Sequence[nn.Module]) -> None:
        """Drop the full gradients that unreduced backwards of a closed window left."""
        for model in self._held.intersection(models) if self._held else ():
            self._held.discard(model)
            self._models[model].sharded.drop_held()

    def close(self) -> None:
        """Forget the gradients that are held back."""
        self._held.clear()

    def leaves(self, models: Sequence[nn.Module]) -> list[Tensor]:
        """Return the shards, and the gathered parameters that forwards use; see `GradientReducer.leaves`."""
        sharded = [self._models[model].sharded for model in models]
        return [p for one in sharded for p in (*one.known, *one.standing_in())]

    @torch.no_grad()
    def finalize(self, models: Sequence[nn.Module], factor: Tensor | float | None) -> bool:
        """Average plain gradients over the ranks, then unscale and correct all; see `GradientReducer.finalize`."""
        for model in models:
            if model in self._held:
                raise AccumulationError(
                    f"the window closed without a backward of {class_name(model)}: its gradients so far are held "
                    "back on their ranks. Let the last micro-batch of a window run backward, or leave the step out"
                )
        sharded = [self._models[model].sharded for model in models]
        parameters = [p for one in sharded for p in one.parameters.values() if p.requires_grad]
        for model, one in zip(models, sharded, strict=True):
            ranks = self._context.ranks("fsdp" if model in self._alone else "counts")
            if plain := [p for p in one.plain.values() if p.requires_grad]:
                average(plain, self._device, group=ranks.process_group, dtype=self._dtype)
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


@torch.no_grad()  # with grad mode on, taking the local shard would be an autograd operation
def global_norm(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm of all gradients as one vector, of shape (). Called on all ranks.

    Gradients may be sharded over several meshes: each set of process groups needs one all-reduce. A `norm_type` of
    infinity gives the largest element.
    """
    alike: defaultdict[Any, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        division = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        alike[division].append(gradient)
    groups: defaultdict[tuple[ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for divided in alike.values():
        groups[_holders(divided[0])] += [local(gradient) for gradient in divided]
    is_max = norm_type == torch.inf
    parts: list[Tensor] = []
    for holders, tensors in groups.items():
        part = _combine(tensors, norm_type, device)
        for group in holders:
            dist.all_reduce(part, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
        parts.append(part)
    if not parts:
        return torch.zeros((), device=device)
    stacked = torch.stack(parts)
    return stacked.max() if is_max else stacked.sum() ** (1 / norm_type)


def _combine(tensors: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the largest element of some tensors, or the sum of their elements to the power `norm_type`; shape ()."""
    filled = [tensor for tensor in tensors if tensor.numel()]  # an empty shard has no largest element
    dtype = max((t.dtype for t in tensors), key=lambda dtype: dtype.itemsize)
    dtype = torch.float32 if dtype.itemsize < 4 else dtype
    if not filled:
        return torch.zeros((), device=device, dtype=dtype)
    by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for found in norms(filled, norm_type):
        by_device[found.device].append(found.to(dtype))
    # One copy for all that are offloaded: the host waits for each.
    stacked = torch.cat([torch.stack(found).to(device) for found in by_device.values()])
    return stacked.max() if norm_type == torch.inf else (stacked**norm_type).sum()


def _holders(gradient: Tensor) -> tuple[ProcessGroup, ...]:
    """Return the process groups over which a gradient is sharded; none for a full gradient."""
    if not isinstance(gradient, DTensor):
        return ()
    return tuple(
        gradient.device_mesh.get_group(axis)
        for axis, placement in enumerate(gradient.placements)
        if not placement.is_replicate()  # torch's strided shards are no `Shard`
    )
