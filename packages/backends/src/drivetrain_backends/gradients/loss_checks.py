"""Checks that a loss is valid, and that an optimizer steps on its gradients.

If a model or its optimizer is not prepared, its gradients are silently neither averaged nor divided, or are stepped
on inside a window. The graphs of the first losses after each `prepare` are therefore traversed, at about a
millisecond per thousand operations; later losses cost nothing.
"""

import logging
import math
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.errors import PairingError

if TYPE_CHECKING:
    from torch.autograd.graph import Node


logger = logging.getLogger(__name__)

LOSSES_FOLLOWED = 16  # several per step, because two models may train in turns


class TrainedModels(Protocol):
    """The models that are trained with the same loss, and their prepared optimizers."""

    models: tuple[nn.Module, ...]
    optimizers: list[Optimizer]


class FirstLosses:
    """A check of the graphs of the first losses after each `prepare`."""

    def __init__(self) -> None:
        self.num_left = 0  # the number of losses still to check
        self._has_warned = False

    def renew(self) -> None:
        """Check the next losses again, because the prepared objects have changed."""
        self.num_left = LOSSES_FOLLOWED

    def follow(
        self,
        loss: Tensor,
        leaves: Sequence[tuple[TrainedModels, Sequence[Tensor]]],
        *,
        is_stepped: bool = True,
    ) -> None:
        """Refuse a loss whose gradients would not be used, before its backward.

        `leaves` holds each group of prepared models with its leaves. Without `is_stepped`, the program steps itself.
        """
        self.num_left -= 1
        owners = {id(leaf): group for group, own in leaves for leaf in own}
        # Leaves of custom autograd functions are not visible, so leaves other than parameters prove nothing.
        reached = [
            leaf for leaf in graph_leaves(loss) if isinstance(leaf, nn.Parameter) or id(leaf) in owners
        ]
        foreign = [leaf for leaf in reached if id(leaf) not in owners]
        groups = {owners[id(leaf)] for leaf in reached if id(leaf) in owners}
        if foreign and not groups:
            raise PairingError(
                f"backward() of a loss that reaches no prepared model, but {_describe(foreign)} of another: they are "
                "averaged over no ranks. Pass their model to prepare() with its optimizer, or call loss.backward()"
            )
        for group in groups:
            if is_stepped and not group.optimizers:
                names = " and ".join(type(model).__name__ for model in group.models)
                raise PairingError(
                    f"backward() of a loss that trains {names}, of which no prepared optimizer holds a parameter: "
                    "one that is not prepared knows nothing of windows, ranks and shards. Pass it to prepare() with "
                    "its model; or freeze a model that the loss merely passes through, requires_grad_(False)"
                )
        if foreign and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a loss reaches %s of no prepared model: no ranks average their gradients. Prepare the model they "
                "belong to, or freeze it, requires_grad_(False)",
                _describe(foreign),
            )


def graph_leaves(loss: Tensor) -> list[Tensor]:
    """Return the tensors to which a backward of `loss` would add gradients, without duplicates."""
    if loss.grad_fn is None:
        return [loss]
    found: list[Tensor] = []
    seen: set[Node] = {loss.grad_fn}
    ahead: list[Node] = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        after = node.next_functions
        if not after and isinstance(leaf := getattr(node, "variable", None), Tensor):
            found.append(leaf)
        for follower, _ in after:
            if follower is not None and follower not in seen:
                seen.add(follower)
                ahead.append(follower)
    return found


def check_loss(loss: object, count: object) -> None:
    """Refuse an invalid loss or count. Called for every loss, without synchronising with the device."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"backward({loss!r}): a loss is a tensor of shape (), not {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(
            f"backward() of a tensor of shape {tuple(loss.shape)}: a loss is of shape (); take its mean(), or its "
            "sum() with count="
        )
    if not loss.requires_grad:
        raise ValueError(
            "backward() of a loss without a graph: it was detached, computed under torch.no_grad(), or reaches "
            "nothing that is trained"
        )
    if count is not None:
        _check_count(count)


def _check_count(count: object) -> None:
    if isinstance(count, Tensor):
        if count.numel() != 1 or count.is_complex():
            raise ValueError(
                f"count of shape {tuple(count.shape)} and {count.dtype}: it is the number of items that the loss "
                "sums, of shape ()"
            )
        if count.device.type != "cpu":
            return  # reading it would wait for the device
        count = count.item()
    if not isinstance(count, Real):
        raise TypeError(
            f"count={count!r}: it is the number of items that the loss sums, a number or a tensor of shape (), not "
            f"{type(count).__name__}"
        )
    if not 0 <= float(count) < math.inf:
        raise ValueError(
            f"count={count!r}: it is the number of items that the loss sums, finite, and 0 where they were counted "
            "with another loss"
        )


def _describe(parameters: Sequence[Tensor]) -> str:
    first = f"of shape {tuple(parameters[0].shape)}"
    return (
        f"a parameter {first}"
        if len(parameters) == 1
        else f"{len(parameters)} parameters (the first {first})"
    )
