"""The private names of torch's pipelining that this folder uses, the same in torch 2.9 to 2.15.

The functions import them: torch's pipelining loads DTensor and FSDP, which takes a second that runs without stages
do not pay.
"""

from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

_KINDS = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}


def backward_to_input(
    output: Tensor, gradient: Tensor | None, taken: Tensor | None, weights: Iterable[nn.Parameter]
) -> Any:
    """Run the part of a backward that leads to the input of a stage; return what the part of the weights needs."""
    from torch.distributed.pipelining._backward import stage_backward_input

    inputs = [] if taken is None else [taken]
    return stage_backward_input((output,), None if gradient is None else [gradient], inputs, iter(weights))[1]


def backward_to_weights(weights: Iterable[nn.Parameter], rest: Any) -> None:
    """Run the other part of a backward, which adds to the gradients of the weights."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    held: Iterator[nn.Parameter] = iter(weights)
    stage_backward_weight(held, rest)


def pipeline_order(
    name: str, num_ranks: int, ranks: Sequence[int], num_pieces: int
) -> list[list[tuple[Any, int, int]]]:
    """Return the order of a schedule of torch, for each rank: the kind of an action, its stage and its piece.

    Raises:
        ValueError: The schedule does not take so many pieces.
    """
    from torch.distributed.pipelining import schedules

    stages = [_stage(index, num_ranks, len(ranks)) for index, rank in enumerate(ranks) if rank == 0]
    schedule: Any = getattr(schedules, name)(stages, num_pieces, loss_fn=_stage)  # which is never called
    found: list[list[tuple[Any, int, int]]] = []
    for rank in range(num_ranks):
        listed: list[tuple[Any, int, int]] = []
        for action in filter(None, schedule.pipeline_order[rank]):
            parts = getattr(action, "sub_actions", None) or (action,)  # which torch may overlap
            listed += [
                (_KINDS[one.computation_type.value], one.stage_index, one.microbatch_index) for one in parts
            ]
        found.append(listed)
    return found


def _stage(index: int, num_ranks: int, num_stages: int) -> SimpleNamespace:
    """Return what schedules ask of a stage to make their order."""
    return SimpleNamespace(
        stage_index=index, is_first=index == 0, is_last=index == num_stages - 1, num_stages=num_stages,
        group_rank=0, group_size=num_ranks, submod=nn.Identity(), has_backward=True, device=torch.device("cpu"),
    )  # fmt: skip
