"""A trial on tiny parameters: does an optimizer step shards in the same way as full parameters? See `optim.trials`.

Some optimizers get the full parameter through DTensor operations, some raise, and some silently use only a shard.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from drivetrain_backends.fsdp.layout import turn_off_mixed_foreach
from drivetrain_backends.fsdp.plan import is_plain
from drivetrain_backends.optim.trials import (
    Moments,
    SmallTensor,
    UnlikeError,
    UnmovedError,
    check_alike,
    run_eagerly,
    step_copy,
)
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


def check_steps_shards(optimizer: Optimizer, mesh: DeviceMesh) -> None:
    """Refuse an optimizer whose step on shards differs from its step on full parameters. Called on all ranks."""
    if type(optimizer) in _KNOWN:
        return
    tiny = _stand_ins(optimizer, mesh.size(mesh.ndim - 1))
    raised, what = None, "cannot be tried on tiny parameters"
    try:
        with run_eagerly():
            full = _step(optimizer, tiny, mesh, is_divided=False)
            what = "raises on them"
            divided = _step(optimizer, tiny, mesh, is_divided=True)
        what = ""
        start = [one.value.to(mesh.device_type) for group in tiny for one in group]
        now = [one for group in full[-1] for one in group]
        parts = [one for group in divided[-1] for one in group]
        check_alike(start, [now], [[(own_part(a, b), local(b)) for a, b in zip(now, parts, strict=True)]])
    except UnlikeError as error:
        what = f"moves them elsewhere than whole ones ({error})"
    except UnmovedError as error:
        what = f"moves a tiny parameter, {error} in {_NUM_STEPS} steps, too little to tell whether it may"
    except Exception as error:  # noqa: BLE001 whatever DTensor or the optimizer answers with; raised on all ranks below
        raised, first = error, (str(error).splitlines() or [""])[0]
        what = f"{what} ({type(error).__name__}: {first[:120]})"
    flag = torch.tensor([float(not what)], device=mesh.device_type)
    for axis in range(mesh.ndim):  # all ranks agree on the outcome
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=mesh.get_group(axis))
    if flag.item():
        return
    raise ValueError(
        f"{type(optimizer).__name__} cannot step shards: each rank would hold a part of each parameter, and it "
        f"{what or 'fails on another rank'}. A step that looks at a parameter as a whole (a norm, a factored moment, "
        "an orthogonal update) trains under backend='ddp' or 'single'; under fsdp, one that goes element by element "
        "does, such as AdamW, or torchao.optim.AdamW8bit with states in 8 bits. fsdp.check_optimizers=False takes it "
        "as it is"
    ) from raised


def _step(
    optimizer: Optimizer, tiny: list[list[SmallTensor]], mesh: DeviceMesh, *, is_divided: bool
) -> Moments:
    """Return the tiny parameters after the steps of a copy of the optimizer, sharded over a mesh or full."""
    placements: list[Placement] = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]

    def lay_out(values: Sequence[Tensor]) -> list[Tensor]:
        full = [value.to(mesh.device_type).clone() for value in values]
        if not is_divided:
            return full
        return [
            distribute_tensor(one, mesh, placements, src_data_rank=None) if one.dim() else one for one in full
        ]

    def step(copied: Optimizer, parameters: list[list[nn.Parameter]]) -> None:
        del parameters
        for group in copied.param_groups:
            turn_off_mixed_foreach(group)  # as for the real parameters
        copied.step()

    # Both layouts begin with the same random numbers; those of the program are restored.
    kind = mesh.device_type
    here = [] if kind == "cpu" else [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(devices=here, device_type=kind):
        return step_copy(optimizer, tiny, lay_out, num_steps=_NUM_STEPS, step=step)


def _stand_ins(optimizer: Optimizer, num_shards: int) -> list[list[SmallTensor]]:
    """Return each group's tiny parameters: one for each dtype, number of dims and divisibility in the group.

    Another tiny parameter has shards so large that some optimizers keep 8-bit states for them.
    """
    made = torch.Generator().manual_seed(0)
    groups: list[list[SmallTensor]] = []
    for group in optimizer.param_groups:
        kinds: dict[tuple[tuple[int, ...], torch.dtype], None] = {}
        trained = [p for p in group["params"] if p.requires_grad]
        for p in trained:
            # Every rank has at least one row.
            is_uneven = num_shards > 1 and not is_plain(p) and p.shape[0] % num_shards > 0
            rows = 2 * num_shards - is_uneven
            kinds[() if is_plain(p) else (rows, *_SHAPES[min(p.dim(), 4) - 1]), p.dtype] = None
        large = (_LARGE * num_shards, _LARGE)
        kinds |= {(large, p.dtype): None for p in trained if p.numel() >= _LARGE**2 and not is_plain(p)}
        groups.append([_small(shape, dtype, made) for shape, dtype in kinds])
    return groups


def _small(shape: tuple[int, ...], dtype: torch.dtype, made: torch.Generator) -> SmallTensor:
    value = torch.randn(shape, generator=made).to(dtype)
    # Scaled by position, so that the norm of a shard differs from that of the full gradient.
    slope = torch.linspace(0.1, 2.0, max(1, value.numel())).reshape(shape)
    gradients = [(torch.randn(shape, generator=made) * slope).to(dtype) for _ in range(_NUM_STEPS)]
    return SmallTensor(value, gradients)
