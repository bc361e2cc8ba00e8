"""A model replicated by DistributedDataParallel, and the gradients that its reducer averages during backward.

Three values of a replica say what becomes of its gradients: `is_armed`, whether DDP's reducer waits for a backward;
`is_local`, whether `.grad` may hold what ranks have not averaged; and `syncs`, by the block that the code runs in.

| armed | local | since | the next backward | the next step or clip |
|---|---|---|---|---|
| no | no | `prepare`, or an average | stays local: then only local | takes `.grad` as it is |
| yes | no | a forward | is averaged: then neither | takes `.grad` as it is |
| no | yes | a backward that stayed local, or an edit | stays local | averages all of `.grad`: then not local |
| yes | yes | a forward, with local gradients | averages all of `.grad`: then neither (an edit may stay) | the same |
| never | either | `prepare` with `reduce="at_close"` | stays local | averages all of `.grad` |

To clear gradients changes none of them: a rank that clears alone takes part in the average of the others. Inside
`join_uneven_inputs`, local gradients at a step or clip are an error, and `at_close` is refused. Until DDP has learnt
a static graph, `no_sync` holds nothing, and `trained_alone` is refused.

| syncs | in | a forward | a step or clip |
|---|---|---|---|
| on | other code | arms the reducer; with `at_close`, has the next forward share buffers | as above |
| held | `no_sync` | does neither | as above, but a program that steps itself finds local gradients |
| alone | `trained_alone` | does neither | takes `.grad` as it is, which is then not local after the block |
"""

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from drivetrain_backends.compat import call_after_backward
from drivetrain_backends.ddp import compat
from drivetrain_backends.errors import AccumulationError, ReplacedParameterError, UnreducedGradientError
from drivetrain_backends.gradients.averaging import average
from drivetrain_backends.gradients.reducer import (
    ONCE,
    BackwardOptions,
    ParameterGradients,
    trainable_parameters,
)
from drivetrain_backends.gradients.snapshot import GradientVersions, versions_of
from drivetrain_backends.modules.compile import unwrap_compiled
from drivetrain_backends.modules.module_proxy import ModuleProxy
from drivetrain_backends.modules.parameter_guard import STEPS_A_LOOK, KnownParameters
from drivetrain_backends.settings import DDPSettings
from drivetrain_precision import LossScaler
from drivetrain_state import Context, ProgressMark

logger = logging.getLogger(__name__)

_NOT_AVERAGED = "and DDP averages the gradients of what it was prepared with"


class Replica(ModuleProxy, DistributedDataParallel):
    """A DDP wrapper that accepts a model frozen later, and names the parameters that got no gradient.

    After each forward of the wrapper, DDP's reducer averages the first backward that reaches all parameters. The
    gradients of other backwards stay local; see the tables of this module.
    """

    def __init__(self, module: nn.Module, *, at_close: bool = False, **options: Any) -> None:
        super().__init__(module, **options)
        # The parameters that DDP counts, whatever is frozen later.
        self.reduced_parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.at_close = at_close  # whether gradients are averaged when their window closes
        self.is_armed = self.is_local = self.is_edited = False
        self.syncs: Literal["on", "held", "alone"] = "on"
        self._known = KnownParameters(module)  # those that the model was replicated with
        self._attached = compat.accumulators(self.reduced_parameters.values())
        self._num_backwards = 0
        self.require_backward_grad_sync = not at_close
        self.forward_attributes()

    @property
    def awaits_average(self) -> bool:
        """True if the next step first averages all gradients."""
        return (self.at_close or self.is_local) and self.syncs != "alone"

    @property
    def _may_be_partial(self) -> bool:
        return self.find_unused_parameters or self.static_graph

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model's forward; bypass DDP for a frozen model, whose gradients DDP would await in vain."""
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            return self.module(*inputs, **kwargs)
        try:
            output = super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            self._refuse_unreduced(error)
            if not compat.in_functional_transform():
                raise
            # The gradients of a transform of torch.func are returned, and never in `.grad`.
            return self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            if self.at_close:  # DDP syncs buffers after a forward that reduces; this one counts as such
                self.require_forward_param_sync = self.syncs == "on"
            elif self.require_backward_grad_sync:
                self.is_armed = True
        return output

    @contextmanager
    def no_sync(self, *, is_alone: bool = False) -> Generator[None]:
        """Keep gradients local in the block, and, if `is_alone`, have steps take them so; see DDP."""
        before = self.syncs
        self.syncs = "alone" if is_alone or before == "alone" else "held"
        try:
            with super().no_sync():
                yield
        finally:
            self.syncs = before

    def renew(self) -> None:
        """Begin as after `prepare`; what earlier backwards left is not used."""
        self._known.look()
        self.is_armed = self.is_local = self.is_edited = False

    def gradient_versions(self) -> GradientVersions:
        """Return the versions of all gradients, or of one, if the reducer awaits a gradient of every parameter."""
        return versions_of(self._sample(is_whole=not self.is_armed or self._may_be_partial))

    def record_backward(self, before: GradientVersions) -> None:
        """Record a backward that has run."""
        if before.are(self.gradient_versions()):
            return
        if self.is_armed and compat.awaits_static_graph(self):
            raise UnreducedGradientError(
                f"the first backward of {type(self.module).__name__} did not come from its call, model(batch), from "
                "which DDP learns a static graph: it would never average these gradients. Call the model, or leave "
                "--ddp-static-graph out"
            )
        is_averaged = self.is_armed
        # DDP leaves a gradient as it is that no rank's backward reaches, whatever other code has added to it.
        stays = self.is_edited and self._may_be_partial
        self.is_armed, self.is_local = False, not is_averaged or stays
        if is_averaged:
            self._check_attached()

    def _check_attached(self) -> None:
        """Refuse a backward that the reducer did not see, because parameters were converted or moved.

        Torch then delivers a parameter's gradient past the reducer, even after the parameter is converted back. The
        reducer itself refuses a backward with only some of the parameters, unless its settings allow that.
        """
        self._num_backwards += 1
        is_whole = self._may_be_partial and self._num_backwards % STEPS_A_LOOK in (1, 2)
        if not compat.are_attached(self._sample(is_whole=is_whole), self._attached):
            self.refuse_converted()
        if self._may_be_partial:
            self._known.look_at_forms(_NOT_AVERAGED)

    def _sample(self, *, is_whole: bool) -> list[nn.Parameter]:
        """Return all parameters that DDP counts, or the first that is trained now."""
        if is_whole:
            return list(self.reduced_parameters.values())
        return list(islice((p for p in self.reduced_parameters.values() if p.requires_grad), 1))

    def refuse_converted(self, error: BaseException | None = None) -> None:
        """Refuse parameters that the reducer no longer watches; see `_check_attached`."""
        self._known.look_at_forms(_NOT_AVERAGED, error=error)
        if not compat.are_attached(self.reduced_parameters.values(), self._attached):
            raise ReplacedParameterError(
                f"the parameters of {type(self.module).__name__} were converted or moved after prepare(), and back, "
                f"{_NOT_AVERAGED}. Convert and move a copy of the model, or free_memory() and prepare() again"
            ) from error

    def check_reduced(self) -> None:
        """Refuse the gradients if the last backward reached only some parameters: DDP waits for the others."""
        try:
            compat.check_reduced(self)
        except RuntimeError as error:
            self._refuse_unreduced(error)
            raise

    def _refuse_unreduced(self, error: RuntimeError) -> None:
        """Refuse the parameters that got no gradient, by their names, if DDP's error is about them."""
        if (unreduced := compat.unreduced_parameters(error)) is None:
            return
        self.refuse_converted(error)
        self._known.look()  # a replaced layer gets no gradient either, and this error is clearer
        names = list(self.reduced_parameters)
        unused = ", ".join(names[index] for index in unreduced)
        raise UnreducedGradientError(
            f"the last backward gave no gradient to {unused}, and ranks wait for one to average: freeze what is not "
            "trained before prepare(), or say --ddp-find-unused-parameters, which finds them at every step; "
            "--ddp-reduce at_close averages what there is when the window closes"
        ) from error


class ReplicatedGradients(ParameterGradients):
    """The gradients that DDP leaves in `.grad`: averaged over all ranks as far as its reducer has seen them.

    A loss from another method of the model, or the second of two backwards, bypasses the reducer. The mean over ranks
    of `mean(a) + b` is `mean(a) + mean(b)`; all gradients of a replica are therefore averaged once more when its
    window closes, if one of its backwards bypassed the reducer.
    """

    def __init__(
        self, context: Context, scaler: LossScaler | None, settings: DDPSettings, dtype: torch.dtype | None
    ) -> None:
        super().__init__(scaler)
        self.replicas: dict[nn.Module, Replica] = {}  # the DDP wrappers by user module
        # By model: the parameters that were frozen when it was replicated, which no rank averages, with their names.
        self.frozen: dict[nn.Module, dict[Tensor, str]] = {}
        self.averages = context.ranks("counts").size > 1
        # A function called in each backward that ranks wait for, before this rank waits; None for none.
        self.on_computed: Callable[[], None] | None = None
        self._context, self._settings = context, settings
        # The dtype in which gradients that bypassed the reducer are summed; None for fp32 or wider.
        self.dtype = dtype
        self._group: dist.ProcessGroup | None = None
        self._rebuilt: set[Replica] = set()
        self._has_told = False

    def backward(self, loss: Tensor, models: Sequence[nn.Module], *, options: BackwardOptions = ONCE) -> None:
        """Run torch's backward, and record which replicas it reached; see `GradientReducer.backward`."""
        if options.create_graph and self.replicas:
            raise AccumulationError(
                f"backward({options.said}): DDP averages gradients in place, which a graph of their own forbids; "
                "take them by torch.autograd.grad(loss, tensors, create_graph=True), add what follows from them to "
                "the loss, and call backward(loss) once"
            )
        before = [(replica, replica.gradient_versions()) for replica in self.replicas.values()]
        on_computed, handle = self.on_computed, None
        if on_computed is not None and any(replica.is_armed for replica in self.replicas.values()):
            # The hook is the first thing that runs in the backward, so that the call comes before the reducer's.
            def call_once_computed(_: Tensor) -> None:
                call_after_backward(on_computed)

            handle = loss.register_hook(call_once_computed)
        try:
            super().backward(loss, models, options=options)
        except RuntimeError as error:
            for replica in self.replicas.values():
                replica.refuse_converted(error)
            raise
        finally:
            if handle is not None:
                handle.remove()
        for replica, versions in before:
            replica.record_backward(versions)

    def finalize(self, models: Sequence[nn.Module], factor: Tensor | float | None) -> bool:
        """Average what bypassed the reducer, then unscale and correct in one pass; see `GradientReducer.finalize`."""
        if self.averages:
            self._average_local(self._replicas_of(models))
        return super().finalize(models, factor)

    def local(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep gradients local in the block; see `GradientReducer.local`."""
        replica = self.replicas.get(model)
        # DDP learns a static graph from its first backward, which must therefore reduce (otherwise an internal
        # assertion fails, torch 2.9 to 2.15). Reducing early changes nothing: the mean of equal means is the mean.
        if replica is None or compat.awaits_static_graph(replica):
            return nullcontext()
        return replica.no_sync()

    @contextmanager
    def alone(self, model: nn.Module) -> Generator[None]:
        """Step on this rank's own gradients in the block; see `SupportsLocalSteps`."""
        replica = self.replicas.get(model)
        if replica is None:
            yield
            return
        drifts = "replicas that are trained alone drift apart: leave --ddp-check-drift-every out"
        learns = "--ddp-static-graph: train one step together first, from which DDP learns the graph"
        if self._context.ranks("context").size > 1:
            raise RuntimeError("DDP averages gradients over parallel.context too; use backend='fsdp'")
        if self._settings.check_drift_every is not None or compat.awaits_static_graph(replica):
            raise RuntimeError(learns if self._settings.check_drift_every is None else drifts)
        try:
            with replica.no_sync(is_alone=True):
                yield
        finally:
            # What is left was stepped on, and would be averaged with the next step's.
            replica.is_local = replica.is_edited = False

    def steps_together(self, model: nn.Module) -> bool:
        """Return whether all ranks step a model: it has a replica, which is not trained alone."""
        return model in self.replicas and self.replicas[model].syncs != "alone"

    @contextmanager
    def join(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Let ranks run out of batches at different steps; a finished rank joins the all-reduces of the others.

        Gradients are the mean over the ranks that still have batches.

        Raises:
            RuntimeError: The settings average gradients when the window closes, or compare weights; a finished rank
                cannot take part in either.
        """
        settings = self._settings
        if settings.reduce == "at_close" or settings.check_drift_every is not None:
            flag = "reduce at_close" if settings.reduce == "at_close" else "check-drift-every"
            raise RuntimeError(
                f"join_uneven_inputs with --ddp-{flag}: a rank without batches answers DDP's reducer alone. Leave "
                "one of the two out, or prepare the loader, which gives every rank equally many batches"
            )
        found = (unwrap_compiled(model) for model in models)
        joinable: list[Joinable] = [model for model in found if isinstance(model, DistributedDataParallel)]
        self.is_joined = True
        try:
            with Join(joinable, divide_by_initial_world_size=False) if joinable else nullcontext():
                yield
        finally:
            self.is_joined = False

    def have_moved(self, models: Sequence[nn.Module]) -> bool:
        """Return whether DDP has rebuilt its buckets since the last call, which moves the gradients."""
        new = set(filter(compat.has_rebuilt_buckets, self._replicas_of(models))) - self._rebuilt
        self._rebuilt |= new
        return bool(new)

    def mark_edited(self, models: Sequence[nn.Module]) -> None:
        """Record that other code changed gradients, so that they are averaged when the window closes."""
        for replica in self._replicas_of(models):
            replica.is_local = replica.is_edited = True

    def are_averaged(self, models: Sequence[nn.Module]) -> bool:
        """Return whether the reducer averaged all that backwards left; see `ParameterGradients.are_averaged`."""
        return not any(replica.awaits_average for replica in self._replicas_of(models))

    def average(self, models: Sequence[nn.Module]) -> None:
        """Average the gradients that other code changed. Called on all ranks."""
        replicas = self._replicas_of(models)
        if self.is_joined and all(p.grad is None for replica in replicas for p in replica.parameters()):
            return
        self._average_local(replicas)

    def add(self, model: nn.Module, replica: Replica | None) -> None:
        """Have a replica average the gradients of its model; None for a model that is not trained."""
        if replica is not None:
            self.replicas[model] = replica
        # At the close, ranks average whatever is trained then.
        if replica is None or not replica.at_close:
            reduced = {} if replica is None else replica.reduced_parameters
            self.frozen[model] = {p: name for name, p in model.named_parameters() if name not in reduced}

    def forget(self, model: nn.Module) -> None:
        """Forget the replica of a model."""
        self.replicas.pop(model, None)
        self.frozen.pop(model, None)

    def close(self) -> None:
        """Forget the replicas, and destroy the process group for averaging. Called on all ranks."""
        self.replicas.clear()
        self.frozen.clear()
        self._rebuilt.clear()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def open(self) -> None:
        """Create a group for averaging once, since the reducer's would match its all-reduces. Called on all ranks."""
        if self._group is None and self.averages:
            self._group = self._context.ranks("counts").new_group()

    def _replicas_of(self, models: Sequence[nn.Module]) -> list[Replica]:
        return [self.replicas[model] for model in models if model in self.replicas]

    def _average_local(self, replicas: Sequence[Replica]) -> None:
        """Average all gradients of the replicas that await it. Called on all ranks."""
        for replica in replicas:
            replica.check_reduced()
        chosen = [replica for replica in replicas if replica.awaits_average]
        parameters = trainable_parameters([replica.module for replica in chosen]) if self.averages else []
        if parameters:
            self._average(parameters, chosen)
        for replica in chosen:
            replica.is_local = replica.is_edited = False

    def _average(self, parameters: Sequence[nn.Parameter], replicas: Sequence[Replica]) -> None:
        names = " and ".join(type(replica.module).__name__ for replica in replicas)
        if self.is_joined:
            raise UnreducedGradientError(
                f"gradients of {names} came around DDP's reducer inside join_uneven_inputs, where a rank without "
                "batches cannot average them: let each loss come from model(batch), one backward after each forward, "
                "or prepare the loader, which gives every rank equally many batches"
            )
        if not self._has_told and not all(replica.at_close for replica in replicas):
            self._has_told = True
            logger.info(
                "gradients of %s came around DDP's reducer (a loss of a method of the model, a second backward after "
                "one forward, or an edit) and are averaged when their window closes; where that is so in every "
                "step, --ddp-reduce at_close spares the reducer's own averaging",
                names,
            )
        self._context.progress.mark(ProgressMark.AVERAGING)
        num_bytes = self._settings.bucket_size_mb * 2**20
        average(parameters, self._context.device, group=self._group, bucket_bytes=num_bytes, dtype=self.dtype)
        self._context.progress.mark(ProgressMark.AVERAGING_DONE)
