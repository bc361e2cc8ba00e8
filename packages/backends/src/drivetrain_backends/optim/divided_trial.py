"""The layout of parameters whose layers ranks divide, for a trial of optimizers; see `optim.trials`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.optim.trials import KNOWN_ELEMENTWISE, ParameterLayout, StandIn, check_alike
from drivetrain_state import Context, gather_object

_SHAPES = ((), (3,), (3, 2), (3, 2, 2))  # after the first dim, which is divided


def check_steps_parts(optimizer: Optimizer, context: Context, *, num_ranks: int) -> None:
    """Refuse an optimizer whose step on parts of layers differs from its step on whole ones. Called on all ranks."""
    if type(optimizer) not in KNOWN_ELEMENTWISE:
        check_alike(optimizer, _Parts(context=context, device=context.device, num_ranks=num_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts(ParameterLayout):
    """Plain tensors that hold some rows of a whole one."""

    context: Context
    num_steps: int = 2
    refused: str = "cannot step the parts of divided layers"
    unlike: str = "it moves them elsewhere than whole ones"
    advice: str = (
        "Under tensor parallelism each rank steps its part of a weight: a step that looks at a weight as a whole (a "
        "norm, a factored moment, an orthogonal update) trains with data or shard alone; one that goes element by "
        "element, such as AdamW, trains under any product"
    )

    def stand_ins(self, parameters: Sequence[Tensor]) -> list[StandIn]:
        """Return one small tensor for each dtype and number of dims in the group, uneven over the ranks."""
        trained = [p for p in parameters if p.requires_grad]
        rows = 2 * self.num_ranks + 1
        kinds = {
            (() if not p.dim() else (rows, *_SHAPES[min(p.dim(), 4) - 1]), p.dtype): None for p in trained
        }
        return list(kinds)

    def divide(self, values: Sequence[Tensor], rank: int) -> list[Tensor]:
        """Return a rank's rows; scalars stay whole."""
        full = [value.to(self.device).clone() for value in values]
        return [one.tensor_split(self.num_ranks)[rank].clone() if one.dim() else one for one in full]

    def step(self, optimizer: Optimizer, parts: Sequence[Sequence[nn.Parameter]]) -> None:
        """Step with the same options as over the real parameters."""
        del parts
        optimizer.step()

    def pair(self, full: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Pair each whole tensor with the rows of all ranks."""
        by_tensor = zip(*parts, strict=True)
        return [
            (one, torch.cat(rows) if one.dim() else rows[0])
            for one, rows in zip(full, by_tensor, strict=True)
        ]

    def gather(self, told: str) -> Sequence[str]:
        """Gather from the ranks that divide the layers; those that hold other replicas step the same."""
        return gather_object(self.context, told, over="replica")
