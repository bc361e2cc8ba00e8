"""The plan of which ranks share a replica of the parameters, made without a device."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from drivetrain_backends.settings import FSDPSettings
from drivetrain_state import Topology

Strategy = Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"]
_AXES = ("data", "shard")  # the axes of the run's own mesh that FSDP uses, outermost first


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """The division of ranks into replicas and shards.

    Attributes:
        strategy: The strategy in force.
        num_replicas: The number of replicas of the parameters.
        shard_size: The number of ranks that share a replica.
        reason: The reason for the chosen strategy; empty if the settings give one.
    """

    strategy: Strategy
    num_replicas: int
    shard_size: int
    reason: str = ""

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


def plan_mesh(
    settings: FSDPSettings, topology: Topology, parallelism: Mapping[str, int] | None = None
) -> MeshShape:
    """Return the division of the ranks; `parallelism` are the sizes of the run's own mesh by axis, if it has one."""
    world, given = topology.world_size, _along(parallelism)
    strategy, reason = settings.strategy, ""
    if strategy is None:
        is_hybrid = settings.shard_size is not None or (given is not None and given[0] > 1 < given[1])
        strategy = "hybrid_shard" if is_hybrid else "full_shard"
        reason = (
            "as shard_size or the run's mesh divides the ranks" if is_hybrid else "what saves the most memory"
        )
    size = {"full_shard": world, "shard_grad_op": world, "no_shard": 1}.get(strategy)
    if size is None:
        said_elsewhere = given[1] if given is not None else topology.local_world_size
        size = settings.shard_size or said_elsewhere
    if world % size:
        raise ValueError(
            f"fsdp.shard_size={size} with world_size={world}: {world // size or 1} x {size} is "
            f"{(world // size or 1) * size}, not {world}; choose a size that divides the number of processes"
        )
    shape = MeshShape(strategy=strategy, num_replicas=world // size, shard_size=size, reason=reason)
    if given is not None and given != (shape.num_replicas, size):
        raise ValueError(
            f"fsdp.strategy={strategy!r} makes {shape.num_replicas} replicas of {size} shards, but parallelism says "
            f"data={given[0]} and shard={given[1]}; leave strategy and shard_size out, or change one of them"
        )
    return shape


def _along(parallelism: Mapping[str, int] | None) -> tuple[int, int] | None:
    """Return the sizes of the data and shard axes; None if there is no shard axis, which allows any strategy."""
    if parallelism is None:
        return None
    odd = {name: size for name, size in parallelism.items() if name not in _AXES and size > 1}
    if odd:
        shown = ", ".join(f"{name}={size}" for name, size in odd.items())
        raise ValueError(
            f"parallelism {shown}: the fsdp backend works along data and shard only; its mesh would be of "
            f"{prod(parallelism.values())} ranks with others inside. Leave that axis out, or choose another backend"
        )
    if "shard" not in parallelism:
        return None
    return parallelism.get("data", 1), parallelism["shard"]
