"""A sharded model with its training methods."""

import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain_backends.errors import UnreducedGradientError, UnshardedParameterError
from drivetrain_backends.fsdp.block_order import CollectiveOrder
from drivetrain_backends.fsdp.buffers import SharedBuffers
from drivetrain_backends.fsdp.gradients import ShardedGradients, global_norm, scale_to_norm
from drivetrain_backends.fsdp.guards import AssignmentGuard, check_unconverted
from drivetrain_backends.fsdp.retained_models import RetainedModel
from drivetrain_backends.fsdp.sharded_model import ShardedModel
from drivetrain_backends.fsdp.state import divided_like, load_model, unify_forms
from drivetrain_backends.gradients.tracker import GradientTracker
from drivetrain_backends.modules.autocast_forward import restore_forward
from drivetrain_backends.optim.optimizer import StepResult
from drivetrain_backends.state_dict.dtensor import (
    broadcast_from_first,
    local,
    own_part,
    plain_dtensor,
    whole_of,
)
from drivetrain_backends.state_dict.optimizer_state import check_divisible
from drivetrain_backends.torch.prepared import TorchPrepared
from drivetrain_state import Context

logger = logging.getLogger(__name__)


class FSDPPrepared(TorchPrepared):
    """A sharded model with its optimizers."""

    steps_together = True

    def __init__(
        self,
        model: nn.Module,
        retained: RetainedModel,
        *,
        context: Context,
        tracker: GradientTracker,
        all_sharded: Mapping[nn.Module, ShardedModel],
        successors: Mapping[Tensor, nn.Parameter],
        guard: AssignmentGuard,
        gradients: ShardedGradients,
        order: CollectiveOrder,
        buffers: SharedBuffers,
    ) -> None:
        super().__init__(model, context=context, tracker=tracker)
        self.sharded = retained.sharded  # the sharded model with its blocks and parameters
        self._all_sharded = all_sharded
        self._successors = successors
        self._guard = guard
        self._gradients = gradients
        self._order = order
        self._buffers = buffers
        self._fp8_gather = retained.fp8_gather
        self._use = retained.use
        self._writes = retained.writes
        self._num_checked: dict[Optimizer, int] = {}
        self._told_mixed = set[Optimizer]()

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Keep full gradients local in the block; see `Prepared.no_sync`."""
        root = self.sharded.blocks[-1]
        root.set_requires_gradient_sync(False)
        self._gradients.holding.add(self.model)
        try:
            yield
        finally:
            self._gradients.holding.discard(self.model)
            root.set_requires_gradient_sync(True)

    def zero_grad(self, optimizer: Optimizer, *, set_to_none: bool = True) -> None:
        """Clear one optimizer's gradients, and the unreduced gradients of a closed window."""
        with self._use.paused():
            super().zero_grad(optimizer, set_to_none=set_to_none)
        for model in self.group.models if self._gradients.held and self.group.stage == "empty" else ():
            if model in self._gradients.held:
                self._gradients.held.discard(model)
                self._all_sharded[model].drop_held()

    def step(self, optimizer: Optimizer) -> StepResult:
        """Step one optimizer if the window is closed, after the checks of all guards. Called on all ranks."""
        if self._window.closing:
            self.group.check_ended()
            if self.group.stage != "final":  # otherwise clip() has compared
                self._compare()
            for sharded in self._group_sharded():
                # Parameters that a forward without backward left gathered would be stale after the step.
                sharded.reshard()
                sharded.check()
            self._check_known(optimizer)
            self._check_averaged()
            if not self._use.are_kept:
                check_unconverted(self._group_sharded())
                self._use.adopt()  # converted, and back
            self._writes.check()
        with self._use.paused():
            result = super().step(optimizer)
        for model in self.group.models if result.stepped else ():
            self._gradients.retained[model].writes.num_steps += 1
        return result

    def clip(
        self,
        parameters: Iterable[Tensor] | None = None,
        *,
        norm: float | None = None,
        norm_type: float = 2.0,
        value: float | None = None,
    ) -> Tensor | None:
        """Clip over all ranks' shards, after comparing collectives; see `TorchPrepared.clip`. Called on all ranks."""
        if self._window.closing:
            self.group.check_ended()
            self._compare()
        with self._use.paused():
            return super().clip(parameters, norm=norm, norm_type=norm_type, value=value)

    def _compare(self) -> None:
        """Compare the order of blocks with the other ranks, and broadcast changed buffers."""
        self._buffers.share(self._order.compare(self._buffers.news()))

    @contextmanager
    def gathered(self, *, write: bool = False) -> Generator[None]:
        """Gather full parameters into the modules in the block, in the dtype of the shards; see `Prepared.gathered`.

        The full parameters replace the shards, so no forward may run in the block.
        """
        self.sharded.reshard()
        self.sharded.check()
        device = self._context.device
        whole: dict[nn.Parameter, nn.Parameter] = {
            p: nn.Parameter(whole_of(p, device), requires_grad=p.requires_grad)
            if isinstance(p, DTensor)
            else p
            for p in self.sharded.parameters.values()
        }
        self._assign(whole)
        try:
            yield
            with torch.no_grad():
                for parameter, values in whole.items() if write else ():
                    broadcast_from_first(values.detach(), self._context)
                    if values is not parameter:
                        local(parameter).copy_(own_part(values, parameter))
        finally:
            self._assign({parameter: parameter for parameter in whole})

    def _chosen(self, parameters: Iterable[Tensor] | None) -> list[Tensor]:
        """Return the shards of `parameters`, even if these were listed before `prepare` or while gathered."""
        models = self._all_sharded.values()
        known = frozenset[Tensor]().union(*(sharded.known for sharded in models))
        given = self.sharded.parameters.values() if parameters is None else list(parameters)
        gathered: dict[Tensor, nn.Parameter] = {}
        if not known.issuperset(given):
            gathered = {p: shard for sharded in models for p, shard in sharded.standing_in().items()}
        for sharded in models:
            sharded.reshard()
        found: list[Tensor] = []
        for parameter in given:
            shard = (
                parameter if parameter in known else gathered.get(parameter, self._successors.get(parameter))
            )
            if shard is None:
                raise UnshardedParameterError(
                    f"clip: a parameter of shape {tuple(parameter.shape)} is none of those that prepare() sharded; "
                    "pass the parameters of prepared models"
                )
            found.append(shard)
        return found

    def _norm_of(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        return global_norm(_gradients(parameters), float(norm_type), self._context.device)

    def _scale(self, parameters: Sequence[Tensor], total: Tensor, max_norm: float) -> None:
        scale_to_norm(_gradients(parameters), total, max_norm)

    @torch.no_grad()
    def _clamp(self, parameters: Sequence[Tensor], value: float) -> None:
        for gradient in _gradients(parameters):
            local(gradient).clamp_(-value, value)

    def _assign(self, values: Mapping[nn.Parameter, nn.Parameter]) -> None:
        with self._guard.paused():
            for place in self.sharded.places:
                setattr(place.module, place.attribute, values[place.parameter])

    def release(self) -> nn.Module:
        """End the training. Parameters stay sharded and blocks wrapped, because torch cannot undo the sharding."""
        self.sharded.reshard()
        self._fp8_gather.close()
        return restore_forward(self.unwrap())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of model, optimizers and schedulers, with shards as DTensors; see `Prepared`."""
        for sharded in self._group_sharded():
            sharded.reshard()
            sharded.check(thoroughly=True)
        for model in self.group.models:
            self._gradients.retained[model].writes.check()
        for optimizer in self.optimizers:
            check_divisible(optimizer.optimizer, where="FSDP", scalars=True)
        state = super().state_dict()
        model = {
            name: plain_dtensor(value) if isinstance(value, DTensor) else value
            for name, value in state["model"].items()
        }
        return {**state, "model": model}

    def _read_state(self) -> dict[str, Any]:
        """Return the state of the model and its optimizers, in the same form on all ranks."""
        state = super()._read_state()
        names = self._names()
        for optimizer, named in zip(self.optimizers, state["optimizers"], strict=True):
            num_mixed = unify_forms(optimizer.optimizer, names, named, self._context)
            if num_mixed and self._context.topology.is_main and optimizer.optimizer not in self._told_mixed:
                self._told_mixed.add(optimizer.optimizer)
                logger.warning(
                    "%s: %d states are in few bits on some ranks and in floating point on others, by the sizes of "
                    "their shards; checkpoints hold their values in floating point",
                    type(optimizer.optimizer).__name__,
                    num_mixed,
                )
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state whose tensors are full or sharded in any way; see `Prepared.load_state_dict`."""
        for sharded in self._group_sharded():
            sharded.reshard()
        own = {name: parameter for parameter, name in self._names().items()}
        optimizers = [
            {**saved, "state": divided_like(saved["state"], own, self._context.device)}
            for saved in state["optimizers"]
        ]
        super().load_state_dict({**state, "optimizers": optimizers})

    def _load_model(self, state: Mapping[str, Any]) -> None:
        load_model(self.sharded.module, state, self._context.device)

    def _group_sharded(self) -> list[ShardedModel]:
        return [self._all_sharded[model] for model in self.group.models]

    def _check_known(self, optimizer: Optimizer) -> None:
        """Check an optimizer's parameters, at its first step and whenever their number has changed."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._num_checked.get(optimizer) == count:
            return
        known = {p for sharded in self._group_sharded() for p in sharded.known}
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                if parameter not in known:
                    raise UnshardedParameterError(
                        f"{type(optimizer).__name__}: parameter {i} of group {g}, of shape {tuple(parameter.shape)}, "
                        "is none of those that prepare() sharded; build the whole model before prepare(), and the "
                        "optimizer over its parameters()"
                    )
        self._num_checked[optimizer] = count

    def _check_averaged(self) -> None:
        if self.group.stage != "empty":
            return
        for model in self.group.models:
            self._gradients.retained[model].hooks.check_carried()
            for name, parameter in self._all_sharded[model].plain.items():
                if parameter.grad is not None:
                    raise UnreducedGradientError(
                        f"{name} is no tensor that FSDP divides, and has a gradient of loss.backward(), which ranks "
                        "have not averaged: call accelerator.backward(loss) in its place"
                    )


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
