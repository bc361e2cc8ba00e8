"""The links between stages over process groups."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class GroupLinks:
    """Links over process groups: each direction between two stages has its own, in which messages keep their order.

    Args:
        ranks: The rank of the world that holds each stage.
        groups: The group of each pair of a stage that sends and one that receives.
    """

    def __init__(self, ranks: Sequence[int], groups: Mapping[tuple[int, int], ProcessGroup]) -> None:
        self._ranks, self._groups = ranks, groups
        self._own: dict[tuple[int, int, int], Tensor] = {}  # from a stage of this rank to another of it

    def send(self, tensor: Tensor, *, to: int, stage: int, tag: int) -> Callable[[], object]:
        """Begin to send to the stage `to`; see `StageLinks`."""
        if self._ranks[to] == self._ranks[stage]:
            self._own[stage, to, tag] = tensor
            return _nothing
        sent = tensor.contiguous()
        work = dist.isend(sent, self._ranks[to], group=self._groups[stage, to], tag=tag)
        assert work is not None  # this rank is in the group

        def wait() -> object:
            return work.wait(), sent  # which lives as long

        return wait

    def receive(self, like: Tensor, *, source: int, stage: int, tag: int) -> Tensor:
        """Receive from the stage `source`; see `StageLinks`."""
        if self._ranks[source] == self._ranks[stage]:
            return self._own.pop((source, stage, tag))
        received = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        dist.recv(received, self._ranks[source], group=self._groups[source, stage], tag=tag)
        return received


def _nothing() -> None:
    return None
