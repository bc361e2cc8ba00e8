"""The sizes of the parallel dimensions, and the device mesh that they span."""

from dataclasses import dataclass
from math import prod

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Outermost first: neighbours along the last axis are neighbouring ranks, which have the fastest links.
AXES = ("pipeline", "data", "shard", "context", "tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """The plan of a mesh: the names of its axes, outermost first, and their sizes."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def size(self, name: str) -> int:
        """Return the size of axis `name`; 1 if the mesh has no such axis."""
        return self.sizes[self.names.index(name)] if name in self.names else 1

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the index of `rank` along each axis."""
        position: dict[str, int] = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            rank, position[name] = divmod(rank, size)
        return {name: position[name] for name in self.names}

    def data_shard(self, rank: int) -> tuple[int, int]:
        """Return the part of the data that `rank` reads, as (index, count).

        Ranks that differ along the data or shard axis read different samples; ranks that differ only along the
        pipeline, context and tensor axes read the same samples.
        """
        where = self.coordinate(rank)
        shards = self.size("shard")
        return where.get("data", 0) * shards + where.get("shard", 0), self.size("data") * shards

    def data_readers(self) -> tuple[int, ...]:
        """Return the first rank that reads each part of the data, in order of parts."""
        first: dict[int, int] = {}
        for rank in range(prod(self.sizes)):
            first.setdefault(self.data_shard(rank)[0], rank)
        return tuple(first[index] for index in sorted(first))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """The sizes of the parallel dimensions, whose product is the world size.

    One size may be -1, which is inferred from the others. `None` means unset: the axis has size 1 and is left out of
    the mesh, except that an unset `data` is inferred if no size is -1.

    Attributes:
        data: The number of model replicas, which read different samples.
        shard: The number of processes that shard one replica's parameters and read different samples (FSDP).
        context: The number of processes that split each sequence.
        tensor: The number of processes that split each matrix.
        pipeline: The number of stages that the layers are split into.

    Example:
        >>> ParallelDims(data=2, tensor=2).plan(4).data_shard(3)
        (1, 2)
    """

    data: int | None = None
    shard: int | None = None
    context: int | None = None
    tensor: int | None = None
    pipeline: int | None = None

    def __post_init__(self) -> None:
        for name in AXES:
            size = getattr(self, name)
            if size is not None and size != -1 and size < 1:
                raise ValueError(f"{name}={size!r}: a size of 1 or more is allowed, or -1 to infer the size")
        rest = [name for name in AXES if getattr(self, name) == -1]
        if len(rest) > 1:
            raise ValueError(f"{' and '.join(f'{name}=-1' for name in rest)}: only one size may be -1")

    def plan(self, world_size: int) -> MeshPlan:
        """Plan the mesh of `world_size` processes; ValueError if the sizes do not multiply to it."""
        said: dict[str, int] = {name: size for name in AXES if (size := getattr(self, name)) is not None}
        rest = next((name for name, size in said.items() if size == -1), None)
        if rest is None and "data" not in said:
            rest = "data"
        fixed = {name: size for name, size in said.items() if size != -1}
        product = prod(fixed.values())
        shown = " x ".join(f"{name}={size}" for name, size in fixed.items()) or "no fixed size"
        if rest is None and product != world_size:
            raise ValueError(
                f"{shown} makes {product}, but there are world_size={world_size} processes: "
                "change a size, set one to -1, or start another number of processes"
            )
        if world_size % product:
            raise ValueError(
                f"{shown} makes {product}, which does not divide world_size={world_size}: "
                "change a size or start a multiple of it"
            )
        if rest is not None:
            fixed[rest] = world_size // product
        unsaid_data = "data" not in said and fixed.get("data") == 1 and len(fixed) > 1
        names = tuple(name for name in AXES if name in fixed and not (name == "data" and unsaid_data))
        return MeshPlan(names=names, sizes=tuple(fixed[name] for name in names))


def build_mesh(plan: MeshPlan, device_type: str) -> DeviceMesh:
    """Create the device mesh of `plan` over the default process group. Must be called on all ranks."""
    return init_device_mesh(device_type, plan.sizes, mesh_dim_names=plan.names)
