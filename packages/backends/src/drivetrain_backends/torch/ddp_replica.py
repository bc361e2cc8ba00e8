"""A model replicated by DistributedDataParallel, with the state of its reducer and the hooks that send a bucket."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from drivetrain_backends.errors import ReplacedParameterError, UnreducedGradientError
from drivetrain_backends.gradients.snapshot import GradientVersions, versions_of
from drivetrain_backends.modules.module_proxy import ModuleProxy
from drivetrain_backends.modules.parameter_guard import STEPS_A_LOOK, KnownParameters
from drivetrain_backends.settings import DDPSettings
from drivetrain_backends.torch import compat
from drivetrain_precision import DtypePolicy, PrecisionError

_NOT_AVERAGED = "and DDP averages the gradients of what it was prepared with"
_HOOKS: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "power_sgd": powerSGD_hook.powerSGD_hook,
    }
)
_COMPRESSED = MappingProxyType({"fp16": torch.float16, "bf16": torch.bfloat16})


class Replica(ModuleProxy, DistributedDataParallel):
    """A DDP wrapper that accepts a model frozen later, and names the parameters that got no gradient.

    After each forward of the wrapper, DDP's reducer averages the first backward that reaches all parameters. The
    gradients of other backwards stay local.
    """

    def __init__(self, module: nn.Module, *, at_close: bool = False, **options: Any) -> None:
        super().__init__(module, **options)
        # The parameters that DDP counts, whatever is frozen later.
        self._reduced = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._reduced_parameters = tuple(self._reduced.values())
        self.at_close = at_close  # whether gradients are averaged when their window closes
        self.is_armed = False  # whether the reducer waits for a backward
        self.is_unreduced = False  # whether there may be gradients that are not averaged over ranks
        self.is_alone = False  # whether this rank steps on gradients of its own
        self.is_held = False  # whether the code runs inside `no_sync`
        # The record of the parameters that the model was replicated with.
        self.known = KnownParameters(module)
        self._attached = compat.accumulators(self._reduced_parameters)
        self._num_backwards = 0
        if at_close:
            compat.disable_reducer(self)
        self.forward_attributes()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model's forward; bypass DDP for a frozen model, whose gradients DDP would await in vain."""
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            return self.module(*inputs, **kwargs)
        try:
            output = super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            if (named := self._explain(error)) is not None:
                raise named from error
            if not compat.in_functional_transform():
                raise
            # The gradients of a transform of torch.func are returned, and never in `.grad`.
            return self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            if self.at_close:  # DDP syncs buffers after a forward that reduces; this one counts as such
                compat.sync_buffers_next(self, not self.is_held)
            elif compat.reduces(self):
                self.is_armed = True
        return output

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Keep gradients local in the block; see DDP."""
        was_held, self.is_held = self.is_held, True
        try:
            with super().no_sync():
                yield
        finally:
            self.is_held = was_held

    def left_out(self) -> dict[Tensor, str]:
        """Return the parameters that the reducer does not average, because they were frozen, with their names."""
        named = self.module.named_parameters()
        return {parameter: name for name, parameter in named if name not in self._reduced}

    def gradient_versions(self) -> GradientVersions:
        """Return the versions of the gradients, which change when a backward reaches the model.

        A reducer that waits requires a gradient for every parameter. One parameter is then enough, unless DDP itself
        finds unused parameters.
        """
        if self.is_armed and not (self.find_unused_parameters or self.static_graph):
            sample = next((p for p in self._reduced_parameters if p.requires_grad), None)
            return versions_of([] if sample is None else [sample])
        return versions_of(self._reduced_parameters)

    def record_backward(self, before: GradientVersions) -> None:
        """Record a backward that has run."""
        if before.are(self.gradient_versions()):
            return
        if self.is_armed and self.static_graph and not compat.has_learnt_static_graph(self):
            raise UnreducedGradientError(
                f"the first backward of {type(self.module).__name__} did not come from its call, model(batch), from "
                "which DDP learns a static graph: it would never average these gradients. Call the model, or leave "
                "--ddp-static-graph out"
            )
        self.is_unreduced = not self.is_armed
        if self.is_armed:
            self.is_armed = False
            self._check_attached()

    def _check_attached(self) -> None:
        """Refuse a backward that the reducer did not see, because parameters were converted or moved.

        Torch then delivers a parameter's gradient past the reducer, even after the parameter is converted back. The
        reducer itself refuses a backward with only some of the parameters, unless its settings allow that.
        """
        self._num_backwards += 1
        may_be_partial = self.find_unused_parameters or self.static_graph
        all_now = may_be_partial and self._num_backwards % STEPS_A_LOOK in (1, 2)
        sample = next((i for i, p in enumerate(self._reduced_parameters) if p.requires_grad), None)
        if sample is not None and (
            not compat.are_attached(
                self._reduced_parameters[sample:][: None if all_now else 1], self._attached[sample:]
            )
        ):
            self.refuse_converted()
        if may_be_partial:
            self.known.look_at_forms(_NOT_AVERAGED)

    def refuse_converted(self, error: BaseException | None = None) -> None:
        """Refuse parameters that the reducer no longer watches; see `_check_attached`."""
        self.known.look_at_forms(_NOT_AVERAGED, error=error)
        if not compat.are_attached(self._reduced_parameters, self._attached):
            raise ReplacedParameterError(
                f"the parameters of {type(self.module).__name__} were converted or moved after prepare(), and back, "
                f"{_NOT_AVERAGED}. Convert and move a copy of the model, or free_memory() and prepare() again"
            ) from error

    def check_reduced(self) -> None:
        """Refuse the gradients if the last backward reached only some parameters: DDP waits for the others."""
        try:
            compat.check_reduced(self)
        except RuntimeError as error:
            if (named := self._explain(error)) is None:
                raise
            raise named from error

    def _explain(self, error: RuntimeError) -> UnreducedGradientError | None:
        if (unreduced := compat.unreduced_parameters(error)) is None:
            return None
        self.refuse_converted(error)
        self.known.look()  # a replaced layer gets no gradient either, and this error is clearer
        names = list(self._reduced)
        unused = ", ".join(names[index] for index in unreduced)
        return UnreducedGradientError(
            f"the last backward gave no gradient to {unused}, and ranks wait for one to average: freeze what is not "
            "trained before prepare(), or say --ddp-find-unused-parameters, which finds them at every step; "
            "--ddp-reduce at_close averages what there is when the window closes"
        )


@dataclass(frozen=True, slots=True)
class ReduceIn:
    """The state of `reduce_in_dtype`: the dtype of the sums, and the ranks."""

    dtype: torch.dtype
    group: ProcessGroup | None


def reduce_in_dtype(state: ReduceIn, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket's gradients over ranks in the dtype of `state`; a communication hook of DDP.

    torch's own hooks compress to a half precision; this one also sums half-precision gradients in fp32.
    """
    gradients = bucket.buffer()
    sums = gradients.to(state.dtype).div_(dist.get_world_size(state.group))
    work = dist.all_reduce(sums, group=state.group, async_op=True)
    assert work is not None  # only ranks outside the group get None

    def write_back(sent: Future[Any]) -> Tensor:
        value = sent.value()
        return gradients if value[0] is gradients else gradients.copy_(value[0])

    return work.get_future().then(write_back)


def check_hook(settings: DDPSettings, dtypes: DtypePolicy) -> None:
    """Refuse a communication hook that contradicts the dtype of the run's reduction."""
    hook = settings.communication_hook
    if dtypes.reduce is not None and hook != "none" and _COMPRESSED.get(hook) is not dtypes.reduce:
        raise PrecisionError(
            f"precision.reduce_dtype={dtypes.said()['reduce_dtype']!r} with ddp.communication_hook={hook!r}: both "
            "say in what ranks add up gradients, and they differ; leave one of the two out"
        )


def register_hook(replica: DistributedDataParallel, settings: DDPSettings, dtype: torch.dtype | None) -> None:
    """Register a replica's communication hook: the hook of the settings, or a hook that sums in `dtype`."""
    hook = settings.communication_hook
    if hook == "none":
        reduced = {p.dtype for p in replica.module.parameters() if p.requires_grad}
        if dtype is not None and reduced != {dtype}:
            replica.register_comm_hook(ReduceIn(dtype, replica.process_group), reduce_in_dtype)
        return
    state: object = replica.process_group
    if hook == "power_sgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=replica.process_group,
            matrix_approximation_rank=settings.power_sgd_rank,
            start_powerSGD_iter=settings.power_sgd_start_step,
        )
    replica.register_comm_hook(state, _HOOKS[hook])


def applied_hook(replica: DistributedDataParallel) -> dict[str, object]:
    """Return the settings of gradient compression, read back from DDP's hooks."""
    names = {hook: name for name, hook in _HOOKS.items()} | {reduce_in_dtype: "none"}
    found: dict[str, object] = {"communication_hook": "none"}
    for hook, state in compat.communication_hooks(replica):
        found["communication_hook"] = names.get(hook, getattr(hook, "__qualname__", "unknown"))
        if isinstance(state, powerSGD_hook.PowerSGDState):
            found["power_sgd_rank"] = state.matrix_approximation_rank
            found["power_sgd_start_step"] = state.start_powerSGD_iter
    return found


def hook_dtype(replica: DistributedDataParallel) -> torch.dtype | None:
    """Return the dtype in which the reducer sums gradients, read back; None for several dtypes or PowerSGD."""
    for hook, state in compat.communication_hooks(replica):
        if isinstance(state, ReduceIn):
            return state.dtype
        name = next((name for name, known in _HOOKS.items() if known is hook), "")
        return _COMPRESSED.get(name)
    own = {p.dtype for p in replica.module.parameters() if p.requires_grad}
    return next(iter(own)) if len(own) == 1 else None
