"""The check before a collective in debug mode: all ranks compare their calls and shapes."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from drivetrain_state.collectives.nested import Nested, leaves_with_paths
from drivetrain_state.context import Context
from drivetrain_state.errors import CollectiveMismatchError
from drivetrain_state.mesh import View


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective's arguments that must be equal on all ranks, and the path, dtype and shape of each leaf."""

    call: str
    leaves: tuple[tuple[str, str, tuple[int, ...]], ...] = ()  # -1 for a size that may differ

    def __str__(self) -> str:
        shown = ", ".join(f"data{path}: {kind} {shape}" for path, kind, shape in self.leaves)
        return f"{self.call} of {shown}" if shown else self.call


def describe_call(call: str, data: Nested, *, free_dim: int | None = None) -> CollectiveCall:
    """Describe a call with `data`; sizes along `free_dim` may differ between ranks."""
    leaves: list[tuple[str, str, tuple[int, ...]]] = []
    for path, leaf in leaves_with_paths(data):
        if isinstance(leaf, torch.Tensor):
            shape = list(leaf.shape)
            if free_dim is not None and -len(shape) <= free_dim < len(shape):
                shape[free_dim] = -1
            leaves.append((path, str(leaf.dtype).removeprefix("torch."), tuple(shape)))
        else:
            leaves.append((path, type(leaf).__name__, ()))
    return CollectiveCall(call, tuple(leaves))


def check_agreement(
    context: Context, call: str, data: Nested = None, *, free_dim: int | None = None, over: View = "world"
) -> None:
    """Compare the calls of a collective over the ranks of a view, by another collective. Called on all ranks.

    Does nothing outside debug mode. CollectiveMismatchError if calls differ; the message shows each rank's call.
    """
    ranks = context.ranks(over)
    if not context.settings.debug or ranks.size == 1:
        return
    mine = describe_call(call, data, free_dim=free_dim)
    by_rank: list[CollectiveCall | None] = [None] * ranks.size
    dist.all_gather_object(by_rank, mine, group=ranks.process_group)
    if any(other != by_rank[0] for other in by_rank):
        lines = "\n".join(f"  rank {rank}: {said}" for rank, said in zip(ranks.ranks, by_rank, strict=True))
        raise CollectiveMismatchError(
            f"the ranks do not call the same collective with data of the same structure and shapes:\n{lines}\n"
            "Make them equal, or say uneven=True (gather) or use pad_across_processes where sizes differ"
        )
