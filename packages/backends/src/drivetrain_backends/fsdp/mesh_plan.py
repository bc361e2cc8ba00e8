"""Which ranks share a copy of the parameters, decided without touching a device."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from drivetrain_backends.settings import FSDPSettings
from drivetrain_state import Topology

Strategy = Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"]
_AXES = ("data", "shard")  # of the run's own mesh, outermost first: those that FSDP works along


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """How ranks are divided.

    Attributes:
        strategy: The strategy in force.
        num_replicas: How many copies of the parameters there are.
        shard_size: How many ranks share a copy.
        reason: Why this strategy, where none was said.
    """

    strategy: Strategy
    num_replicas: int
    shard_size: int
    reason: str = ""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the mesh's axes: (replicas, shards), or (shards,) where nothing is replicated."""
        if self.strategy in ("full_shard", "shard_grad_op"):
            return (self.shard_size,)
        return self.num_replicas, self.shard_size

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the mesh's axes."""
        return _AXES[-len(self.sizes) :]

    @property
    def reshards(self) -> bool:
        """Whether parameters are let go after forward and gathered again for backward."""
        return self.strategy in ("full_shard", "hybrid_shard")


def plan_mesh(
    settings: FSDPSettings, topology: Topology, parallelism: Mapping[str, int] | None = None
) -> MeshShape:
    """Divide the ranks.

    Args:
        settings: The `fsdp` section.
        topology: Ranks and nodes.
        parallelism: The sizes of the run's own mesh, by axis; None where it has none.

    Raises:
        ValueError: The strategy does not fit the number of ranks, or contradicts the run's own mesh.
    """
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
    """The sizes of the data and shard axes; None where only data are divided, which any strategy may share out.

    Raises:
        ValueError: The mesh has an axis that this backend does not work along.
    """
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
