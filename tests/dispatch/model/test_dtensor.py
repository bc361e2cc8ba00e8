from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dispatch.models import RunRanks
from drivetrain_dispatch import init_empty_weights
from drivetrain_dispatch.loading.load_checkpoint import load_checkpoint_in_model
from drivetrain_weights import box_of_dtensor


def build() -> nn.Sequential:
    """Of sizes that two do not divide."""
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.Linear(3, 1))


def load_divided(folder: str, real: bool, dtype: torch.dtype | None) -> list[object]:
    """Load into what `fully_shard` divided; whether parameters stayed, what a forward and two steps give."""
    mesh = init_device_mesh("cpu", (2,))
    with init_empty_weights():
        model = build()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if real:
        model.to_empty(device="cpu")
    before = list(model.parameters())
    told: list[tuple[int, int]] = []
    load_checkpoint_in_model(model, folder, dtype=dtype, progress=lambda *both: told.append(both))
    assert told[-1][0] == told[-1][1]  # all that this rank reads, not the whole
    stayed = all(own is other for own, other in zip(model.parameters(), before, strict=True))
    found = {name: value.full_tensor() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.arange(10.0).view(2, 5).to(dtype or torch.float32)
    for _ in range(2):
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [stayed, found, model(inputs).detach()]


@pytest.mark.parametrize(("real", "dtype"), [(False, None), (True, None), (False, torch.float64)])
def test_each_rank_reads_its_part_of_what_fully_shard_divided(
    run_ranks: RunRanks, tmp_path: Path, real: bool, dtype: torch.dtype | None
) -> None:
    model = build()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    if dtype is not None:
        model.to(dtype)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = torch.arange(10.0).view(2, 5).to(dtype or torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for stayed, found, output in run_ranks(load_divided, str(tmp_path), real, dtype):
        assert stayed == real
        assert all(torch.equal(found[name], value) for name, value in values.items())
        torch.testing.assert_close(output, model(inputs))


def load_boxes(folder: str, values: dict[str, Tensor], pickled: bool) -> list[bool]:
    """Load tensors that are divided in other ways."""
    meshes = {1: init_device_mesh("cpu", (2,)), 2: init_device_mesh("cpu", (1, 2))}
    ways = {
        "rows": (1, [Shard(0)]), "columns": (1, [Shard(1)]), "deep": (1, [Shard(2)]), "whole": (1, [Replicate()]),
        "both": (2, [Shard(0), Shard(0)]), "mixed": (2, [Replicate(), Shard(1)]), "one": (1, [Replicate()]),
    }  # fmt: skip
    model = nn.Module()
    for name, (dims, placements) in ways.items():
        empty = torch.empty_like(values[name], device="meta")
        divided = distribute_tensor(empty, meshes[dims], placements)
        model.register_parameter(name, nn.Parameter(divided))
    load_checkpoint_in_model(model, folder)
    found = dict(model.named_parameters())
    assert all(
        isinstance(value, DTensor) and value.placements == tuple(ways[name][1])
        for name, value in found.items()
    )
    return [torch.equal(found[name].full_tensor(), value) for name, value in values.items()]


@pytest.mark.parametrize("pickled", [False, True])
def test_parts_of_every_kind(run_ranks: RunRanks, tmp_path: Path, pickled: bool) -> None:
    names = ("rows", "columns", "deep", "whole", "both", "mixed")
    values = {name: torch.rand(5, 4, 3).transpose(0, 1) for name in names} | {"one": torch.rand(())}
    if pickled:
        torch.save(values, tmp_path / "pytorch_model.bin")
    else:
        save_file(
            {name: value.contiguous() for name, value in values.items()}, tmp_path / "model.safetensors"
        )
    assert run_ranks(load_boxes, str(tmp_path), values, pickled) == [[True] * 7] * 2


def refuse(folder: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.empty(4, device="meta"), mesh, [Shard(0)]))
    said: list[str] = []
    for arguments in ({"device_map": {"": "cpu"}}, {"read_by": "rank 0"}):
        try:
            load_checkpoint_in_model(model, folder, **arguments)
        except ValueError as error:
            said.append(str(error))
    try:
        box_of_dtensor(DTensor.from_local(torch.ones(2), mesh, [Partial()]), name="'weight'")
    except ValueError as error:
        said.append(str(error))
    dist.barrier()
    return said


def test_what_divided_tensors_cannot_is_told(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_file({"weight": torch.ones(4)}, tmp_path / "model.safetensors")
    for map_given, read_given, partial in run_ranks(refuse, str(tmp_path)):
        assert map_given == read_given
        assert "weight 'weight' is sharded: each rank loads its own shard in place; leave out" in map_given
        assert partial.startswith("'weight' of shape (2,) is placed as")
        assert "redistribute() it to Shard or Replicate" in partial
