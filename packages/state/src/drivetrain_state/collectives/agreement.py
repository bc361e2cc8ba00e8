"""What debug mode does before a collective: every rank says what it is about to hand over, and all compare."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from drivetrain_state.collectives._nested import Nested, leaves_with_paths
from drivetrain_state.context import Context
from drivetrain_state.errors import CollectiveMismatchError


@dataclass(frozen=True, slots=True)
class Handed:
    """What one rank hands to a collective.

    Attributes:
        call: The collective with the arguments that ranks must agree on, such as `"reduce(op='sum')"`.
        leaves: For each leaf its path, its dtype (or its type) and its shape; -1 for a size that may differ.
    """

    call: str
    leaves: tuple[tuple[str, str, tuple[int, ...]], ...] = ()

    def __str__(self) -> str:
        shown = ", ".join(f"data{path}: {kind} {shape}" for path, kind, shape in self.leaves)
        return f"{self.call} of {shown}" if shown else self.call


def handed(call: str, data: Nested, *, free_dim: int | None = None) -> Handed:
    """Describe `data`; the size along `free_dim` may differ between ranks."""
    leaves: list[tuple[str, str, tuple[int, ...]]] = []
    for path, leaf in leaves_with_paths(data):
        if isinstance(leaf, torch.Tensor):
            shape = list(leaf.shape)
            if free_dim is not None and -len(shape) <= free_dim < len(shape):
                shape[free_dim] = -1
            leaves.append((path, str(leaf.dtype).removeprefix("torch."), tuple(shape)))
        else:
            leaves.append((path, type(leaf).__name__, ()))
    return Handed(call, tuple(leaves))


def compare(by_rank: Sequence[Handed]) -> None:
    """Check that all ranks hand over the same.

    Raises:
        CollectiveMismatchError: If they do not, with one line for each rank.
    """
    if any(other != by_rank[0] for other in by_rank):
        lines = "\n".join(f"  rank {rank}: {said}" for rank, said in enumerate(by_rank))
        raise CollectiveMismatchError(
            f"the ranks do not call the same collective with data of the same structure and shapes:\n{lines}\n"
            "Make them equal, or say uneven=True (gather) or use pad_across_processes where sizes differ"
        )


def check_agreement(context: Context, call: str, data: Nested = None, *, free_dim: int | None = None) -> None:
    """In debug mode compare what the ranks hand over, by one more exchange. Called on all ranks.

    Raises:
        CollectiveMismatchError: On all ranks, if they differ.
    """
    if not context.settings.debug or context.topology.world_size == 1:
        return
    mine = handed(call, data, free_dim=free_dim)
    by_rank: list[Handed | None] = [None] * context.topology.world_size
    dist.all_gather_object(by_rank, mine, group=context.group)
    compare([said for said in by_rank if said is not None])
