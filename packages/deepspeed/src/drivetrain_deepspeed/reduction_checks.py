"""Checks of the parameters that a window's backwards reach: if ranks differ, DeepSpeed would mix their gradients.

Stages 2 and 3 reduce gradients during backward, in the order in which backward reaches the parameters. The buffers
still hold the values of the last window. Stage 1 reduces the existing gradients when the window closes, in the order
of the parameters.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_backends.compat import as_they_are
from drivetrain_backends.errors import AccumulationError
from drivetrain_deepspeed import compat
from drivetrain_messages import list_some


class ReachedParameters:
    """A check that all ranks reduce the same gradients, and that a step has the gradients of all parameters.

    It runs before each reduction of the engine. `names` holds the trained parameters in the same order on all ranks.
    """

    def __init__(self, engine: Any, names: Mapping[Tensor, str]) -> None:
        self._optimizer = engine.optimizer
        self._device: torch.device = engine.device
        self._names = names
        self._stage = int(engine.zero_optimization_stage())
        self._positions = {id(parameter): index for index, parameter in enumerate(names)}
        # The reached positions, by DeepSpeed's index of the backward in its window.
        self._reached: dict[int, set[int]] = {}
        self._is_last = False  # whether the last reduction of a backward is running
        self._is_offloaded = compat.offloads_gradients(engine)
        self._is_watching = False  # whether reductions run during backward
        if not self._stage:
            return
        self._is_watching = compat.watch_reductions(
            self._optimizer, self._stage, before=self._check_reduction, last=self._reduce_rest
        )

    def check(self) -> None:
        """Refuse a step of a window that did not reach every parameter, or in which a parameter is frozen."""
        if not self._stage:
            return
        with as_they_are():
            frozen = [name for parameter, name in self._names.items() if not parameter.requires_grad]
        if frozen:
            raise AccumulationError(
                f"{list_some(frozen)}: frozen since prepare(), and DeepSpeed's stage {self._stage} would go on "
                "moving it by momentum and weight decay, for it steps all parameters as one vector. Freeze it before "
                "prepare(): free_memory(), requires_grad_(False), prepare() with an optimizer over the others; or "
                "choose stage 0"
            )
        if not self._is_watching:
            return
        reached = list(self._reached.values())
        by_window = [set[int]().union(*reached)]
        # Only the closing backward moves offloaded gradients, and adds them to those of the last window.
        for found in reached if self._is_offloaded else by_window:
            self._refuse_left_out([name for i, name in enumerate(self._names.values()) if i not in found])

    def forget(self) -> None:
        """Begin a new window."""
        self._reached.clear()

    def _reduce_rest(self, reduce: Callable[[], None]) -> None:
        """Run the last reduction of a backward, after its checks; then check what it left out in stage 3.

        Stage 3 (0.19) reduces the other parameters wrongly if one is frozen in a backward. It keeps the last window's
        gradients of parameters that the first backward of this window did not reach: these become zeros.
        """
        self._is_last = True
        try:
            reduce()
        finally:
            self._is_last = False
        if self._stage < 3:
            return
        number = compat.backward_of_window(self._optimizer)
        found = self._reached.get(number, set())
        lacking = {p: name for index, (p, name) in enumerate(self._names.items()) if index not in found}
        if frozen := [name for parameter, name in lacking.items() if not parameter.requires_grad]:
            raise AccumulationError(
                f"{list_some(frozen)}: frozen since prepare(), in a backward of this window: DeepSpeed's stage 3 "
                "expects gradients of all parameters that it was prepared with. Freeze before prepare(), or detach "
                "what is not to be trained in this micro-batch; stages 1 and 2 take it"
            )
        for parameter in lacking if number == 0 else ():
            compat.zero_gradient_of_stage_3(self._optimizer, parameter)

    def _check_reduction(self) -> None:
        """Refuse a reduction if ranks reduce other parameters or in another order. Called on all ranks."""
        if not self._is_watching:
            self._fill_in_zeros()
            return
        waiting = compat.waiting_parameters(self._optimizer, self._stage)
        order = [self._positions[id(parameter)] for parameter in waiting]
        self._reached.setdefault(compat.backward_of_window(self._optimizer), set()).update(order)
        if dist.get_world_size() == 1:
            return
        told = hash((self._is_last, *(sorted(order) if self._stage == 3 else order)))
        extremes = torch.tensor([told, -told], device=self._device)
        dist.all_reduce(extremes, dist.ReduceOp.MIN)
        if int(extremes[0]) == -int(extremes[1]):
            return
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, [self._names[parameter] for parameter in waiting])
        raise AccumulationError(_describe_branches(gathered, self._stage))

    def _fill_in_zeros(self) -> None:
        """Give zero gradients to parameters that only other ranks' backwards reached. Called on all ranks."""
        lacking = compat.parameters_without_gradient(self._optimizer, self._names)
        missing = set(map(id, lacking))
        trained = [p for p in self._names if p.requires_grad]
        reached = torch.tensor(
            [id(p) not in missing for p in trained], dtype=torch.uint8, device=self._device
        )
        if dist.get_world_size() > 1:
            dist.all_reduce(reached, dist.ReduceOp.MAX)
        self._refuse_left_out(
            [self._names[p] for p, has in zip(trained, reached.tolist(), strict=True) if not has]
        )
        compat.fill_gradients(self._optimizer, lacking)

    def _refuse_left_out(self, names: list[str]) -> None:
        """Refuse to step parameters that no rank's backward reached."""
        if names:
            raise AccumulationError(
                f"{list_some(names)}: reached by no loss of this window, on any rank, and DeepSpeed's stage "
                f"{self._stage} would move it all the same, by momentum, weight decay or an earlier gradient. Freeze "
                "before prepare() what is not to be trained, requires_grad_(False); where it is in some steps only, "
                "choose backend='ddp' with ddp.find_unused_parameters"
            )


def _describe_branches(gathered: list[list[str]], stage: int) -> str:
    """Return the error message for ranks that would reduce gradients of different parameters."""
    everywhere = set[str](gathered[0]).intersection(*gathered)
    some = [
        f"rank {rank} has {list_some(odd)}"
        for rank, own in enumerate(gathered)
        if (odd := [n for n in own if n not in everywhere])
    ]
    what = "; ".join(some) if some else "the same parameters in another order"
    return (
        f"backward() reached other parameters on some ranks, or in another order: {what}. DeepSpeed's stage {stage} "
        "reduces gradients as they come, and would add up those of different parameters. Where ranks take different "
        "branches, choose deepspeed.stage=1, in which a parameter without a gradient counts as zero, or "
        "backend='ddp' with ddp.find_unused_parameters"
    )
