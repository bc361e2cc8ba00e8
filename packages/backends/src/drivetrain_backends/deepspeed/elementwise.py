"""Tries whether an optimizer may step on ZeRO's flat parts: whether its step treats each element by itself.

ZeRO lays the parameters of a group end to end, cuts the row where a rank's part ends, and steps each part as one
vector. A norm over a parameter, a statistic over its rows, a block of quantised values or a matrix inverse then
belongs to other elements than in a plain loop. Nothing in an optimizer's interface tells, so that it is tried on
small tensors.
"""

import copy
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.errors import EngineConfigError
from drivetrain_backends.optim.trials import run_eagerly, set_visible_rates
from drivetrain_state import Context

_NUM_STEPS = 6  # a Lookahead, for one, acts on each fifth
# Above the 4096 elements where 8-bit states begin and the 128 rows where some statistics are factored; below what
# torch divides over threads.
_LONGEST = {1: (4608,), 2: (128, 136), 3: (20, 16, 16), 4: (20, 16, 4, 4)}
_SCALES = (1.0, 30.0, 0.01, 1e3)  # of gradients: what one parameter's would do to another's is seen
_SUB_GROUP_ELEMENTS = 10**9  # DeepSpeed's own
_DTYPES = {  # how far two ways to round may be apart: as a part of the largest update, and of the largest value
    torch.float64: (1e-5, 1e-13),  # with a state in fp32
    torch.float32: (1e-3, 1e-6),
}
_VISIBLE = 30  # how often what rounding may do to a value goes into a movement that tells something


class _UnlikeError(Exception):
    """The two layouts gave different values."""


class _UnmovedError(Exception):
    """Neither layout moved something."""


def check_elementwise(
    optimizer: Optimizer,
    stage: int,
    *,
    device: torch.device,
    num_parts: int = 1,
    context: Context | None = None,
) -> None:
    """Refuse an optimizer that would take another step on ZeRO's flat parts than on whole parameters.

    A copy of it, with its options and a learning rate that moves visibly, takes a few steps on small tensors in
    either layout: milliseconds. Neither the optimizer nor a random generator is changed. Called on all ranks.

    Args:
        optimizer: The user's, without state.
        stage: The stage of ZeRO, 1 to 3.
        device: Where the engine keeps its parts.
        num_parts: Into how many parts stage 3 cuts what a rank holds of a group.
        context: This rank among the others, who are refused together; None asks nobody.

    Raises:
        EngineConfigError: It would, or it could not be tried, on this rank or another; the message says what can be
            chosen instead.
    """
    error: EngineConfigError | None = None
    try:
        _check(optimizer, stage, device, num_parts)
    except EngineConfigError as found:
        error = found
    if context is not None and context.group is not None:
        _raise_of_others(error, context)
    if error is not None:
        raise error


def _raise_of_others(error: EngineConfigError | None, context: Context) -> None:
    """Raise another rank's refusal where this one has none. Called on all ranks."""
    said: list[str | None] = [None] * context.topology.world_size
    dist.all_gather_object(said, None if error is None else str(error))
    told = [f"rank {rank}: {one}" for rank, one in enumerate(said) if one is not None]
    if error is None and told:
        raise EngineConfigError(told[0])


def _check(optimizer: Optimizer, stage: int, device: torch.device, num_parts: int) -> None:
    """Refuse an optimizer on this rank."""
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
    """Where an engine keeps its parts, and how many a rank has of a group, as `check_elementwise` takes them.

    Args:
        config: The engine's configuration.
        optimizer: The user's.
        context: Ranks and device.
    """
    zero = config["zero_optimization"]
    on_cpu = zero.get("offload_optimizer", {}).get("device", "none") != "none"
    largest = max(sum(_num_elements(p) for p in group["params"]) for group in optimizer.param_groups)
    is_cut = largest > zero.get("sub_group_size", _SUB_GROUP_ELEMENTS) * context.topology.world_size
    return {
        "device": torch.device("cpu") if on_cpu else context.device,
        "num_parts": 2 if is_cut and zero["stage"] == 3 else 1,
        "context": context,
    }


def _num_elements(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _check_own(optimizer: Optimizer, message: str) -> None:
    """Hold one of DeepSpeed's own against its list; a copy of one would end the original as it goes."""
    from deepspeed.runtime.zero.utils import is_zero_supported_optimizer

    if not is_zero_supported_optimizer(optimizer) or "muon" in type(optimizer).__name__.lower():
        raise EngineConfigError(message)


def _try(optimizer: Optimizer, stage: int, device: torch.device, num_parts: int) -> None:
    """Step copies of an optimizer in both layouts, in the widest dtype that it steps in.

    Raises:
        _UnlikeError: The two layouts gave different values.
        _UnmovedError: They are alike, for something did not move.
    """
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
    """Small shapes with as many dimensions as a group's parameters have, two of each kind."""
    largest: dict[int, tuple[int, ...]] = {}
    for parameter in parameters:
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        bounds = _LONGEST.get(len(shape), (3,) * len(shape))
        # In whole blocks: only tensors that blocks of 256 elements divide have 8-bit states.
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
    # The parts of each rank: by group, one or (stage 3) several.
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
    """A copy of an optimizer, with all that it holds, over other parameters; without its hooks."""
    copied: Any = object.__new__(type(optimizer))
    # A deep copy that meets a parameter of a group takes the new one at its place instead.
    memo: dict[int, Any] = {id(optimizer): copied}
    for group, own in zip(optimizer.param_groups, parameters, strict=True):
        listed = group["params"]
        memo |= {id(old): own[min(index, len(own) - 1)] for index, old in enumerate(listed)}
        memo[id(listed)] = list(own)
        if "param_names" in group:
            memo[id(group["param_names"])] = [str(index) for index in range(len(own))]
    held = dict(vars(optimizer))
    held.pop("step", None)  # a scheduler wraps it, and the wrapper steps the original
    hooks = [name for name in held if name.startswith("_optimizer_") and isinstance(held[name], OrderedDict)]
    for name in hooks:
        memo[id(held[name])] = OrderedDict()
    copied.__dict__.update(copy.deepcopy(held, memo))
    if type(optimizer.state) is defaultdict:
        copied.state = defaultdict(dict)
    set_visible_rates(copied.param_groups)
    return copied


def _gradient(value: Tensor, scale: float, step: int, made: torch.Generator) -> Tensor:
    """A gradient of some scale; in the third step large, in the fourth half of it zeros."""
    gradient = torch.randn(value.shape, generator=made, dtype=value.dtype) * scale
    if step == 2:
        gradient *= 100
    if step == 3:
        gradient *= torch.rand(value.shape, generator=made) < 0.5
    return gradient


def _cut(row: Tensor, num_parts: int) -> list[Tensor]:
    """Cut a row at odd places into parts; the last is shorter."""
    size = -(-row.numel() // num_parts) | 1
    parts = list(row.split(size)) if row.numel() else []
    return parts + [row[:0]] * (num_parts - len(parts))


def _give(parameters: Sequence[Sequence[nn.Parameter]], gradients: Sequence[Sequence[Tensor]]) -> None:
    for group, values in zip(parameters, gradients, strict=True):
        for parameter, value in zip(group, values, strict=True):
            parameter.grad = value.clone().to(parameter.device)


def _step_parts(optimizer: Any, parts: Sequence[Sequence[nn.Parameter]], stage: int) -> None:
    """Step as DeepSpeed's stages do: one part at a time, with its group alone, or with the others empty."""
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
    """Compare the two layouts.

    Raises:
        _UnlikeError: They differ by more than rounding.
    """
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
    """Return how far the element that moved most did; one that is not finite counts as unmoved."""
    return float((one.detach() - other).abs().nan_to_num(posinf=0.0).max())


def _check_moved(
    whole: Sequence[Sequence[Tensor]], moved: Sequence[Sequence[float]], dtype: torch.dtype
) -> None:
    """Refuse a trial whose movements are within rounding.

    Raises:
        _UnmovedError: One of a tensor is, in all steps.
    """
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
