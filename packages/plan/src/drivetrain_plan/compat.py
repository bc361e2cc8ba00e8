"""The private names of torch that this package uses, in one place; the same in torch 2.9 to 2.15."""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache, partial
from itertools import count
from math import prod
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map as tree_map

_C10D: Any = dist.distributed_c10d
_NUMBERS = count()  # of meshes of ranks that do not exist
FakeMeshes: TypeAlias = Callable[..., DeviceMesh]


@contextmanager
def fake_meshes() -> Generator[FakeMeshes]:
    """Let this process be the first rank of meshes whose others do not exist: collectives return without data.

    The function that the block gets makes a mesh of axes and their sizes, and returns it again when asked again. The
    groups of the process, if it has any, are left alone.
    """
    with ExitStack() as undo:
        yield cache(partial(_fake_mesh, undo))


def _fake_mesh(undo: ExitStack, **sizes: int) -> DeviceMesh:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=prod(sizes.values()), store=FakeStore())
        undo.callback(dist.destroy_process_group)
    first = dist.get_rank()
    mesh = torch.arange(first, first + prod(sizes.values())).reshape(*sizes.values())
    # Meshes are equal by name and layout, and torch keeps what it has found for one for its equals.
    number = next(_NUMBERS)
    groups: list[Any] = []
    for axis, size in enumerate(sizes.values()):
        ranks = mesh.movedim(axis, 0).reshape(size, -1)[:, 0].tolist()
        name = f"drivetrain_plan.{number}.{axis}"
        group, _ = _C10D._new_process_group_helper(
            size, 0, ranks, "fake", FakeStore(), name, timeout=timedelta(minutes=1)
        )
        # What `new_group` notes of a group; it would also wait for the ranks.
        _C10D._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
        undo.callback(dist.destroy_process_group, group)
        groups.append(group)
    alone = groups[0] if len(groups) == 1 else groups
    return DeviceMesh.from_group(
        alone, "cpu", mesh, mesh_dim_names=tuple(f"{name}_{number}" for name in sizes)
    )
