"""The layout of parameters under ZeRO, for a trial of optimizers; see `optim.trials`.

ZeRO concatenates the parameters of a group, splits the result among the ranks, and steps each part as one vector:
this requires an elementwise step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.optim.trials import ParameterLayout, StandIn, check_alike
from drivetrain_deepspeed.compat import full_shape, num_elements
from drivetrain_deepspeed.errors import EngineConfigError
from drivetrain_state import Context, gather_object

# Above 4096 elements, where 8-bit states begin, and 128 rows, where some statistics are factored; below the size at
# which torch uses several threads.
_LONGEST = {1: (4608,), 2: (128, 136), 3: (20, 16, 16), 4: (20, 16, 4, 4)}
_SUB_GROUP_ELEMENTS = 10**9  # DeepSpeed's own default


def check_elementwise(
    optimizer: Optimizer,
    stage: int,
    *,
    device: torch.device,
    num_parts: int = 1,
    context: Context | None = None,
) -> None:
    """Refuse an optimizer whose step on ZeRO's flat parts differs from its step on full parameters.

    The trial takes milliseconds. Stage 3 splits each rank's share of a group into `num_parts`. Called on all ranks of
    `context`, which refuse together.
    """
    verdict = None
    if type(optimizer).__module__.partition(".")[0] == "deepspeed":
        from deepspeed.runtime.zero.utils import is_zero_supported_optimizer

        # By DeepSpeed's list, because deleting a copy of one of its optimizers would end the original.
        is_listed = is_zero_supported_optimizer(optimizer) and "muon" not in type(optimizer).__name__.lower()
        verdict = "" if is_listed else "DeepSpeed itself does not offer it there"
    refused = f"with deepspeed.stage={stage}"
    layout = _FlatParts(device=device, stage=stage, num_parts=num_parts, context=context, refused=refused)
    check_alike(optimizer, layout, verdict=verdict)


def parts_of(config: Mapping[str, Any], optimizer: Optimizer, context: Context) -> dict[str, Any]:
    """Return the device and number of an engine's flat parts per rank, as arguments of `check_elementwise`."""
    zero = config["zero_optimization"]
    on_cpu = zero.get("offload_optimizer", {}).get("device", "none") != "none"
    largest = max(sum(num_elements(p) for p in group["params"]) for group in optimizer.param_groups)
    is_cut = largest > zero.get("sub_group_size", _SUB_GROUP_ELEMENTS) * context.topology.world_size
    return {
        "device": torch.device("cpu") if on_cpu else context.device,
        "num_parts": 2 if is_cut and zero["stage"] == 3 else 1,
        "context": context,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlatParts(ParameterLayout):
    """Parts of each group's concatenated parameters, as of two ranks; several parts for a rank in stage 3."""

    stage: int
    num_parts: int
    context: Context | None
    num_steps: int = 6  # a Lookahead, for one, acts on every fifth step
    num_ranks: int = 2
    widest: torch.dtype | None = torch.float64
    scales: tuple[float, ...] = (1.0, 30.0, 0.01, 1e3)  # so that one's influence on another parameter shows
    unlike: str = "its step is not elementwise"
    advice: str = (
        "ZeRO steps on flat parts, in which parameters lie end to end and are cut, so that an optimizer must treat "
        "each element by itself. Choose deepspeed.stage=0 or backend='ddp', which keep parameters whole, or another "
        "optimizer, such as AdamW or SGD"
    )
    error: type[ValueError] = EngineConfigError

    def stand_ins(self, parameters: Sequence[Tensor]) -> list[StandIn]:
        """Return two small tensors for each number of dimensions among a group's parameters."""
        largest: dict[int, tuple[int, ...]] = {}
        for parameter in parameters:
            shape = tuple(full_shape(parameter))
            bounds = _LONGEST.get(len(shape), (3,) * len(shape))
            cut = [min(size, bound) for size, bound in zip(shape, bounds, strict=True)]
            # In whole blocks: only tensors whose size is a multiple of 256 elements have 8-bit states.
            small = tuple(size - size % 16 if size > 16 else size for size in cut)
            kept = largest.get(len(shape), ())
            largest[len(shape)] = max(kept, small, key=lambda one: torch.Size(one).numel() if one else 0)
        found = [shape for _, shape in sorted(largest.items())]
        smaller = [
            tuple(min(size, bound) for size, bound in zip(s, (3, 5, 2, 2), strict=False)) for s in found
        ]
        return [(shape, torch.float32) for shape in (*smaller, *found)]

    def divide(self, values: Sequence[Tensor], rank: int) -> list[Tensor]:
        """Return a rank's parts, of odd sizes; the last is shorter, or they are empty."""
        row = torch.cat([value.flatten() for value in values])
        num_parts = self.num_ranks * self.num_parts
        parts = list(row.split(-(-row.numel() // num_parts) | 1)) if row.numel() else []
        parts += [row[:0]] * (num_parts - len(parts))
        return [
            part.clone().to(self.device)
            for part in parts[rank * self.num_parts : (rank + 1) * self.num_parts]
        ]

    def step(self, optimizer: Any, parts: Sequence[Sequence[nn.Parameter]]) -> None:
        """Step one part at a time, like DeepSpeed's stages: with only its group, or with the other groups empty."""
        groups: list[dict[str, Any]] = optimizer.param_groups
        for group, own in zip(groups, parts, strict=True):
            group["params"] = list(own) if self.stage < 3 else []
        for group, own in zip(groups, parts, strict=True):
            if self.stage < 3:
                optimizer.param_groups = [group]
                optimizer.step()
                optimizer.param_groups = groups
                continue
            for part in own:
                group["params"] = [part]
                optimizer.step()
                group["params"] = []

    def pair(self, full: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Pair the full tensors with those that the parts of all ranks make."""
        joined = torch.cat([part for own in parts for part in own]).split([one.numel() for one in full])
        return [(one, part.view(one.shape)) for one, part in zip(full, joined, strict=True)]

    def gather(self, told: str) -> list[str]:
        """Gather over all ranks of the run."""
        return [told] if self.context is None else gather_object(self.context, told)
