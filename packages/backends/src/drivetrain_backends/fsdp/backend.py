"""The FSDP2 backend: each model's parameters, gradients and optimizer states are sharded over the ranks."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NoReturn

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain_backends.fsdp import compat
from drivetrain_backends.fsdp.block_order import CollectiveOrder
from drivetrain_backends.fsdp.buffers import SharedBuffers
from drivetrain_backends.fsdp.gradients import ShardedGradients
from drivetrain_backends.fsdp.guards import AssignmentGuard, check_trainable, explain_ungathered
from drivetrain_backends.fsdp.meta_init import parameters_on_meta
from drivetrain_backends.fsdp.optimizer_probe import check_steps_shards
from drivetrain_backends.fsdp.plan import MeshShape, plan_dtypes, plan_mesh
from drivetrain_backends.fsdp.prepared import FSDPPrepared
from drivetrain_backends.fsdp.retained_models import RetainedModel, RetainedModels, shard_for_good
from drivetrain_backends.fsdp.shard import Sharding, check_dtypes, check_sources
from drivetrain_backends.fsdp.sharded_model import ShardedModel
from drivetrain_backends.fsdp.state import repoint
from drivetrain_backends.gradients.accumulation import AccumulationWindow
from drivetrain_backends.modules.activation_checkpointing import checkpointing_of
from drivetrain_backends.modules.autocast_forward import prepare_forward
from drivetrain_backends.modules.compile import unwrap_compiled
from drivetrain_backends.modules.held_dtypes import make_islands, plan_islands
from drivetrain_backends.modules.wrap_policy import BlockPlan, class_name, plan_blocks, without_blocks
from drivetrain_backends.optim.host_optimizers import check_steps_parameters
from drivetrain_backends.optim.scheduler import Scheduler
from drivetrain_backends.protocol import AutoValue
from drivetrain_backends.settings import FSDPSettings
from drivetrain_backends.state_dict.optimizer_state import check_divisible
from drivetrain_backends.torch.backend import TorchBackend, loss_scaler
from drivetrain_backends.torch.prepared import TorchPrepared
from drivetrain_precision import DtypePolicy, Policy
from drivetrain_precision.dtypes.dtype_policy import HALF, NAMES
from drivetrain_state import Context

_UNCOPYABLE = (
    "is sharded: FSDP casts and gathers its parameters by itself, so that neither a copy nor "
    "unwrap_model(keep_autocast=False) could do without it. For an average of weights or an export, build a second "
    "model and, inside accelerator.gathered(model), load model.state_dict() into it; unwrap_model(model) gives the "
    "sharded module"
)


class FSDPBackend(TorchBackend):
    """A backend that shards each model over the ranks, block by block, with torch's `fully_shard`.

    FSDP casts parameters and inputs by itself, so there is no autocast.

    Raises:
        RuntimeError: The context has no process group.
        ValueError: The strategy does not fit the number of ranks.
        PrecisionError: The dtypes contradict the run's precision.
    """

    settings_section: ClassVar[str | None] = "fsdp"
    settings_type: ClassVar[type[Any] | None] = FSDPSettings
    needs_group: ClassVar[bool] = True

    def __init__(
        self, context: Context, policy: Policy, *, window: AccumulationWindow, settings: Any = None
    ) -> None:
        own: FSDPSettings = self.settings_or_defaults(settings)
        self._sharded: dict[nn.Module, ShardedModel] = {}
        self._gradients = ShardedGradients(
            loss_scaler(context, policy), context, self._sharded, policy.dtypes.reduce
        )
        super().__init__(context, policy, window=window, settings=own, reducer=self._gradients)
        self.settings: FSDPSettings = own
        dtypes = plan_dtypes(own, policy)
        self._shape = plan_mesh(own, context.topology, context.plan)
        has_accelerator = context.device.type != "cpu"
        self._sharding = Sharding(
            mesh=_mesh(context, self._shape),
            reshards=self._shape.reshards,
            dtypes=dtypes,
            offload=own.offload,
            pin_memory=own.offload and (has_accelerator if own.pin_memory is None else own.pin_memory),
        )
        self._order = CollectiveOrder(
            context, self._sharding.mesh.mesh.reshape(-1, self._shape.shard_size).tolist()
        )
        self._buffers = SharedBuffers(context, enabled=own.broadcast_buffers)
        self._plans: dict[nn.Module, BlockPlan] = {}
        self._retained = RetainedModels()
        self._guard = AssignmentGuard()
        self._successors = WeakIdKeyDictionary()  # unsharded parameters, with their shards

    def building(self) -> AbstractContextManager[None]:
        """Create parameters on the meta device in the block; `prepare` fills the parameters block by block."""
        return parameters_on_meta()

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Scheduler]
    ) -> tuple[TorchPrepared, ...]:
        """Shard models and point their optimizers to the shards; see `Backend.prepare`. Called on all ranks.

        If this backend sharded a model before `close`, the model is trained from its shards, with its former options.

        Raises:
            UnshardedParameterError: A model that was sharded before has other parameters now. Nothing was changed.
            ValueError: A model is already sharded, shares a parameter with another, has no module of a class to wrap,
                or has a trainable parameter that FSDP cannot shard; or an optimizer cannot step shards. Nothing was
                changed.
        """
        for sharded in self._sharded.values():
            sharded.reshard()  # so that parameters() returns what optimizers hold
        self._retained.begin_again(map(unwrap_compiled, models))
        new = [model for model in models if self._retained.find(unwrap_compiled(model)) is None]
        self._check(models, new)
        islands = plan_islands(models, self.policy, known=self._sharded)
        check_steps_parameters(optimizers)
        for optimizer in optimizers:
            check_divisible(optimizer, where="FSDP", scalars=True)
        for model in new:
            settings = self.settings
            plan = plan_blocks(
                unwrap_compiled(model),
                settings.wrap,
                asked="fsdp.wrap",
                min_num_params=settings.min_num_params,
                others=[*models, *self._sharded],
            )
            check_trainable(unwrap_compiled(model))
            plan = without_blocks(plan, unwrap_compiled(model), islands[model])
            check_dtypes(unwrap_compiled(model), plan, self._sharding.dtypes, islands[model])
            self._plans[model] = plan
        for optimizer in optimizers:
            repoint(optimizer, self._successors)
            if self.settings.check_optimizers:
                check_steps_shards(optimizer, self._sharding.mesh)
        return super().prepare(models, optimizers, schedulers)

    def check_models(self, models: Sequence[nn.Module], trained_by: Mapping[nn.Module, Optimizer]) -> None:
        """Refuse models that differ between ranks or cannot be filled; see `TorchBackend`. Called on all ranks."""
        del trained_by
        for model in models:
            check_sources(unwrap_compiled(model))

    def undo_prepare(self, placed: Sequence[TorchPrepared], error: BaseException) -> None:
        """Forget the models, and note in `error` that torch cannot unshard a model; see `TorchBackend`."""
        names = [class_name(unwrap_compiled(prepared.unwrap())) for prepared in placed]
        super().undo_prepare(placed, error)
        for prepared in placed:
            del self._sharded[prepared.unwrap()]
            self._gradients.retained.pop(prepared.unwrap(), None)
        self._plans.clear()
        sharded = f"{', '.join(names)} and " if names else ""
        error.add_note(
            f"prepare() failed: {sharded}the model at fault may be sharded by now; build them anew"
        )

    def move_optimizer_state(self, optimizer: Optimizer) -> None:
        """Point an optimizer and its state to the shards of its parameters."""
        repoint(optimizer, self._successors)

    def join(self, models: Sequence[nn.Module]) -> NoReturn:
        """Refuse to join, with a RuntimeError: all ranks must gather and reduce equally often; see `Backend.join`."""
        del models
        raise RuntimeError(
            "join_uneven_inputs: sharded ranks wait for each other in every forward, so none may run out early; "
            "prepare the loader, whose tails keep ranks in step, or use backend='ddp'"
        )

    def applied(self) -> Mapping[str, object]:
        """Return the values in force, read back from the sharded modules."""
        read = read_back(list(self._sharded.values()), self.settings, self._shape.reason)
        if read:
            read["broadcast_buffers"] = self._buffers.is_enabled
            read["check_optimizers"] = self.settings.check_optimizers
        return {**super().applied(), **read}

    def reduce_dtype(self) -> object:
        """Return the dtype in which ranks add up gradients; see `TorchBackend`."""
        said = self.policy.dtypes.said().get("reduce_dtype")
        applied = reduction_dtype(list(self._sharded.values()))
        if applied is None or said is not None:
            return said if applied is None else applied
        return AutoValue(value=applied, reason="not said, and models compute in half precision")

    def close(self) -> None:
        """Restore the models' original classes as far as torch can; the parameters stay sharded."""
        super().close()
        self._guard.close()
        self._plans.clear()
        for sharded in self._sharded.values():
            sharded.drop_held()
        self._sharded.clear()
        self._gradients.held.clear()
        self._gradients.retained.clear()
        self._buffers.clear()
        self._order.close()

    def _place(self, model: nn.Module, optimizer: Optimizer | None) -> TorchPrepared:
        del optimizer
        inner = unwrap_compiled(model)  # a torch.compile wrapper traces its module at the call
        retained = self._retained.find(inner) or self._shard(
            inner, self._plans.pop(model), self._islands[model]
        )
        sharded = retained.sharded
        self._gradients.retained[model] = retained
        self._order.open(sharded)
        self._buffers.watch(inner)
        # FSDP casts parameters and inputs by itself.
        own_casts = DtypePolicy(output=self.policy.dtypes.output)
        without_autocast = replace(self.policy, autocast_dtype=None, dtypes=own_casts)
        prepare_forward(
            model,
            without_autocast,
            self.context.device,
            progress=self.context.progress,
            uncopyable=f"{class_name(inner)} {_UNCOPYABLE}",
            explain=partial(explain_ungathered, sharded),
        )
        self._sharded[model] = sharded
        self._guard.watch(inner)
        return FSDPPrepared(
            model,
            retained,
            context=self.context,
            tracker=self._tracker,
            all_sharded=self._sharded,
            successors=self._successors,
            guard=self._guard,
            gradients=self._gradients,
            order=self._order,
            buffers=self._buffers,
        )

    def _shard(self, inner: nn.Module, plan: BlockPlan, islands: frozenset[nn.Module]) -> RetainedModel:
        """Shard a new model. Called on all ranks."""
        make_islands(inner, islands, self.context.device, outside=self._sharding.dtypes.compute)
        retained, successors = shard_for_good(
            inner, plan, self._sharding, self.context, self.settings, islands=islands, order=self._order
        )
        self._successors.update(successors)
        self._gradients.watch(retained.sharded)
        self._retained.add(retained)
        return retained

    def _check(self, models: Sequence[nn.Module], new: Sequence[nn.Module]) -> None:
        holders: dict[Tensor, nn.Module] = {
            p: model for model, sharded in self._sharded.items() for p in sharded.parameters.values()
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


def _mesh(context: Context, shape: MeshShape) -> DeviceMesh:
    """Return the mesh to shard over; if part of the run's mesh has this shape, use that. Called on all ranks."""
    own = context.mesh
    if own is not None and set(shape.names) <= set(own.mesh_dim_names or ()):
        part = own[shape.names]
        if tuple(part.shape) == shape.sizes:
            return part
    if context.plan is None or context.ranks("counts").size == context.topology.world_size:
        return init_device_mesh(context.device.type, shape.sizes, mesh_dim_names=shape.names)
    sizes = (context.plan.size("pipeline"), *shape.sizes, context.plan.size("tensor"))
    names = ("outer", *shape.names, "inner")
    return init_device_mesh(context.device.type, sizes, mesh_dim_names=names)[shape.names]


def read_back(models: Sequence[ShardedModel], settings: FSDPSettings, reason: str) -> dict[str, object]:
    """Return the models' values of the section's fields; an `AutoValue` for a field that the section left open.

    `reason` says why the strategy was chosen; it is empty if the section sets the strategy.
    """
    models = [model for model in models if len(model.plain) < len(model.parameters)]  # those with shards
    if not models:
        return {}
    # The arguments of `fully_shard` are the same for all models.
    group = next(group for block in models[0].blocks for group in compat.parameter_groups(block))
    offloads = isinstance(group.offload_policy, CPUOffloadPolicy)
    resharding, other = (
        ("full_shard", "shard_grad_op") if group.mesh_info.mesh.ndim == 1 else ("hybrid_shard", "no_shard")
    )
    found = {
        "strategy": resharding if compat.reshards_after_forward(group) else other,
        "shard_size": group.mesh_info.shard_mesh_size,
        "offload": offloads,
        "pin_memory": offloads and group.offload_policy.pin_memory,
        **_read_back_models(models, settings),
    }
    reasons = _reasons(models, settings, reason)
    return {
        name: AutoValue(value=value, reason=reasons.get(name, "not said, so chosen for the run"))
        if getattr(settings, name) is None or (name in _MAY_FALL_SHORT and reasons.get(name))
        else value
        for name, value in found.items()
    }


def reduction_dtype(models: Sequence[ShardedModel]) -> str | None:
    """Return the dtype in which gradients of shards are reduced; None for their own dtype or without shards."""
    for model in models:
        if len(model.plain) < len(model.parameters):
            dtype = compat.mixed_precision(model.blocks[0]).reduce_dtype
            return None if dtype is None else NAMES[dtype]
    return None


_MAY_FALL_SHORT = ("wrap", "prefetch")  # of the requested value, with a reason


def _read_back_models(models: Sequence[ShardedModel], settings: FSDPSettings) -> dict[str, object]:
    """Return the fields whose values depend on the modules of the models."""
    blocks = [model.module.get_submodule(name) for model in models for name in model.plan.blocks]
    regions = blocks or [model.module for model in models]
    classes = {class_name(block) for block in blocks}
    asked = [name for name in settings.wrap or () if name in classes]
    trained = [p for model in models for p in model.known if p.requires_grad and isinstance(p, DTensor)]
    ahead = [compat.num_prefetched(block) for model in models for block in model.blocks]
    return {
        "wrap": (*asked, *sorted(classes.difference(asked))),
        "upcast": not any(p.dtype in HALF for p in trained)
        if settings.upcast
        else any(model.upcast for model in models),
        "prefetch": max(ahead),
        "activation_checkpointing": checkpointing_of(regions[0]),
        "compile_regions": all("forward" in vars(region) for region in regions),
    }


def _reasons(models: Sequence[ShardedModel], settings: FSDPSettings, strategy: str) -> dict[str, str]:
    shared = "; ".join(
        f"{name} is left out, as it shares {other}"
        for model in models
        for name, other in model.plan.left_out.items()
    )
    said = "" if settings.wrap is not None else models[0].plan.reason
    prefetch = "torch's own order: one block ahead in backward"
    if settings.prefetch is not None:
        most = max(len(model.blocks) for model in models) - 1
        prefetch = "there are no more blocks" if most < settings.prefetch else ""
    return {"strategy": strategy, "wrap": "; ".join(filter(None, (said, shared))), "prefetch": prefetch}
