"""A micro-batch in one call: forward and loss, backward, and the step where the micro-batch closes its window."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from drivetrain_backends.errors import PairingError
from drivetrain_backends.protocol import Prepared, SupportsPieces

StepLoss: TypeAlias = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor | float]]


class TrainStepResult(NamedTuple):
    """The outcome of a `train_step`; `StepResult` explains the other fields."""

    loss: Tensor  # the mean or sum that the function returned, of shape (), detached
    stepped: bool
    skipped: bool
    grad_norm: Tensor | None


def train_step(
    prepared: Prepared,
    batch: Any,
    *,
    loss: StepLoss,
    max_norm: float | None = None,
    model: nn.Module | None = None,
    backward: Callable[..., None] | None = None,
    note: Callable[[Tensor], None] | None = None,
) -> TrainStepResult:
    """Train a model on a micro-batch that has begun, by the calls of the usual loop. Called on all ranks.

    Args:
        prepared: The model, in `no_sync()` unless the micro-batch closes the window.
        batch: The second argument of `loss`.
        loss: A function of the model and the batch. It returns a mean, or a sum with its number of items.
        max_norm: The norm to clip the model's gradients to; None clips nothing.
        model: The first argument of `loss`; `prepared.model` by default.
        backward: The function called with the loss and `count=`; `prepared.backward` by default.
        note: A function called with the loss of a model in pieces, for which `backward` is not called.

    Raises:
        PairingError: The model has no prepared optimizer.
    """
    if not prepared.optimizers:
        raise PairingError(
            f"train_step() of {type(prepared.unwrap()).__name__}: no optimizer was prepared with it; prepare() one"
        )
    model = prepared.model if model is None else model
    if isinstance(prepared, SupportsPieces):
        value = prepared.train_pieces(batch, loss, model)
        if note is not None:
            note(value)
    else:
        found = loss(model, batch)
        value, count = found if isinstance(found, tuple) else (found, None)
        (prepared.backward if backward is None else backward)(value, count=count)
    if max_norm is not None:
        prepared.clip(norm=max_norm)
    stepped, skipped, norm = False, False, None
    for optimizer in prepared.optimizers:
        optimizer.step()
        if (result := optimizer.last_result) is not None:
            stepped, skipped, norm = stepped or result.stepped, skipped or result.skipped, result.grad_norm
    for scheduler in prepared.schedulers:
        scheduler.step()
    for optimizer in prepared.optimizers:
        optimizer.zero_grad()
    return TrainStepResult(value.detach(), stepped, skipped, norm)
