"""Detection of gradients that hold an infinity or NaN, in one pass and with the same report on every rank.

The accumulation window sets the treatment: "ignore" does not check, "skip" skips the step, "raise" ends the run with
an error. The fp16 loss scaler has its own check, and skips steps that a smaller scale makes finite.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from drivetrain_backends.errors import NonFiniteGradientError
from drivetrain_backends.gradients.multi_tensor import norms, stored_values
from drivetrain_state import Context, gather, reduce


def holds_nonfinite(context: Context, gradients: Sequence[Tensor]) -> bool:
    """Return whether a gradient is not finite. Called on all ranks; synchronises with the device.

    Full gradients that are averaged over ranks are the same everywhere, so each rank decides alone. Where ranks hold
    parts of a model (DTensors, or layers that a mesh divides), they agree by an all-reduce of one number.
    """
    found = not _all_finite([_local(gradient) for gradient in gradients])
    if context.ranks("replica").size > 1 or any(hasattr(gradient, "to_local") for gradient in gradients):
        return bool(reduce(context, torch.tensor(float(found), device=context.device), op="max").item())
    return found


def nonfinite_error(
    context: Context,
    gradients: Mapping[str, Tensor | None],
    *,
    step: int,
    bad_loss: bool = False,
    alone: bool = False,
    layer: str | None = None,
) -> NonFiniteGradientError:
    """Return an error that names the first non-finite gradient and its ranks. Called on all ranks, unless `alone`.

    `gradients` are full gradients or shards, with equal names in equal order on all ranks. `step` counts from 1.
    `layer` is a clause for the message: it names the first non-finite value in the model's execution, if known.
    """
    names = list(gradients)
    own = next(
        (i for i, g in enumerate(gradients.values()) if g is not None and not _all_finite([_local(g)])),
        len(names),
    )
    rank = context.topology.rank
    said = torch.tensor([rank, own, bad_loss], device=context.device)
    table: list[list[int]] = (said[None] if alone else gather(context, said[None])).tolist()
    first = min(index for _, index, _ in table)
    holders = [rank for rank, index, _ in table if index == first]
    lost = [rank for rank, _, is_bad in table if is_bad]
    where = "" if len(holders) == len(table) else f" on {list_ranks(holders)}"
    cause = f"; a loss of {list_ranks(lost)} was not finite" if lost else ""
    which = f"of {names[first]}" if first < len(names) else "of a parameter"
    if layer is None:
        found = "precision.watch_underflow names the layer that overflows first"
    else:
        found = f"The first value that was not finite is {layer}"
    return NonFiniteGradientError(
        f"the gradient {which} holds an infinity or NaN{where} at optimizer step {step}{cause}. Nothing was stepped. "
        f"{found}; nonfinite_gradients='skip' leaves such steps out"
    )


def list_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks as text for a message: "rank 0" or "ranks 0, 1"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _all_finite(parts: Sequence[Tensor]) -> bool:
    by_place: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for part in parts:
        if part.numel():
            by_place.setdefault((part.device, part.dtype), []).append(part)
    # A sum keeps a NaN on every device, and the largest magnitude does not on XLA; of finite ones it may overflow.
    sums = [torch.stack(norms(group, 2.0)) for group in by_place.values()]
    return all(each.isfinite().all().item() for each in sums) or all(
        torch.stack([part.isfinite().all() for part in group]).all().item() for group in by_place.values()
    )


def _local(gradient: Tensor) -> Tensor:
    """Return the elements of a gradient that this rank holds."""
    if hasattr(gradient, "to_local"):  # a DTensor; importing its class takes as long as importing torch
        gradient = cast("Any", gradient).to_local()
    return stored_values(gradient)
