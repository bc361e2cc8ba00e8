"""Detection of gradients that hold an infinity or NaN, in one pass and with the same report on every rank.

The accumulation window sets the treatment: "skip" skips the step, "raise" ends the run with an error, "warn" takes it
unchecked, and the `Accelerator`, which sees the losses, warns. The fp16 loss scaler has its own check, and skips
steps that a smaller scale makes finite.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from drivetrain_backends.compat import as_they_are
from drivetrain_backends.errors import NonFiniteGradientError
from drivetrain_backends.gradients.multi_tensor import norms, stored_values
from drivetrain_backends.optim.parameter_matching import parameter_names
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
    found: str | None = None,
) -> NonFiniteGradientError:
    """Return an error on the non-finite gradients and their ranks. Called on all ranks, unless `alone`.

    `gradients` are full gradients or shards, with equal names in equal order on all ranks. `step` counts from 1.
    `found` is a sentence for the message, on the first non-finite value in the model's execution.
    """
    names = list(gradients)
    own = [g is not None and not _all_finite([_local(g)]) for g in gradients.values()]
    said = torch.tensor([[bad_loss, *own]], dtype=torch.uint8, device=context.device)
    table: list[list[int]] = (said if alone else gather(context, said)).tolist()
    ranks = [context.topology.rank] if alone else range(len(table))
    lost = [rank for rank, (is_bad, *_) in zip(ranks, table, strict=True) if is_bad]
    holders = [rank for rank, (_, *flags) in zip(ranks, table, strict=True) if any(flags)]
    bad = [name for name, *flags in zip(names, *(row[1:] for row in table), strict=True) if any(flags)]
    which = f"the gradient of {bad[0] if bad else 'a parameter'} holds an infinity or NaN"
    if len(bad) > 1:
        which = f"the gradients of {_share(bad, names)} hold an infinity or NaN"
    where = f" on {list_ranks(holders)}" if 0 < len(holders) < len(table) else ""
    cause = f"; a loss of {list_ranks(lost)} was not finite" if lost else ""
    layer = found or "precision.watch_underflow names the layer that overflows first"
    return NonFiniteGradientError(
        f"{which}{where} at optimizer step {step}{cause}. Nothing was stepped. "
        f"{layer}; on_nonfinite='skip' leaves such steps out"
    )


@torch.no_grad()
def describe_weights(models: Sequence[nn.Module]) -> str | None:
    """Return how many trained parameters hold an infinity or NaN; None if this rank holds no elements of them.

    Synchronises with the device. Of shards, it tells what this rank holds.
    """
    named = parameter_names({str(i): model for i, model in enumerate(models)})
    with as_they_are():  # the empty parameters of an engine that divides them refuse operations
        trained = {name: p for p, name in named.items() if p.requires_grad}
        held = {name: own for name, p in trained.items() if (own := _local(p)).numel()}
        bad = [name for name, own in held.items() if not _all_finite([own])]
        here = " on this rank" if any(_local(p).numel() < p.numel() for p in trained.values()) else ""
    if not held or not bad:
        return f"The weights{here} are finite still" if held else None
    return f"An infinity or NaN is in {_share(bad, list(held))}{here} already"


def list_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks as text for a message: "rank 0" or "ranks 0, 1"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _share(bad: Sequence[str], names: Sequence[str]) -> str:
    """Return which names are bad: their number, and the first and the last in the model's order."""
    if len(bad) == len(names):
        return f"all {len(names)} parameters"
    span = bad[0] if len(bad) == 1 else f"from {bad[0]} to {bad[-1]}"
    return f"{len(bad)} of {len(names)} parameters ({span})"


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
