"""The plan of a sharded run, made without a device: which ranks share a replica, and the dtypes of its tensors."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from drivetrain_backends.modules.packed_weights import is_wrapper
from drivetrain_backends.settings import FSDPSettings
from drivetrain_parallel import holds_experts
from drivetrain_precision import DtypePolicy, Policy, PrecisionError
from drivetrain_precision.dtypes.dtype_policy import HALF, NAMES
from drivetrain_precision.dtypes.holding import held_dtype
from drivetrain_state import MeshPlan, Topology

ShardingStrategy = Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"]
_AXES = ("data", "shard")  # the axes of the run's own mesh that FSDP uses, outermost first


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """The division of ranks into replicas and shards."""

    strategy: ShardingStrategy
    num_replicas: int  # the number of replicas of the parameters
    shard_size: int  # the number of ranks that share a replica
    reason: str = ""  # the reason for the chosen strategy; empty if the settings give one

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the mesh's axes: (replicas, shards), or (shards,) without replication."""
        if self.strategy in ("full_shard", "shard_grad_op"):
            return (self.shard_size,)
        return self.num_replicas, self.shard_size

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the mesh's axes."""
        return _AXES[-len(self.sizes) :]

    @property
    def reshards(self) -> bool:
        """True if parameters are released after forward and gathered again for backward."""
        return self.strategy in ("full_shard", "hybrid_shard")


def plan_mesh(settings: FSDPSettings, topology: Topology, parallelism: MeshPlan | None = None) -> MeshShape:
    """Return the division of the ranks whose gradients add up; `parallelism` is the run's own mesh, if it has one."""
    world, local, given = topology.world_size, topology.local_world_size, None
    if parallelism is not None:
        world = len(parallelism.members(topology.rank, "counts"))
        local = max(1, local // parallelism.size("tensor"))
        if "shard" in parallelism.names:  # otherwise any strategy fits
            given = parallelism.size("data"), len(parallelism.members(0, "fsdp"))
    strategy, reason = settings.strategy, ""
    if strategy == "auto":
        raise ValueError(
            "fsdp.strategy='auto': an Accelerator chooses it; name a strategy to a backend alone"
        )
    if strategy is None:
        is_hybrid = settings.shard_size is not None or (given is not None and given[0] > 1 < given[1])
        strategy = "hybrid_shard" if is_hybrid else "full_shard"
        reason = (
            "as shard_size or the run's mesh divides the ranks" if is_hybrid else "what saves the most memory"
        )
    size = {"full_shard": world, "shard_grad_op": world, "no_shard": 1}.get(strategy)
    if size is None:
        size = settings.shard_size or (given[1] if given is not None else local)
    if world % size:
        raise ValueError(
            f"fsdp.shard_size={size} with {world} processes to divide: {world // size or 1} x {size} is "
            f"{(world // size or 1) * size}, not {world}; choose a size that divides the number of processes"
        )
    shape = MeshShape(strategy=strategy, num_replicas=world // size, shard_size=size, reason=reason)
    if given is not None and given != (shape.num_replicas, size):
        raise ValueError(
            f"fsdp.strategy={strategy!r} makes {shape.num_replicas} replicas of {size} shards, but parallelism says "
            f"data={given[0]} and shard={given[1]}; leave strategy and shard_size out, or change one of them"
        )
    return shape


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypePlan:
    """The dtypes of a run; None keeps the dtypes of the model."""

    compute: torch.dtype | None  # the dtype of forward and backward
    reduce: torch.dtype | None  # the dtype in which gradients are reduced
    upcast: bool  # whether trainable half-precision parameters are converted to fp32 before they are sharded
    # The dtypes that parameters and buffers are held in, as far as the run's policy says them.
    held: DtypePolicy

    def policy(self) -> MixedPrecisionPolicy:
        """Return the policy for `fully_shard`. It casts no outputs: the prepared model's call casts them."""
        return MixedPrecisionPolicy(param_dtype=self.compute, reduce_dtype=self.reduce)


def plan_dtypes(settings: FSDPSettings, policy: Policy) -> DtypePlan:
    """Return the dtypes for the section and the run's precision."""
    held = policy.dtypes
    if settings.upcast is not None and held.param is not None and settings.upcast != (held.param not in HALF):
        raise PrecisionError(
            f"fsdp.upcast={settings.upcast} with precision.param_dtype={NAMES[held.param]!r}: both say what "
            "parameters are held in, and they differ; leave fsdp.upcast out"
        )
    compute = policy.autocast_dtype or held.param
    upcast = compute in HALF and held.param is None
    return DtypePlan(
        compute=compute,
        reduce=torch.float32 if held.reduce is None and compute in HALF else held.reduce,
        upcast=upcast if settings.upcast is None else settings.upcast,
        held=held,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The sharding options that are the same for every model of a run."""

    mesh: DeviceMesh  # the ranks that parameters are sharded over
    experts: DeviceMesh | None  # those that experts are sharded over, as they hold the same ones
    reshards: bool  # whether parameters are released after forward
    dtypes: DtypePlan  # the dtypes of storage and computation
    offload: bool  # whether shards are kept on the CPU
    pin_memory: bool  # whether offloaded shards are in pinned memory

    def mesh_of(self, block: nn.Module) -> DeviceMesh:
        """Return the mesh that a block's own parameters are sharded over."""
        return self.experts if self.experts is not None and holds_experts(block) else self.mesh

    def policy_of(self, block: nn.Module) -> MixedPrecisionPolicy:
        """Return the dtypes of a block. Inputs of experts are not cast: they come from within another block."""
        return replace(self.dtypes.policy(), cast_forward_inputs=not holds_experts(block))


def is_plain(parameter: Tensor) -> bool:
    """Return whether every rank keeps the full parameter; True for scalars, integers, empty and packed tensors."""
    is_skipped = parameter.dim() == 0 or not parameter.numel() or not parameter.is_floating_point()
    return is_skipped or is_wrapper(parameter)


class TensorStorage:
    """The dtype and division in which a model's tensors are stored; tensors are looked up by identity."""

    def __init__(self, model: nn.Module, dtypes: DtypePlan, islands: frozenset[nn.Module]) -> None:
        self._dtypes = dtypes
        self._kept: set[Tensor] = set()
        for module in model.modules():
            if module in islands:
                self._kept.update(module.parameters(recurse=False))
                self._kept.update(module.buffers(recurse=False))

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype in which a parameter or buffer is stored."""
        held = held_dtype(tensor, self._dtypes.held, is_island=tensor in self._kept)
        return torch.float32 if self.upcasts(tensor) else held

    def upcasts(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a trained parameter in half precision that is stored in fp32."""
        is_trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        return is_trained and self._dtypes.upcast and tensor.dtype in HALF

    def is_whole(self, parameter: Tensor) -> bool:
        """Return whether every rank keeps the full parameter; True also for modules that stay in fp32.

        These parameters are small, and a block could gather them only in the block's own dtype.
        """
        return is_plain(parameter) or parameter in self._kept
