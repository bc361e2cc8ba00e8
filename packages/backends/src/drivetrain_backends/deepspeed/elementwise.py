"""A trial of whether an optimizer may step on ZeRO's flat parts, which requires an elementwise step.

ZeRO concatenates the parameters of a group, splits the result among the ranks, and steps each part as one vector. A
norm over a parameter, a statistic over its rows, a block of quantised values or a matrix inverse then covers other
elements than in a plain loop. An optimizer's interface does not tell, so the optimizer is tried on small tensors.
"""

import copy
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.deepspeed.compat import full_shape, num_elements
from drivetrain_backends.errors import EngineConfigError
from drivetrain_backends.optim.trials import copied_over, run_eagerly
from drivetrain_state import Context, OtherRankFailedError
from drivetrain_state.collectives.collective_errors import on_each_rank

_NUM_STEPS = 6  # a Lookahead, for one, acts on every fifth step
# Above 4096 elements, where 8-bit states begin, and 128 rows, where some statistics are factored; below the size at
# which torch uses several threads.
_LONGEST = {1: (4608,), 2: (128, 136), 3: (20, 16, 16), 4: (20, 16, 4, 4)}
_SCALES = (1.0, 30.0, 0.01, 1e3)  # of gradients, so that one's influence on another parameter shows
_SUB_GROUP_ELEMENTS = 10**9  # DeepSpeed's own default
_DTYPES = {  # the allowed difference from rounding, relative to the largest update and to the largest value
    torch.float64: (1e-5, 1e-13),  # with a state in fp32
    torch.float32: (1e-3, 1e-6),
}
_VISIBLE = 30  # the least movement that counts as visible, as a multiple of the rounding of the largest value


class _UnlikeError(Exception):
    """The error for layouts that give different values."""


class _UnmovedError(Exception):
    """The error for a tensor that moves in neither layout."""


def check_elementwise(
    optimizer: Optimizer,
    stage: int,
    *,
    device: torch.device,
    num_parts: int = 1,
    context: Context | None = None,
) -> None:
    """Refuse an optimizer whose step on ZeRO's flat parts differs from its step on full parameters.

    A copy with the same options, at a learning rate that moves visibly, takes a few steps on small tensors in both
    layouts, within milliseconds. Neither the optimizer nor a random generator is changed. Called on all ranks.

    Args:
        optimizer: The user's optimizer, without state.
        stage: The stage of ZeRO, 1 to 3.
        device: The device of the engine's flat parts.
        num_parts: The number of parts into which stage 3 splits a rank's share of a group.
        context: The ranks, which refuse together; None checks this rank alone.

    Raises:
        EngineConfigError: The steps differ, or the trial failed, on this rank or another; the message names
            alternatives.
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
    """Refuse an optimizer on this rank, whatever the others find."""
    name = type(optimizer).__name__
    instead = (
        "Choose deepspeed.stage=0 or backend='ddp', which keep parameters whole, or an optimizer that treats each "
        "element by itself, such as AdamW or SGD"
    )
    if type(optimizer).__module__.partition(".")[0] == "deepspeed":
        _check_own(
            optimizer,
            f"{name} with deepspeed.stage={stage}: DeepSpeed itself does not offer it there. {instead}",
        )
        return
    try:
        _try(optimizer, stage, device, num_parts)
    except _UnlikeError as error:
        raise EngineConfigError(
            f"{name} with deepspeed.stage={stage}: its step is not elementwise ({error}), and ZeRO steps on flat "
            f"parts in which parameters lie end to end, and are cut: other weights than in a plain loop. {instead}"
        ) from None
    except _UnmovedError as error:
        raise EngineConfigError(
            f"{name} with deepspeed.stage={stage}: ZeRO steps on flat parts, so that an optimizer must treat each "
            f"element by itself; tried on small tensors, it moved {error} too little to tell. {instead}"
        ) from None
    except Exception as error:
        raise EngineConfigError(
            f"{name} with deepspeed.stage={stage}: ZeRO steps on flat parts, so that an optimizer must treat each "
            f"element by itself; that was tried on small tensors, and failed: {type(error).__name__}: {error}. "
            f"{instead}"
        ) from error


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


def _check_own(optimizer: Optimizer, message: str) -> None:
    """Check one of DeepSpeed's optimizers by DeepSpeed's list, because deleting a copy would end the original."""
    from deepspeed.runtime.zero.utils import is_zero_supported_optimizer

    if not is_zero_supported_optimizer(optimizer) or "muon" in type(optimizer).__name__.lower():
        raise EngineConfigError(message)


def _try(optimizer: Optimizer, stage: int, device: torch.device, num_parts: int) -> None:
    """Step copies of an optimizer in both layouts, in the widest dtype that it supports."""
    shapes = [_shapes_of(group["params"]) for group in optimizer.param_groups]
    dtypes = iter(_DTYPES)
    on = [] if device.type == "cpu" else [device]
    with (
        torch.random.fork_rng(devices=on, device_type=device.type),
        run_eagerly(),
        torch.enable_grad(),
    ):
        for dtype in dtypes:
            try:
                _compare(optimizer, shapes, stage, num_parts, dtype, device)
            except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError, KeyError):
                if dtype is torch.float32:
                    raise
            else:
                return


def _shapes_of(parameters: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return small shapes with the numbers of dimensions of a group's parameters, two for each number."""
    largest: dict[int, tuple[int, ...]] = {}
    for parameter in parameters:
        shape = tuple(full_shape(parameter))
        bounds = _LONGEST.get(len(shape), (3,) * len(shape))
        # In whole blocks: only tensors whose size is a multiple of 256 elements have 8-bit states.
        small = tuple(_whole_blocks(min(size, bound)) for size, bound in zip(shape, bounds, strict=True))
        kept = largest.get(len(shape), ())
        largest[len(shape)] = max(kept, small, key=lambda one: torch.Size(one).numel() if one else 0)
    found = [shape for _, shape in sorted(largest.items())]
    smaller = [tuple(min(size, bound) for size, bound in zip(s, (3, 5, 2, 2), strict=False)) for s in found]
    return [*smaller, *found]


def _whole_blocks(size: int) -> int:
    return size - size % 16 if size > 16 else size


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
    start = [[torch.randn(shape, generator=made, dtype=dtype) for shape in group] for group in shapes]
    sized = [[next(scales) for _ in group] for group in shapes]
    whole = [[nn.Parameter(value.clone().to(device)) for value in group] for group in start]
    plain = _copied(optimizer, whole)
    num_ranks = 2
    # The parts of each rank, by group: one part, or several in stage 3.
    flat = [torch.cat([value.flatten() for value in group]) for group in start]
    cuts = [_cut(value, num_ranks * num_parts) for value in flat]
    parts = [
        [
            [nn.Parameter(part.clone().to(device)) for part in cut[rank * num_parts : (rank + 1) * num_parts]]
            for cut in cuts
        ]
        for rank in range(num_ranks)
    ]
    ranks = [_copied(optimizer, own) for own in parts]
    moved = [[0.0] * len(group) for group in whole]
    for step in range(_NUM_STEPS):
        before = [[p.detach().clone() for p in group] for group in whole]
        gradients = [
            [_gradient(value, scale, step, made) for value, scale in zip(group, sizes, strict=True)]
            for group, sizes in zip(start, sized, strict=True)
        ]
        _give(whole, gradients)
        plain.step()
        rows = [_cut(torch.cat([g.flatten() for g in group]), num_ranks * num_parts) for group in gradients]
        for rank, (own, stepped) in enumerate(zip(parts, ranks, strict=True)):
            _give(own, [row[rank * num_parts : (rank + 1) * num_parts] for row in rows])
            _step_parts(stepped, own, stage)
        _hold_against(whole, before, parts, dtype)
        moved = [
            [max(most, _distance(p, old)) for most, p, old in zip(*each, strict=True)]
            for each in zip(moved, whole, before, strict=True)
        ]
    _check_moved(whole, moved, dtype)


def _copied(optimizer: Optimizer, parameters: Sequence[Sequence[nn.Parameter]]) -> Any:
    """Return a copy of an optimizer over other parameters: for each of a group the new one at its position."""
    small_parameters = {
        old: own[min(index, len(own) - 1)]
        for group, own in zip(optimizer.param_groups, parameters, strict=True)
        for index, old in enumerate(group["params"])
    }
    state = defaultdict(dict) if type(optimizer.state) is defaultdict else copy.deepcopy(optimizer.state)
    return copied_over(optimizer, parameters, small_parameters, state)


def _gradient(value: Tensor, scale: float, step: int, made: torch.Generator) -> Tensor:
    """Return a random gradient of the given scale; large in the third step, half zeros in the fourth."""
    gradient = torch.randn(value.shape, generator=made, dtype=value.dtype) * scale
    if step == 2:
        gradient *= 100
    if step == 3:
        gradient *= torch.rand(value.shape, generator=made) < 0.5
    return gradient


def _cut(row: Tensor, num_parts: int) -> list[Tensor]:
    """Split a flat tensor into parts of odd size; the last is shorter."""
    size = -(-row.numel() // num_parts) | 1
    parts = list(row.split(size)) if row.numel() else []
    return parts + [row[:0]] * (num_parts - len(parts))


def _give(parameters: Sequence[Sequence[nn.Parameter]], gradients: Sequence[Sequence[Tensor]]) -> None:
    for group, values in zip(parameters, gradients, strict=True):
        for parameter, value in zip(group, values, strict=True):
            parameter.grad = value.clone().to(parameter.device)


def _step_parts(optimizer: Any, parts: Sequence[Sequence[nn.Parameter]], stage: int) -> None:
    """Step like DeepSpeed's stages: one part at a time, its group alone or with the other groups empty."""
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


def _hold_against(
    whole: Sequence[Sequence[Tensor]],
    before: Sequence[Sequence[Tensor]],
    parts: Sequence[Sequence[Sequence[Tensor]]],
    dtype: torch.dtype,
) -> None:
    """Compare the results of the two layouts."""
    of_update, of_value = _DTYPES[dtype]
    for index, group in enumerate(whole):
        row = torch.cat([part.detach() for own in parts for part in own[index]])
        for parameter, earlier, found in zip(group, before[index], _divided(row, group), strict=True):
            now = parameter.detach()
            bound = of_update * (now - earlier).abs().max() + of_value * now.abs().max()
            if not torch.allclose(now, found, rtol=0.0, atol=float(bound.nan_to_num()), equal_nan=True):
                apart = float((now - found).abs().max() / (now - earlier).abs().max())
                raise _UnlikeError(
                    f"tried on a small tensor of shape {tuple(parameter.shape)}, and off by {apart:.0e} of its step"
                )


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the largest movement of an element; a non-finite one counts as unmoved."""
    return float((one.detach() - other).abs().nan_to_num(posinf=0.0).max())


def _check_moved(
    whole: Sequence[Sequence[Tensor]], moved: Sequence[Sequence[float]], dtype: torch.dtype
) -> None:
    """Refuse a trial whose movements are within rounding."""
    _, of_value = _DTYPES[dtype]
    for group, distances in zip(whole, moved, strict=True):
        for parameter, distance in zip(group, distances, strict=True):
            if not distance > _VISIBLE * of_value * float(parameter.detach().abs().max()):
                raise _UnmovedError(
                    f"one of shape {tuple(parameter.shape)} by {distance:.0e} in {_NUM_STEPS} steps, which is"
                )


def _divided(row: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    start = 0
    for tensor in like:
        yield row[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()
