"""Detection of replicas that have drifted apart, by comparing a checksum of each weight across ranks."""

from collections.abc import Container, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from drivetrain_backends.errors import DriftedReplicasError
from drivetrain_backends.modules.compile import strip_wrapper_prefix
from drivetrain_backends.modules.packed_weights import parts_of
from drivetrain_state import Context, gather, reduce
from drivetrain_state.mesh import View
from drivetrain_weights.tensor_box import is_dtensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicatedWeights:
    """The weights that ranks replicate, in the same order on all ranks, with their names for errors.

    Attributes:
        tensors: The weights; empty once `sums` has read them.
        groups: The ranks that replicate the same weights; those of another group hold other parts of them.
    """

    def __init__(
        self, named: Mapping[Tensor, str], device: torch.device, groups: Sequence[Sequence[int]]
    ) -> None:
        self.tensors = tuple(named)
        self.groups = groups
        self._names = tuple(named.values())
        self._device = device
        self._sums: Tensor | None = None

    def device_sums(self) -> Tensor:
        """Return a checksum of each weight, int64 on the device. Must be called before `sums` drops the weights."""
        return torch.stack([checksum(weight).to(self._device) for weight in self.tensors])

    def sums(self) -> Tensor:
        """Return a checksum of each weight, int64 on the host; the first call reads the weights and drops them."""
        if self._sums is None:
            self._sums, self.tensors = self.device_sums().cpu(), ()
        return self._sums

    def explain(self, by_rank: Sequence[Sequence[int]]) -> str:
        """Return the error message: the weights that differ by the sums of each rank, and possible causes."""
        sums = torch.tensor(by_rank)
        first = torch.empty(len(sums), dtype=torch.int64)  # of each rank's group
        for ranks in self.groups:
            first[list(ranks)] = ranks[0]
        others = sums != sums[first]
        drifted: list[int] = others.any(0).nonzero().flatten().tolist()
        odd_ranks: list[int] = others[:, drifted[0]].nonzero().flatten().tolist()
        odd = ", ".join(map(str, odd_ranks))
        more = f", and {len(drifted) - 1} other weights" if len(drifted) > 1 else ""
        return (
            f"the replicas have drifted apart: {self._names[drifted[0]]} differs on ranks {odd} from rank "
            f"{first[odd_ranks[0]]}{more}. "
            "Weights were written on some ranks alone (outside training, or by a forward that writes what its batch "
            "says), or stepped on what ranks had not averaged (as by an optimizer that is not prepared, in a hook of "
            "backward); a checkpoint would hold the weights of some rank. Have all ranks write the same; to go on "
            "from rank 0's weights, on all ranks: `with accelerator.gathered(model, write=True): pass`"
        )

    def refuse(self, told: str) -> NoReturn:
        """Raise the error for replicas that differ, with the message that `explain` returned."""
        raise DriftedReplicasError(told)


def replicas_of(
    context: Context,
    models: Sequence[nn.Module],
    *,
    over: View = "counts",
    without: Container[Tensor] = (),
) -> ReplicatedWeights | None:
    """Return the weights that ranks of a view must hold alike; None for a single rank, or without weights.

    Buffers are left out, because they may differ between ranks, and so are the weights in `without`.
    """
    if context.ranks(over).size == 1:
        return None
    names: dict[Tensor, str] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter not in without:
                names.setdefault(parameter, f"{strip_wrapper_prefix(name)} of {type(model).__name__}")
    return ReplicatedWeights(names, context.device, context.ranks(over).parts) if names else None


def check_replicas(
    context: Context,
    models: Sequence[nn.Module],
    *,
    over: View = "counts",
    without: Container[Tensor] = (),
) -> None:
    """Refuse models whose weights differ across the ranks of a view; see `replicas_of`.

    Called on all ranks; synchronises with the device once, and once more for the error.
    """
    replicas = replicas_of(context, models, over=over, without=without)
    if replicas is None:
        return
    sums = replicas.device_sums()
    largest = reduce(context, torch.cat([sums, -sums]), op="max", over=over)
    assert isinstance(largest, Tensor)
    if torch.equal(largest[: len(sums)], -largest[len(sums) :]):
        return
    own = gather(context, sums[None], over=over)
    assert isinstance(own, Tensor)
    by_rank = own[:1].repeat(context.topology.world_size, 1)  # ranks of other groups are not named
    by_rank[list(context.ranks(over).ranks)] = own
    replicas.refuse(replicas.explain(by_rank.tolist()))


@torch.no_grad()
def checksum(weight: Tensor) -> Tensor:
    """Return the exact sum of the bits of this rank's part of a tensor, in any layout; an int64 of shape ()."""
    weight = weight.to_local() if is_dtensor(weight) else weight.detach()
    if len(parts := parts_of(weight)) > 1:
        return torch.stack([checksum(part) for part in parts]).sum()
    if weight.is_complex():
        weight = torch.view_as_real(weight)
    integer = _INTEGERS[weight.element_size()]
    # Possibly on this rank only; the clone keeps the sum.
    if not weight.is_contiguous() or weight.data_ptr() % 8:
        weight = weight.clone(memory_format=torch.contiguous_format)
    flat = weight.view(-1)
    whole = flat.numel() - flat.numel() % (8 // flat.element_size())
    # Summing eight bytes at a time is ten times as fast as four.
    return flat[:whole].view(torch.int64).sum() + flat[whole:].view(integer).sum(dtype=torch.int64)
