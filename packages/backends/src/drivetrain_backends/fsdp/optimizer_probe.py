"""The layout of parameters under FSDP, for a trial of optimizers; see `optim.trials`.

Some optimizers get the full parameter through DTensor operations, some raise, and some silently use only a shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from drivetrain_backends.fsdp.layout import turn_off_mixed_foreach
from drivetrain_backends.fsdp.plan import is_plain
from drivetrain_backends.optim.trials import KNOWN_ELEMENTWISE, ParameterLayout, StandIn, check_alike
from drivetrain_backends.state_dict.dtensor import local, own_part

_SHAPES = ((), (3,), (3, 2), (3, 2, 2))  # after the first dim, which is sharded
# Rows of a shard, and columns: 8-bit states begin at 4096 elements. A shard holds whole blocks, so that what is
# quantised by blocks of up to this many elements has the same blocks on shards as in the full parameter.
_LARGE = 64


def check_steps_shards(optimizer: Optimizer, mesh: DeviceMesh) -> None:
    """Refuse an optimizer whose step on shards differs from its step on full parameters. Called on all ranks."""
    if type(optimizer) not in KNOWN_ELEMENTWISE:
        device = torch.device(mesh.device_type)
        if device.type != "cpu":
            device = torch.device(device.type, torch.accelerator.current_device_index())
        check_alike(optimizer, _Shards(mesh=mesh, device=device))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shards(ParameterLayout):
    """Shards over the last axis of a mesh, replicated along the others."""

    mesh: DeviceMesh
    num_steps: int = 2
    refused: str = "cannot step shards"
    unlike: str = "it moves them elsewhere than whole ones"
    advice: str = (
        "Each rank would hold a part of each parameter: a step that looks at a parameter as a whole (a norm, a "
        "factored moment, an orthogonal update) trains under backend='ddp' or 'single'; under fsdp, one that goes "
        "element by element does, such as AdamW, or torchao.optim.AdamW8bit with states in 8 bits. "
        "fsdp.check_optimizers=False takes it as it is"
    )

    def stand_ins(self, parameters: Sequence[Tensor]) -> list[StandIn]:
        """Return one small tensor for each dtype, number of dims and divisibility in the group.

        Another one has shards so large that some optimizers keep 8-bit states for them.
        """
        num_shards = self.mesh.size(self.mesh.ndim - 1)
        kinds: dict[StandIn, None] = {}
        trained = [p for p in parameters if p.requires_grad]
        for p in trained:
            # Every rank has at least one row.
            is_uneven = num_shards > 1 and not is_plain(p) and p.shape[0] % num_shards > 0
            rows = 2 * num_shards - is_uneven
            kinds[() if is_plain(p) else (rows, *_SHAPES[min(p.dim(), 4) - 1]), p.dtype] = None
        large = (_LARGE * num_shards, _LARGE)
        kinds |= {(large, p.dtype): None for p in trained if p.numel() >= _LARGE**2 and not is_plain(p)}
        return list(kinds)

    def divide(self, values: Sequence[Tensor], rank: int) -> list[Tensor]:
        """Return this rank's shards; scalars stay whole."""
        del rank
        placements: list[Placement] = [*[Replicate()] * (self.mesh.ndim - 1), Shard(0)]
        full = [value.to(self.device).clone() for value in values]
        return [
            distribute_tensor(one, self.mesh, placements, src_data_rank=None) if one.dim() else one
            for one in full
        ]

    def step(self, optimizer: Optimizer, parts: Sequence[Sequence[nn.Parameter]]) -> None:
        """Step with the same options as over the real parameters."""
        del parts
        for group in optimizer.param_groups:
            turn_off_mixed_foreach(group)
        optimizer.step()

    def pair(self, full: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Pair this rank's part of each full tensor with the shard."""
        return [(own_part(one, shard), local(shard)) for one, shard in zip(full, parts[0], strict=True)]

    def gather(self, told: str) -> list[str]:
        """Gather over each axis of the mesh in turn."""
        found = [told]
        for axis in range(self.mesh.ndim):
            each: list[list[str]] = [[]] * self.mesh.size(axis)
            dist.all_gather_object(each, found, group=self.mesh.get_group(axis))
            found = [one for other in each for one in other]
        return found
