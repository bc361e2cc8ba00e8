"""The FSDP2 backend: each model's parameters, gradients and optimizer states are sharded over the ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain_backends.composed.backend import ComposedBackend
from drivetrain_backends.composed.strategy import ModelTransform, Strategy
from drivetrain_backends.fsdp.applied import read_back, reduction_dtype
from drivetrain_backends.fsdp.gradients import ShardedGradients
from drivetrain_backends.fsdp.guards.block_order import BlockOrderGuard
from drivetrain_backends.fsdp.guards.misuse import check_trainable, explain_ungathered
from drivetrain_backends.fsdp.layout import ShardedLayout, repoint
from drivetrain_backends.fsdp.optimizer_probe import check_steps_shards
from drivetrain_backends.fsdp.retained_models import RetainedModel, RetainedModels
from drivetrain_backends.fsdp.shard import check_dtypes, check_sources, shard_for_good
from drivetrain_backends.fsdp.sharded_run import ShardedRun
from drivetrain_backends.fsdp.sharded_steps import ShardGuard
from drivetrain_backends.modules.autocast_forward import Note, prepare_forward, restore_forward
from drivetrain_backends.modules.compile import unwrap_compiled
from drivetrain_backends.modules.held_dtypes import Islands, make_islands, plan_islands
from drivetrain_backends.modules.wrap_policy import class_name, plan_blocks, with_blocks, without_blocks
from drivetrain_backends.protocol import AutoValue
from drivetrain_backends.settings import FSDPSettings
from drivetrain_backends.state_dict.optimizer_state import check_divisible
from drivetrain_parallel import holds_experts
from drivetrain_precision import DtypePolicy
from drivetrain_weights.meta_init import parameters_on_meta

_UNCOPYABLE = (
    "is sharded: FSDP casts and gathers its parameters by itself, so that neither a copy nor "
    "unwrap_model(keep_autocast=False) could do without it. For an average of weights or an export, build a second "
    "model and, inside accelerator.gathered(model), load model.state_dict() into it; unwrap_model(model) gives the "
    "sharded module"
)


class FSDPBackend(ComposedBackend):
    """A backend that shards each model over the ranks, block by block, with torch's `fully_shard`.

    A model that this backend sharded before `close` is trained from its shards, with its former options.

    Raises:
        RuntimeError: The context has no process group.
        ValueError: The strategy does not fit the number of ranks.
        PrecisionError: The dtypes contradict the run's precision.
    """

    settings_section: ClassVar[str | None] = "fsdp"
    settings_type: ClassVar[type[Any] | None] = FSDPSettings
    needs_group: ClassVar[bool] = True

    def compose(self) -> Strategy:
        """Return the strategy: blocks sharded, and inputs cast by FSDP itself."""
        run = ShardedRun.of(self.context, self.policy, self.settings)
        gradients = ShardedGradients(self.scaler, run)

        return Strategy(
            transforms=(ShardBlocks(run, gradients), CastForwards(run, self.note_forward)),
            gradients=gradients,
            layout=ShardedLayout(run),
            guards=(BlockOrderGuard(run.order, run.buffers), ShardGuard(run.models)),
            building=parameters_on_meta,
            direct=run.direct,
            averages_experts=True,
        )


class CastForwards(ModelTransform):
    """Run a model's forward without autocast, because FSDP casts parameters and inputs by itself."""

    def __init__(self, run: ShardedRun, note: Note | None = None) -> None:
        self._run, self._note = run, note
        output = DtypePolicy(output=run.policy.dtypes.output)
        self._policy = replace(run.policy, autocast_dtype=None, dtypes=output)

    def apply(self, model: nn.Module) -> nn.Module:
        """Exchange the model's class for one whose call casts outputs and explains errors."""
        prepare_forward(
            model,
            self._policy,
            self._run.context.device,
            progress=self._run.context.progress,
            uncopyable=f"{class_name(unwrap_compiled(model))} {_UNCOPYABLE}",
            explain=partial(explain_ungathered, self._run.models[model].sharded),
            note=self._note,
        )
        return model

    def release(self, model: nn.Module) -> None:
        """Restore the model's class."""
        restore_forward(model)


class ShardBlocks(ModelTransform):
    """Shard a model's parameters block by block, for as long as the model lives.

    `close` leaves the parameters in shards, because torch cannot undo the sharding.
    """

    def __init__(self, run: ShardedRun, gradients: ShardedGradients) -> None:
        self._run, self._gradients = run, gradients
        self._retained = RetainedModels()
        self._islands: Islands = {}
        self._placed: list[str] = []  # the classes of the models that the present `prepare` has sharded

    def recall(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Sequence[nn.Module]:
        """Release what forwards have gathered, so that `parameters()` returns what optimizers hold."""
        for retained in self._run.models.values():
            retained.sharded.reshard()
        self._retained.begin_again(map(unwrap_compiled, models))
        for optimizer in optimizers:
            repoint(optimizer, self._run.successors)
        return models

    def plan(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Plan the blocks of new models, and refuse models and optimizers that FSDP cannot train.

        Raises:
            UnshardedParameterError: A model that was sharded before has other parameters now.
            ValueError: A model is already sharded, differs between ranks, cannot be filled, shares a parameter with
                another, has no module of a class to wrap, or has a trainable parameter that FSDP cannot shard; or an
                optimizer cannot step shards.
        """
        new = [model for model in models if self._retained.find(unwrap_compiled(model)) is None]
        self._check(models, new)
        self._islands = plan_islands(models, self._run.policy, known=self._run.models)
        for optimizer in optimizers:
            check_divisible(optimizer, where="FSDP", scalars=True)
        self._placed.clear()
        self._run.blocks.clear()
        for model in new:
            inner = unwrap_compiled(model)
            plan = plan_blocks(
                inner,
                self._run.settings.wrap,
                asked="fsdp.wrap",
                min_num_params=self._run.settings.min_num_params,
                others=[*models, *self._run.models],
            )
            check_trainable(inner)
            plan = without_blocks(plan, inner, self._islands[model])
            check_dtypes(inner, plan, self._run.sharding.dtypes, self._islands[model])
            self._run.blocks[model] = plan
        for optimizer in optimizers if self._run.settings.check_optimizers else ():
            check_steps_shards(optimizer, self._run.sharding.mesh)
        for model in models:
            check_sources(unwrap_compiled(model), self._run.context)

    def apply(self, model: nn.Module) -> nn.Module:
        """Shard a new model, or take up the shards of one that was sharded before. Called on all ranks."""
        inner = unwrap_compiled(model)  # a torch.compile wrapper traces its module at the call
        retained = self._retained.find(inner) or self._shard(model, inner)
        self._run.order.open(retained.sharded)
        self._run.models[model] = retained
        self._run.buffers.watch(inner)
        self._run.assignments.watch(inner)
        self._placed.append(class_name(inner))
        return model

    def release(self, model: nn.Module) -> None:
        """Forget the model; its parameters stay sharded and its blocks wrapped."""
        retained, inner = self._run.models.pop(model), unwrap_compiled(model)
        self._run.buffers.forget(inner)
        self._run.assignments.forget(inner)
        retained.sharded.reshard()
        retained.sharded.drop_held()
        retained.fp8_gather.close()

    def fail(self, error: BaseException) -> None:
        """Note in `error` that torch cannot unshard a model."""
        sharded = f"{', '.join(self._placed)} and " if self._placed else ""
        error.add_note(
            f"prepare() failed: {sharded}the model at fault may be sharded by now; build them anew"
        )
        self._run.blocks.clear()

    def applied(self) -> Mapping[str, object]:
        """Return the values in force, read back from the sharded modules."""
        models = [retained.sharded for retained in self._run.models.values()]
        read = read_back(models, self._run.settings, self._run.shape.reason)
        if read:
            read["broadcast_buffers"] = self._run.buffers.is_enabled
            read["check_optimizers"] = self._run.settings.check_optimizers
        said, reduced = self._run.policy.dtypes.said().get("reduce_dtype"), reduction_dtype(models)
        if reduced is not None and said is None:
            reason = "not said, and models compute in half precision"
            return {**read, "reduce_dtype": AutoValue(value=reduced, reason=reason)}
        return {**read, "reduce_dtype": said if reduced is None else reduced}

    def close(self) -> None:
        """Stop watching assignments."""
        self._run.assignments.close()
        self._run.blocks.clear()
        self._islands.clear()

    def _shard(self, model: nn.Module, inner: nn.Module) -> RetainedModel:
        """Shard a new model. Called on all ranks."""
        islands = self._islands.pop(model)
        make_islands(inner, islands, self._run.context.device, outside=self._run.sharding.dtypes.compute)
        experts = {name: one for name, one in inner.named_modules() if holds_experts(one)}
        if kept := [name for name, one in experts.items() if one in islands]:
            raise ValueError(
                f"precision.keep_fp32 keeps {kept[0]} whole on every rank, and parallel.expert divides it: leave it "
                "out of keep_fp32, or expert out of parallel"
            )
        plan = with_blocks(self._run.blocks[model], experts)  # whose ranks are others than those of the rest
        retained = shard_for_good(inner, plan, self._run, islands)
        self._gradients.watch(retained.sharded)
        self._retained.add(retained)
        return retained

    def _check(self, models: Sequence[nn.Module], new: Sequence[nn.Module]) -> None:
        holders: dict[Tensor, nn.Module] = {
            p: model for model, one in self._run.models.items() for p in one.sharded.parameters.values()
        }
        for model in models:
            kind = type(unwrap_compiled(model)).__name__
            for parameter in model.parameters():
                if (other := holders.setdefault(parameter, model)) is not model:
                    raise ValueError(
                        f"{kind} shares a parameter with {type(other).__name__}, and a parameter is sharded with one "
                        "model: put both into one nn.Module, and prepare that"
                    )
        for model in new:
            if any(isinstance(m, FSDPModule) for m in model.modules()) or any(
                isinstance(p, DTensor) for p in model.parameters()
            ):
                raise ValueError(
                    f"{type(unwrap_compiled(model)).__name__} is prepared already: it is sharded; prepare() a model "
                    "once, or build it anew"
                )
