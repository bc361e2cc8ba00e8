"""A trial of whether an optimizer steps shards as it would step full parameters.

Torch computes an elementwise step on each rank's shard. Norms, factored moments and orthogonal updates need the full
parameter: some optimizers get it through DTensor operations, some raise, and some silently use only a shard. A copy
of the optimizer therefore steps tiny parameters, sharded and full, and both must move alike, at a learning rate that
moves them visibly, because a warm-up may begin at 0.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from drivetrain_backends.fsdp.plan import is_plain
from drivetrain_backends.optim.trials import copied_over, run_eagerly
from drivetrain_backends.state_dict.dtensor import local, own_part

# Elementwise, as a test checks; exactly these classes, because a subclass may do more.
_KNOWN = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.NAdam,
        optim.RAdam,
        optim.Adamax,
        optim.Adagrad,
        optim.Adadelta,
        optim.RMSprop,
        optim.Rprop,
        optim.ASGD,
    }
)
_SHAPES = ((), (3,), (3, 2), (3, 2, 2))  # after the first dim, which is sharded
# Rows of a shard, and columns: 8-bit states begin at 4096 elements. A shard holds whole blocks, so that what is
# quantised by blocks of up to this many elements has the same blocks on shards as in the full parameter.
_LARGE = 64
_NUM_STEPS = 2
# The allowed difference from rounding, relative to the movement and to the largest value; and the least movement
# that counts as visible, as a multiple of the rounding of the largest value.
_LIMITS = {
    torch.float32: (1e-3, 1e-6, 30),
    torch.float16: (2e-2, 2e-3, 4),
    torch.bfloat16: (2e-2, 1.6e-2, 4),
}


class _Tiny:
    """A tiny parameter in place of real ones: its value, and its gradient for each step."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> None:
        self.value = torch.randn(shape, generator=generator).to(dtype)
        # Scaled by position, so that the norm of a shard differs from that of the full gradient.
        slope = torch.linspace(0.1, 2.0, max(1, self.value.numel())).reshape(shape)
        self.gradients = [
            (torch.randn(shape, generator=generator) * slope).to(dtype) for _ in range(_NUM_STEPS)
        ]


def check_steps_shards(optimizer: Optimizer, mesh: DeviceMesh) -> None:
    """Refuse an optimizer whose step on shards differs from its step on full parameters. Called on all ranks."""
    if type(optimizer) in _KNOWN:
        return
    tiny = _stand_ins(optimizer, mesh.size(mesh.ndim - 1))
    raised, whole = None, list[Tensor]()
    what = "cannot be tried on tiny parameters"
    try:
        with run_eagerly():
            with _same_random_numbers(mesh):
                whole = _stepped(optimizer, tiny, mesh, is_divided=False)
            what = "raises on them"
            with _same_random_numbers(mesh):
                divided = _stepped(optimizer, tiny, mesh, is_divided=True)
        start = [one.value.to(mesh.device_type) for group in tiny for one in group]
        what = _difference(start, whole, divided)
        alike = not what
    except Exception as error:  # noqa: BLE001 whatever DTensor or the optimizer answers with; raised on all ranks below
        alike, raised = False, error
    if _all_agree(alike, mesh):
        return
    what = what or "fails on another rank"
    if raised is not None:
        what = f"{what} ({_first_line(raised)})"
    raise ValueError(_refusal(optimizer, what)) from raised


def _same_random_numbers(mesh: DeviceMesh) -> AbstractContextManager[None]:
    """Run the block with the random states of CPU and device, and restore them at its end."""
    kind = mesh.device_type
    here = [] if kind == "cpu" else [torch.accelerator.current_device_index()]
    return torch.random.fork_rng(devices=here, device_type=kind)


def _all_agree(alike: bool, mesh: DeviceMesh) -> bool:
    """Return whether `alike` is true on all ranks. Called on all ranks."""
    flag = torch.tensor([float(alike)], device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=mesh.get_group(axis))
    return bool(flag.item())


def _stand_ins(optimizer: Optimizer, num_shards: int) -> list[list[_Tiny]]:
    """Return tiny parameters for each group: one for each dtype, number of dims and divisibility of its parameters.

    There is also one whose shards are as large as tensors with 8-bit states in some optimizers.
    """
    generator = torch.Generator().manual_seed(0)
    groups: list[list[_Tiny]] = []
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.requires_grad]
        kinds = dict.fromkeys(_kind(p, num_shards) for p in trained)
        large = (_LARGE * num_shards, _LARGE)
        kinds |= dict.fromkeys(
            (large, p.dtype) for p in trained if p.numel() >= _LARGE**2 and not is_plain(p)
        )
        groups.append([_Tiny(shape, dtype, generator) for shape, dtype in kinds])
    return groups


def _kind(parameter: Tensor, num_shards: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and dtype of a parameter's tiny counterpart; every rank has at least one row of it."""
    if is_plain(parameter):
        return (), parameter.dtype
    is_uneven = num_shards > 1 and parameter.shape[0] % num_shards > 0
    return (2 * num_shards - is_uneven, *_SHAPES[min(parameter.dim(), 4) - 1]), parameter.dtype


def _stepped(
    optimizer: Optimizer, tiny: Sequence[Sequence[_Tiny]], mesh: DeviceMesh, *, is_divided: bool
) -> list[Tensor]:
    """Return the tiny parameters after the steps of a copy of the optimizer, sharded over a mesh or full."""

    def laid_out(value: Tensor) -> Tensor:
        value = value.to(mesh.device_type).clone()
        if not is_divided or value.dim() == 0:
            return value
        placements: list[Placement] = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        return distribute_tensor(value, mesh, placements, src_data_rank=None)

    groups = [[nn.Parameter(laid_out(one.value)) for one in group] for group in tiny]
    copied = _copied(optimizer, groups)
    for step in range(_NUM_STEPS):
        for group, ones in zip(groups, tiny, strict=True):
            for parameter, one in zip(group, ones, strict=True):
                parameter.grad = laid_out(one.gradients[step])
        type(copied).step(copied)
    return [parameter.detach() for group in groups for parameter in group]


def _copied(optimizer: Optimizer, groups: Sequence[list[nn.Parameter]]) -> Optimizer:
    """Return a copy of an optimizer over tiny parameters: for each of a group one with as many dims."""
    small_parameters: dict[Tensor, nn.Parameter] = {}
    for group, tiny in zip(optimizer.param_groups, groups, strict=True):
        for parameter in group["params"]:
            same = [t for t in tiny if t.dim() == min(parameter.dim(), 4)]
            small_parameters[parameter] = (same or tiny or [parameter])[0]
    copied = copied_over(
        optimizer, groups, small_parameters, defaultdict(dict, _state(optimizer, small_parameters))
    )
    for group, tiny in zip(copied.param_groups, groups, strict=True):
        kinds = {isinstance(p, DTensor) for p in tiny}
        if len(kinds) > 1 and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = False  # as for the real parameters
    return copied


def _state(
    optimizer: Optimizer, small_parameters: Mapping[Tensor, Tensor]
) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield the state that an optimizer creates before its first step, in the shapes of the tiny parameters."""
    for parameter, state in optimizer.state.items():
        tiny = small_parameters.get(parameter)
        if tiny is None:
            continue
        yield (
            tiny,
            {
                key: torch.zeros_like(tiny)
                if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape
                else deepcopy(value)
                for key, value in cast("dict[str, Any]", state).items()
            },
        )


def _difference(start: Sequence[Tensor], whole: Sequence[Tensor], divided: Sequence[Tensor]) -> str:
    """Return how the steps on shards and full parameters differ, or that both move too little; empty if alike."""
    for earlier, now, part in zip(start, whole, divided, strict=True):
        of_update, of_value, visible = _LIMITS.get(now.dtype, _LIMITS[torch.float32])
        moved = float((now - earlier).abs().nan_to_num(posinf=0.0).max())
        rounding = of_value * float(now.abs().nan_to_num(posinf=0.0).max())
        own, found = own_part(now, part), local(part)
        bound = of_update * moved + rounding
        if not torch.allclose(found, own, rtol=0.0, atol=bound, equal_nan=True):
            off = float((found - own).abs().max())
            return f"moves them elsewhere than whole ones, by {off:.1e} in {_NUM_STEPS} steps of {moved:.1e} together"
        if not moved > visible * rounding:
            return f"moves a tiny one by {moved:.1e} in {_NUM_STEPS} steps, too little to tell whether it may"
    return ""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def _refusal(optimizer: Optimizer, what: str) -> str:
    return (
        f"{type(optimizer).__name__} cannot step shards: each rank would hold a part of each parameter, and it "
        f"{what}. A step that looks at a parameter as a whole (a norm, a factored moment, an orthogonal update) "
        "trains under backend='ddp' or 'single'; under fsdp, one that goes element by element does, such as AdamW, "
        "or torchao.optim.AdamW8bit with states in 8 bits. "
        "fsdp.check_optimizers=False takes it as it is"
    )
