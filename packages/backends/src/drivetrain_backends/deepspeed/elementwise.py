"""A trial of whether an optimizer may step on ZeRO's flat parts, which requires an elementwise step.

ZeRO concatenates the parameters of a group, splits the result among the ranks, and steps each part as one vector; see
`optim.trials`.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.deepspeed.compat import full_shape, num_elements
from drivetrain_backends.errors import EngineConfigError
from drivetrain_backends.optim.trials import (
    SmallTensor,
    UnlikeError,
    UnmovedError,
    check_alike,
    run_eagerly,
    step_copy,
)
from drivetrain_state import Context, OtherRankFailedError
from drivetrain_state.collectives.collective_errors import on_each_rank

_NUM_STEPS = 6  # a Lookahead, for one, acts on every fifth step
# Above 4096 elements, where 8-bit states begin, and 128 rows, where some statistics are factored; below the size at
# which torch uses several threads.
_LONGEST = {1: (4608,), 2: (128, 136), 3: (20, 16, 16), 4: (20, 16, 4, 4)}
_SCALES = (1.0, 30.0, 0.01, 1e3)  # of gradients, so that one's influence on another parameter shows
_SUB_GROUP_ELEMENTS = 10**9  # DeepSpeed's own default
_NUM_RANKS = 2  # among which parts are divided in the trial


def check_elementwise(
    optimizer: Optimizer,
    stage: int,
    *,
    device: torch.device,
    num_parts: int = 1,
    context: Context | None = None,
) -> None:
    """Refuse an optimizer whose step on ZeRO's flat parts differs from its step on full parameters.

    A copy with the same options takes a few steps on small tensors in both layouts, within milliseconds. Its learning
    rate is large enough to move them visibly. The optimizer and the random generators stay unchanged. Stage 3 splits
    each rank's share of a group into `num_parts`. Called on all ranks of `context`, which refuse together.
    """
    if context is None:
        _check(optimizer, stage, device, num_parts)
        return
    try:
        on_each_rank(
            context,
            lambda: _check(optimizer, stage, device, num_parts),
            doing="the preparation of the optimizer",
        )
    except OtherRankFailedError as error:
        raise EngineConfigError(str(error)) from None


def _check(optimizer: Optimizer, stage: int, device: torch.device, num_parts: int) -> None:
    """Refuse an optimizer on this rank, without asking the other ranks."""
    name, raised = type(optimizer).__name__, None
    needed = "ZeRO steps on flat parts, so that an optimizer must treat each element by itself"
    if type(optimizer).__module__.partition(".")[0] == "deepspeed":
        from deepspeed.runtime.zero.utils import is_zero_supported_optimizer

        # By DeepSpeed's list, because deleting a copy of one of its optimizers would end the original.
        if is_zero_supported_optimizer(optimizer) and "muon" not in name.lower():
            return
        what = "DeepSpeed itself does not offer it there"
    else:
        try:
            _try(optimizer, stage, device, num_parts)
        except UnlikeError as error:
            what = (
                f"its step is not elementwise ({error}), and ZeRO steps on flat parts in which parameters lie end to "
                "end, and are cut: other weights than in a plain loop"
            )
        except UnmovedError as error:
            what = (
                f"{needed}; tried on small tensors, it moved {error} in {_NUM_STEPS} steps, which is too little to "
                "tell"
            )
        except Exception as error:  # noqa: BLE001 whatever the optimizer answers with; raised below
            raised = error
            what = f"{needed}; that was tried on small tensors, and failed: {type(error).__name__}: {error}"
        else:
            return
    raise EngineConfigError(
        f"{name} with deepspeed.stage={stage}: {what}. Choose deepspeed.stage=0 or backend='ddp', which keep "
        "parameters whole, or an optimizer that treats each element by itself, such as AdamW or SGD"
    ) from raised


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


def _try(optimizer: Optimizer, stage: int, device: torch.device, num_parts: int) -> None:
    """Step copies of an optimizer in both layouts, in the widest dtype that it supports."""
    shapes = [_shapes_of(group["params"]) for group in optimizer.param_groups]
    on = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=on, device_type=device.type), run_eagerly(), torch.enable_grad():
        try:
            _compare(optimizer, shapes, stage, num_parts, torch.float64, device)
        except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError, KeyError):
            _compare(optimizer, shapes, stage, num_parts, torch.float32, device)


def _shapes_of(parameters: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return two small shapes for each number of dimensions that occurs among a group's parameters."""
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
    smaller = [tuple(min(size, bound) for size, bound in zip(s, (3, 5, 2, 2), strict=False)) for s in found]
    return [*smaller, *found]


def _compare(
    optimizer: Optimizer,
    shapes: Sequence[Sequence[tuple[int, ...]]],
    stage: int,
    num_parts: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Step copies of an optimizer in both layouts, in one dtype."""
    made = torch.Generator().manual_seed(0)
    scales = itertools.cycle(_SCALES)
    small = [[_small(shape, next(scales), dtype, made) for shape in group] for group in shapes]

    def lay_out(values: Sequence[Tensor], *, rank: int | None = None) -> list[Tensor]:
        """Return a group's full tensors, or the parts of a rank: one part, but several parts in stage 3."""
        if rank is None:
            return [value.clone().to(device) for value in values]
        row = torch.cat([value.flatten() for value in values])
        # Parts of odd size; the last is shorter, or they are empty.
        parts = list(row.split(-(-row.numel() // (_NUM_RANKS * num_parts)) | 1)) if row.numel() else []
        parts += [row[:0]] * (_NUM_RANKS * num_parts - len(parts))
        return [part.clone().to(device) for part in parts[rank * num_parts : (rank + 1) * num_parts]]

    full = step_copy(optimizer, small, lay_out, num_steps=_NUM_STEPS, step=lambda copied, _: copied.step())
    by_rank = [
        step_copy(
            optimizer,
            small,
            partial(lay_out, rank=rank),
            num_steps=_NUM_STEPS,
            step=partial(_step_parts, stage=stage),
        )
        for rank in range(_NUM_RANKS)
    ]
    now = [[one for group in groups for one in group] for groups in full]
    joined = [
        torch.cat([part for group in zip(*ranks, strict=True) for own in group for part in own]).split(
            [one.numel() for one in now[0]]
        )
        for ranks in zip(*by_rank, strict=True)
    ]
    check_alike(
        [one.value.to(device) for group in small for one in group],
        now,
        [
            [(one, part.view(one.shape)) for one, part in zip(ones, parts, strict=True)]
            for ones, parts in zip(now, joined, strict=True)
        ],
    )


def _small(shape: tuple[int, ...], scale: float, dtype: torch.dtype, made: torch.Generator) -> SmallTensor:
    """Return a small tensor with random gradients: large ones in the third step, half zeros in the fourth."""
    value = torch.randn(shape, generator=made, dtype=dtype)
    gradients = [torch.randn(shape, generator=made, dtype=dtype) * scale for _ in range(_NUM_STEPS)]
    gradients[2] *= 100
    gradients[3] *= torch.rand(shape, generator=made) < 0.5
    return SmallTensor(value, gradients)


def _step_parts(optimizer: Any, parts: Sequence[Sequence[nn.Parameter]], *, stage: int) -> None:
    """Step one part at a time, like DeepSpeed's stages: with only its group, or with the other groups empty."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    for group, own in zip(groups, parts, strict=True):
        group["params"] = list(own) if stage < 3 else []
    for group, own in zip(groups, parts, strict=True):
        if stage < 3:
            optimizer.param_groups = [group]
            optimizer.step()
            optimizer.param_groups = groups
            continue
        for part in own:
            group["params"] = [part]
            optimizer.step()
            group["params"] = []
