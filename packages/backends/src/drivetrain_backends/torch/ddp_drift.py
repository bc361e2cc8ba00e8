"""Detection of replicas that have drifted apart, by comparing a checksum of each weight across ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from drivetrain_backends.errors import DriftedReplicasError
from drivetrain_backends.modules.compile import strip_wrapper_prefix
from drivetrain_backends.modules.packed_weights import parts_of
from drivetrain_state import Context, gather, reduce

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(context: Context, models: Sequence[nn.Module]) -> None:
    """Refuse models whose weights differ across ranks. Called on all ranks; synchronises with the device once.

    Every rank reads its weights once and sends two numbers per weight. Buffers are not compared, because ranks may
    keep their own.

    Args:
        context: The ranks whose replicas are compared, and their device.
        models: The users' modules, with full weights on every rank.

    Raises:
        DriftedReplicasError: A weight differs; the message names the first one and its ranks.
    """
    if context.topology.world_size == 1:
        return
    names: dict[Tensor, str] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            names.setdefault(parameter, f"{strip_wrapper_prefix(name)} of {type(model).__name__}")
    if not names:
        return
    sums = torch.stack([checksum(weight).to(context.device) for weight in names])
    largest = reduce(context, torch.cat([sums, -sums]), op="max")
    assert isinstance(largest, Tensor)
    if torch.equal(largest[: len(sums)], -largest[len(sums) :]):
        return
    by_rank = gather(context, sums[None])
    assert isinstance(by_rank, Tensor)
    others = (by_rank != by_rank[0]).cpu()
    drifted: list[int] = others.any(0).nonzero().flatten().tolist()
    ranks = ", ".join(map(str, others[:, drifted[0]].nonzero().flatten().tolist()))
    first = list(names.values())[drifted[0]]
    more = f", and {len(drifted) - 1} other weights" if len(drifted) > 1 else ""
    raise DriftedReplicasError(
        f"the replicas have drifted apart: {first} differs on ranks {ranks} from rank 0{more}. Weights were written "
        "on some ranks alone (outside training, or by a forward that writes what its batch says), or stepped on what "
        "ranks had not averaged (as by an optimizer that is not prepared, in a hook of backward); a checkpoint would "
        "hold rank 0's. Have all ranks write the same; to go on from rank 0's weights, on all ranks: "
        "`with accelerator.gathered(model, write=True): pass`"
    )


@torch.no_grad()
def checksum(weight: Tensor) -> Tensor:
    """Return the exact sum of a tensor's bits as integers, independent of its layout; an int64 of shape ()."""
    weight = weight.detach()
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
