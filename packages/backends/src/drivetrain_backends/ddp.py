"""Data parallel training: a replica on every rank, gradients averaged by torch's DistributedDataParallel."""

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from drivetrain_backends.accumulation import AccumulationWindow
from drivetrain_backends.batch_norm import (
    batch_norms,
    check_batch_norms,
    restore_batch_norms,
    synchronise_batch_norms,
)
from drivetrain_backends.carrier import GradientCarrier, ParameterGradients
from drivetrain_backends.compiled import uncompiled
from drivetrain_backends.errors import AccumulationError, UnreducedGradientError
from drivetrain_backends.known_parameters import KnownParameters
from drivetrain_backends.outputs import tensors_in
from drivetrain_backends.prepared import TorchPrepared
from drivetrain_backends.scheduler import Scheduler
from drivetrain_backends.settings import DDPSettings
from drivetrain_backends.stand_in import StandIn
from drivetrain_backends.torch_backend import TorchBackend, check_new
from drivetrain_precision import LossScaler, Policy
from drivetrain_state import Context

# torch 2.15 renamed the argument, and warns of the old name.
_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)

_HOOKS = MappingProxyType(
    {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "power_sgd": powerSGD_hook.powerSGD_hook,
    }
)


class Replica(StandIn, DistributedDataParallel):
    """DDP, which lets a frozen model be passed through, and tells of parameters without a gradient by their names.

    Attributes:
        holds_back: Whether the last backward that reached it left gradients that ranks have not averaged.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        # What DDP counts through, whatever is frozen later.
        self._reduced = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        self.holds_back = False
        self._known = KnownParameters(module)
        self.hand_on()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model's forward; past DDP while all of it is frozen, for DDP would wait for its gradients."""
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            return self.module(*inputs, **kwargs)
        try:
            output = super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            found = re.search(r"did not receive grad for rank \d+: ([\d ,]+)", str(error))
            if found is None:
                raise
            self._known.look()  # a layer that was exchanged gets no gradient either
            unused = ", ".join(self._reduced[int(index)] for index in re.findall(r"\d+", found[1]))
            raise UnreducedGradientError(
                f"the last backward gave no gradient to {unused}, and ranks wait for one to average: freeze what is "
                "not trained before prepare(), or say --ddp-find-unused-parameters, which finds them at every step"
            ) from error
        if torch.is_grad_enabled() and (self.holds_back or not self.require_backward_grad_sync):
            self._watch(output)
        return output

    def _watch(self, output: Any) -> None:
        """Notice when a backward reaches the model through `output`: it averages gradients, or holds them back."""
        holds_back = not self.require_backward_grad_sync  # decided at the forward, as DDP does

        def reached(_: Tensor) -> None:
            self.holds_back = holds_back

        tensors = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        for tensor in tensors:
            tensor.register_hook(reached)
        if not tensors:  # in an object of some other kind
            self.holds_back = holds_back


class ReplicatedGradients(ParameterGradients):
    """What DDP leaves in `.grad`: the mean over all ranks, once a backward has not held it back.

    Args:
        scaler: The loss scale, for fp16.

    Attributes:
        replicas: DDP's wrappers by the users' modules.
    """

    def __init__(self, scaler: LossScaler | None) -> None:
        super().__init__(scaler)
        self.replicas: dict[nn.Module, Replica] = {}

    def settle(self, models: Sequence[nn.Module], factor: Tensor | float | None) -> bool:
        """Unscale and correct in one pass; see `GradientCarrier.settle`.

        Raises:
            AccumulationError: The window closed without a backward that averages what the others held back.
        """
        for model in models:
            replica = self.replicas.get(model)
            if replica is None or not replica.holds_back:
                continue
            if any(parameter.grad is not None for parameter in model.parameters()):
                raise AccumulationError(
                    f"the window closed without a backward of {type(model).__name__}: its gradients so far are held "
                    "back on their ranks. Let the last micro-batch of a window run backward, or leave the step out"
                )
        return super().settle(models, factor)


class DDPBackend(TorchBackend):
    """Each model is replicated on every rank; a model without trainable parameters is only moved.

    Raises:
        RuntimeError: The context has no process group.
    """

    settings_section: ClassVar[str | None] = "ddp"
    settings_type: ClassVar[type[Any] | None] = DDPSettings
    needs_group: ClassVar[bool] = True

    def __init__(
        self, context: Context, policy: Policy, *, window: AccumulationWindow, settings: Any = None
    ) -> None:
        super().__init__(context, policy, window=window, settings=settings)
        self._batch_norms: dict[nn.Module, type[nn.Module]] = {}  # those that are synchronised, as they were

    def carrier(self) -> GradientCarrier:
        """What knows which gradients ranks have not averaged."""
        self._gradients = ReplicatedGradients(self.scaler)
        return self._gradients

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Scheduler]
    ) -> tuple[TorchPrepared, ...]:
        """Prepare models with their optimizers and schedulers; see `Backend.prepare`. Called on all ranks.

        Raises:
            ValueError: A model is prepared already; two share a parameter that is trained; or `sync_batch_norm` is
                on, and a layer cannot be synchronised.
        """
        check_new(models)
        _check_shared([*(p.unwrap() for p in self._prepared), *models])
        if not cast("DDPSettings", self.settings).sync_batch_norm:
            return super().prepare(models, optimizers, schedulers)
        for model in models:
            check_batch_norms(model, self.context.device)
        changed = synchronise_batch_norms(models, self.context.group)
        try:
            prepared = super().prepare(models, optimizers, schedulers)
        except BaseException:
            restore_batch_norms(changed)
            raise
        self._batch_norms |= changed
        return prepared

    def take_back(self, placed: Sequence[TorchPrepared], error: BaseException) -> None:
        """Forget the replicas too; see `TorchBackend.take_back`."""
        super().take_back(placed, error)
        for model in [prepared.unwrap() for prepared in placed]:
            self._gradients.replicas.pop(model, None)
            for parameter in model.parameters():
                self._ledger.unreduced.pop(parameter, None)

    def close(self) -> None:
        """Give every model and layer its own class back and forget them all."""
        super().close()
        self._gradients.replicas.clear()
        restore_batch_norms(self._batch_norms)
        self._batch_norms = {}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Replicate `model`: rank 0's parameters and buffers reach all ranks. Called on all ranks."""
        frozen = {
            parameter: name for name, parameter in model.named_parameters() if not parameter.requires_grad
        }
        self._ledger.unreduced |= frozen
        if not any(p.requires_grad for p in model.parameters()):
            return model
        settings = cast("DDPSettings", self.settings)
        device = self.context.device
        buffers: dict[str, Any] = {_BUFFERS: settings.broadcast_buffers}
        replica = Replica(
            model,
            device_ids=None if device.type == "cpu" else [device],
            process_group=_group(self.context),
            **buffers,
            bucket_cap_mb=settings.bucket_size_mb,
            find_unused_parameters=settings.find_unused_parameters,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            static_graph=settings.static_graph,
        )
        _register_hook(replica, settings)
        self._gradients.replicas[model] = replica
        return replica

    @contextmanager
    def join(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Let ranks run out of batches at different steps; inside, a finished rank answers the others' reductions.

        Gradients are the mean over the ranks that still have batches.

        Args:
            models: The prepared models that are trained inside.
        """
        found = (uncompiled(model) for model in models)
        replicas: list[Joinable] = [model for model in found if isinstance(model, DistributedDataParallel)]
        self._ledger.is_joined = True
        try:
            with Join(replicas, divide_by_initial_world_size=False):
                yield
        finally:
            self._ledger.is_joined = False

    def applied(self) -> Mapping[str, object]:
        """What is in force, read back from the DDP wrappers."""
        replicas = [p.model for p in self._prepared if isinstance(p.model, DistributedDataParallel)]
        found = dict(super().applied())
        for replica in replicas[:1]:
            found |= {
                "find_unused_parameters": replica.find_unused_parameters,
                "static_graph": replica.static_graph,
                "gradient_as_bucket_view": replica.gradient_as_bucket_view,
                "broadcast_buffers": getattr(replica, _BUFFERS),
                "sync_batch_norm": self._is_synchronised(),
                "bucket_size_mb": replica.bucket_bytes_cap / 2**20,
                **_applied_hook(replica),
            }
        return found

    def _is_synchronised(self) -> bool:
        """Whether that was asked for and nothing is left to do."""
        found = (module for prepared in self._prepared for _, module in batch_norms(prepared.unwrap()))
        asked = cast("DDPSettings", self.settings).sync_batch_norm
        return asked and all(isinstance(module, nn.SyncBatchNorm) for module in found)


def _check_shared(models: Sequence[nn.Module]) -> None:
    """Refuse models of which each would average the same gradient: DDP raises in backward, or adds to it twice."""
    holders: dict[Tensor, nn.Module] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            other = holders.setdefault(parameter, model)
            if parameter.requires_grad and other is not model:
                raise ValueError(
                    f"{type(other).__name__} and {type(model).__name__} share {name}, whose gradient the ddp backend "
                    "would average once for each: put both into one nn.Module whose forward gives both outputs (it "
                    "may have two optimizers), or freeze what they share"
                )


def _group(context: Context) -> ProcessGroup:
    if context.group is None:
        raise RuntimeError(
            "the ddp backend needs a process group, and this is a single process; "
            "start it with `drivetrain launch --num-processes N`, or use backend='single'"
        )
    return context.group


def _applied_hook(replica: DistributedDataParallel) -> dict[str, object]:
    """How gradients are compressed, read back from what DDP will call."""
    names = {hook: name for name, hook in _HOOKS.items()}
    found: dict[str, object] = {"communication_hook": "none"}
    for hook, state in replica._comm_hooks:  # pyright: ignore[reportPrivateUsage] DDP tells it nowhere else
        found["communication_hook"] = names.get(hook, getattr(hook, "__qualname__", "unknown"))
        if isinstance(state, powerSGD_hook.PowerSGDState):
            found["power_sgd_rank"] = state.matrix_approximation_rank
            found["power_sgd_start_step"] = state.start_powerSGD_iter
    return found


def _register_hook(replica: DistributedDataParallel, settings: DDPSettings) -> None:
    if settings.communication_hook == "none":
        return
    state: object = replica.process_group
    if settings.communication_hook == "power_sgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=replica.process_group,
            matrix_approximation_rank=settings.power_sgd_rank,
            start_powerSGD_iter=settings.power_sgd_start_step,
        )
    replica.register_comm_hook(state, _HOOKS[settings.communication_hook])
