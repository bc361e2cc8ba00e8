"""The plan of a sharded run and the models that it trains, which the parts of the strategy share."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import gcd

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain_backends.fsdp.guards.assignments import AssignmentGuard
from drivetrain_backends.fsdp.guards.block_order import CollectiveOrder
from drivetrain_backends.fsdp.plan import MeshShape, Sharding, plan_dtypes, plan_mesh
from drivetrain_backends.fsdp.retained_models import RetainedModel
from drivetrain_backends.modules.shared_buffers import SharedBuffers
from drivetrain_backends.modules.wrap_policy import BlockPlan
from drivetrain_backends.settings import FSDPSettings
from drivetrain_precision import Policy
from drivetrain_state import Context


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardedRun:
    """The plan and the models that the parts of the FSDP2 strategy share.

    A model is named by the module that the user calls, which torch.compile may have wrapped.
    """

    context: Context
    policy: Policy
    settings: FSDPSettings
    shape: MeshShape
    sharding: Sharding
    order: CollectiveOrder
    buffers: SharedBuffers
    assignments: AssignmentGuard
    models: dict[nn.Module, RetainedModel] = field(default_factory=dict[nn.Module, RetainedModel])
    # The blocks of the models that the present `prepare` shards.
    blocks: dict[nn.Module, BlockPlan] = field(default_factory=dict[nn.Module, BlockPlan])
    # Unsharded parameters, with their shards.
    successors: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    @contextmanager
    def direct(self) -> Generator[None]:
        """Leave every operation on parameters in the block to torch: a step reads thousands of their attributes."""
        uses = [retained.use for retained in self.models.values()]
        for use in uses:
            use.end()
        try:
            yield
        finally:
            for use in uses:
                use.begin()

    @classmethod
    def of(cls, context: Context, policy: Policy, settings: FSDPSettings) -> "ShardedRun":
        """Plan the mesh and the dtypes of a run, and make the mesh. Called on all ranks."""
        shape = plan_mesh(settings, context.topology, context.plan)
        dtypes = plan_dtypes(settings, policy)
        pins = context.traits.copies_aside if settings.pin_memory is None else settings.pin_memory
        sharding = Sharding(
            mesh=_mesh(context, shape),
            experts=_experts_mesh(context, shape),
            reshards=shape.reshards,
            dtypes=dtypes,
            offload=settings.offload,
            pin_memory=settings.offload and pins,
        )
        return cls(
            context=context,
            policy=policy,
            settings=settings,
            shape=shape,
            sharding=sharding,
            order=CollectiveOrder(context, sharding.mesh.mesh.reshape(-1, shape.shard_size).tolist()),
            buffers=SharedBuffers(context, enabled=settings.broadcast_buffers),
            assignments=AssignmentGuard(),
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


def _experts_mesh(context: Context, shape: MeshShape) -> DeviceMesh | None:
    """Return the mesh to shard experts over: the ranks that hold the same ones. Called on all ranks.

    An expert's gradient is the mean over the ranks of `expert` already, so that its mean over these ranks is that
    over all ranks whose gradients add up. They make as many replicas as the ranks of the model's other parameters, if
    that divides their number.
    """
    num_expert_ranks = context.ranks("expert").size
    if context.plan is None or num_expert_ranks == 1:
        return None
    num_holders = context.plan.size("data") * context.ranks("expert_shard").size
    num_replicas = gcd(num_holders, shape.num_replicas)
    sizes = (context.plan.size("pipeline"), num_replicas, num_holders // num_replicas, num_expert_ranks)
    names = ("outer", "data", "shard", "expert")
    return init_device_mesh(context.device.type, sizes, mesh_dim_names=names)[shape.names]
