"""The sizes of the parallel dimensions, and the views of the mesh that they span: which ranks share what.

`ParallelDims` is the section `parallel` of the settings. Without torch, so that the launcher can read it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from types import MappingProxyType
from typing import Any, Literal

# Outermost first: neighbours along the last axis are neighbouring ranks, which have the fastest links.
AXES = ("pipeline", "data", "shard", "context", "tensor")

View = Literal[
    "world", "reads", "counts", "fsdp", "replica", "expert_shard", "expert", "pipeline", "data", "shard",
    "context", "tensor",
]  # fmt: skip
# The axes along which the ranks of a view differ; a single axis is a view of its own name.
VIEWS: MappingProxyType[View, tuple[str, ...]] = MappingProxyType(
    {
        "world": AXES,
        "reads": ("data", "shard"),  # ranks that read different samples
        "counts": ("data", "shard", "context"),  # ranks whose losses, tokens and gradients add up
        "fsdp": ("shard", "context"),  # ranks that divide the parameters of one model
        "replica": ("pipeline", "context", "tensor"),  # ranks that compute one sample together
    }
)
_EXPERT_AXES = ("shard", "context", "tensor")  # the axes that experts divide anew


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """The plan of a mesh: the names of its axes, outermost first, and their sizes.

    `expert` is the size of a second view of the same ranks: `expert` neighbours hold different experts, and the ranks
    of `expert_shard`, of which there are shard x context x tensor / expert, hold parts of the same experts.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    expert: int = 1

    def size(self, name: str) -> int:
        """Return the size of axis `name`; 1 if the mesh has no such axis."""
        return self.sizes[self.names.index(name)] if name in self.names else 1

    def members(self, rank: int, view: View) -> Sequence[int]:
        """Return the ranks of `view` that `rank` belongs to, in rising order: those that differ along its axes alone.

        Example:
            >>> plan = ParallelDims(data=2, shard=2, tensor=2).plan(8)
            >>> list(plan.members(1, "reads")), list(plan.members(1, "tensor"))
            ([1, 3, 5, 7], [0, 1])
        """
        if view == "world":
            return range(prod(self.sizes))
        if view in ("expert", "expert_shard"):
            num_ranks = prod(map(self.size, _EXPERT_AXES))
            start, place = rank - rank % num_ranks, rank % num_ranks
            if view == "expert":
                first = start + place - place % self.expert
                return range(first, first + self.expert)
            return range(start + place % self.expert, start + num_ranks, self.expert)
        axes, where, stride = VIEWS.get(view, (view,)), self.coordinate(rank), 1
        steps: list[range] = []
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            if name in axes:
                rank -= where[name] * stride
                steps.append(range(0, size * stride, stride))
            stride *= size
        return tuple(rank + sum(offsets) for offsets in product(*reversed(steps)))

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the index of `rank` along each axis."""
        position: dict[str, int] = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            rank, position[name] = divmod(rank, size)
        return {name: position[name] for name in self.names}

    def parts(self, view: View) -> list[Sequence[int]]:
        """Return the ranks of each part into which `view` divides the world, in the order of their first ranks."""
        found: list[Sequence[int]] = []
        known: set[int] = set()
        for rank in range(prod(self.sizes)):
            if rank not in known:
                found.append(self.members(rank, view))
                known.update(found[-1])
        return found


def _setting(text: str, *, default: Any = None, needs: str | None = None, brief: str = "") -> Any:
    metadata = {"help": text, "brief": brief, "topic": "Training"}
    return field(default=default, metadata=metadata | ({"needs": needs} if needs else {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """The sizes of the parallel dimensions, whose product is the world size.

    One size may be -1, which is inferred from the others. `None` means unset: the axis has size 1 and is left out of
    the mesh, except that an unset `data` is inferred if no size is -1.

    Example:
        >>> ParallelDims(data=2, tensor=2).plan(4).members(3, "data")
        (1, 3)
    """

    data: int | None = _setting(
        "Number of model replicas, which read different samples; unset: the processes that are left."
    )
    shard: int | None = _setting(
        "Number of processes that divide one replica's parameters and read different samples (FSDP).",
        brief="Processes that divide the parameters",
    )
    context: int | None = _setting("Number of processes that divide each sequence.")
    tensor: int | None = _setting(
        "Number of processes that divide each layer.", brief="Processes that divide each layer"
    )
    pipeline: int | None = _setting("Number of processes that each hold some of the layers.")
    expert: int | None = _setting(
        "Number of processes that hold different experts; divides shard x context x tensor."
    )
    context_method: Literal["heads", "gathered"] | None = _setting(
        "How the context dimension divides attention: ranks exchange heads (Ulysses), or gather keys and values; "
        "unset: by heads where they divide.",
        needs="context",
    )
    pipeline_schedule: (
        Literal[
            "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dual_pipe_v"
        ]
        | None
    ) = _setting(
        "The order of the forwards and backwards of micro-batches; unset: 1f1b, as many forwards ahead as stages "
        "follow. All but gpipe and 1f1b give each process two stages.",
        needs="pipeline",
    )
    pipeline_micro_batches: int | None = _setting(
        "Number of micro-batches that a batch of train_step() is cut into; unset: four for each process of the "
        "pipeline.",
        needs="pipeline",
    )
    pipeline_splits: tuple[str, ...] | None = _setting(
        "Names of the blocks that begin a stage, but the first stage's; unset: stages with equally many parameters.",
        needs="pipeline",
    )
    pipeline_last: tuple[str, ...] | None = _setting(
        "Patterns of the names of modules that run after the blocks, though the model lists them before.",
        needs="pipeline",
    )
    sequence: bool = _setting(
        "Whether the tensor dimension also divides what stands between divided layers, such as norms and residuals, "
        "along sequences.",
        default=False,
        needs="tensor",
    )
    tensor_styles: Mapping[str, str] | None = _setting(
        "How the tensor dimension divides layers, by patterns of their names: column, row, vocabulary, "
        'vocabulary_column, gathered_column, summed or whole, such as {"*.qkv": "column/3"} for a layer of three '
        "equal pieces; unset: by the model's own plan, or as found by a trial.",
        needs="tensor",
    )

    def __post_init__(self) -> None:
        for name in AXES:
            size = getattr(self, name)
            if not isinstance(size, int | None):
                raise TypeError(f"{name}={size!r}: a size is a whole number")
            if size is not None and size != -1 and size < 1:
                raise ValueError(f"{name}={size!r}: a size of 1 or more is allowed, or -1 to infer the size")
        if self.sequence and self.context not in (None, 1):
            raise ValueError(
                f"sequence=True with context={self.context}: the context dimension divides all of a block along "
                "sequences, also what stands between its layers; leave sequence out"
            )
        if self.expert is not None and self.expert < 1:
            raise ValueError(f"expert={self.expert!r}: a size of 1 or more is allowed")
        rest = [name for name in AXES if getattr(self, name) == -1]
        if len(rest) > 1:
            raise ValueError(f"{' and '.join(f'{name}=-1' for name in rest)}: only one size may be -1")

    @property
    def is_said(self) -> bool:
        """True if a size is set: without one, all processes are data parallel, and there is no mesh."""
        return any(getattr(self, name) is not None for name in (*AXES, "expert"))

    def check_axes(self, backend: str, refused: Mapping[str, str]) -> None:
        """Refuse sizes above 1 along axes that a backend does not have, each of which comes with what to do."""
        for name, instead in refused.items():
            if (size := getattr(self, name) or 1) > 1:
                raise ValueError(f"{name}={size} under backend={backend!r}: {instead}")

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
        expert, num_ranks = self.expert or 1, prod(fixed.get(name, 1) for name in _EXPERT_AXES)
        if num_ranks % expert:
            allowed = ", ".join(str(size) for size in range(1, num_ranks + 1) if num_ranks % size == 0)
            do = f"these {num_ranks} processes; expert may be {allowed}"
            if num_ranks == 1:
                do = "those, not among those of data: say shard in place of data, under a backend that shards"
            raise ValueError(
                f"expert={expert} with {' x '.join(f'{name}={fixed.get(name, 1)}' for name in _EXPERT_AXES)}: "
                f"experts are divided among {do}"
            )
        return MeshPlan(names=names, sizes=tuple(fixed[name] for name in names), expert=expert)
