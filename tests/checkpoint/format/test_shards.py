from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from checkpoint.saves import save
from drivetrain_checkpoint import (
    Checkpointer,
    HeldBoxes,
    HeldRange,
    Proportional,
    Replicated,
    StateError,
    read_manifest,
)
from drivetrain_checkpoint.format.shards import make_target, shards_of
from drivetrain_state import Context, connect
from drivetrain_weights.tensor_box import Box, whole

WHOLE = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)


def placed(context: Context, *placements: Shard | Replicate, shape: tuple[int, ...] | None = None) -> DTensor:
    mesh = init_device_mesh("cpu", shape or (context.topology.world_size,))
    return distribute_tensor(WHOLE.clone(), mesh, list(placements))


def run_of(tensor: torch.Tensor, rank: int, world_size: int) -> HeldRange:
    """What a rank holds where a flattened tensor is cut into parts of one size, the last one shorter."""
    size = -(-tensor.numel() // world_size)
    start = min(rank * size, tensor.numel())
    return HeldRange(tensor.shape, start, tensor.flatten()[start : start + size].clone())


def boxes_of(tensor: torch.Tensor, rank: int, world_size: int) -> HeldBoxes:
    """What a rank holds where the rows are two pieces, of 4 and 3, and each rank has some rows of both."""
    found: list[tuple[Box, torch.Tensor]] = []
    for start, stop in ((0, 4), (4, 7)):
        first, last = (start + (stop - start) * each // world_size for each in (rank, rank + 1))
        found.append((Box((first, 0), (last - first, 5)), tensor[first:last].clone()))
    return HeldBoxes(tensor.shape, tensor.dtype, tuple(found))


def save_in_parts(directory: str) -> list[str]:
    """Save one tensor divided in every way; the names of the files."""
    with connect(device="cpu") as context:
        rank, world_size = context.topology.rank, context.topology.world_size
        state = {
            "rows": placed(context, Shard(0)),
            "columns": placed(context, Shard(1)),
            "same": placed(context, Replicate()),
            "run": run_of(WHOLE, rank, world_size),
            "boxes": boxes_of(WHOLE, rank, world_size),
            "replica": Replicated(WHOLE.clone()),
            "plain": WHOLE if rank == 0 else torch.zeros(7, 5),
            "empty": placed(context, Shard(0))[:0],
        }
        if world_size == 4:
            state["both"] = placed(context, Shard(0), Shard(1), shape=(2, 2))
            state["hybrid"] = placed(context, Replicate(), Shard(0), shape=(2, 2))
        state["tied"] = state["rows"]
        path = save(Checkpointer(context, directory), 1, state)
        return sorted(file.name for file in path.iterdir())


def load_whole(directory: str) -> list[str]:
    with connect(device="cpu") as context:
        model = Checkpointer(context, directory).load().models["model"]
        assert model["rows"] is model["tied"]
        assert model.pop("empty").shape == (0, 5)
        for name, tensor in model.items():
            assert torch.equal(tensor, WHOLE), name
        return sorted(model)


def load_in_parts(directory: str) -> list[int]:
    """Load each tensor divided in another way than it was saved; how many elements this rank holds of each."""
    with connect(device="cpu") as context:
        rank, world_size = context.topology.rank, context.topology.world_size
        like = {
            "rows": placed(context, Shard(1)),
            "columns": placed(context, Shard(0)),
            "run": placed(context, Shard(0)),
            "plain": run_of(torch.zeros(7, 5), rank, world_size),
            "same": run_of(torch.zeros(7, 5), rank, world_size),
            "replica": placed(context, Shard(1)),
            "boxes": boxes_of(torch.zeros(7, 5), rank, world_size),
        }
        loaded = Checkpointer(context, directory).load(
            like=lambda name: like.get(name.removeprefix("models/model/"))
        )
        model = loaded.models["model"]
        sizes: list[int] = []
        for name, division in like.items():
            tensor = model[name]
            if isinstance(division, DTensor):
                assert isinstance(tensor, DTensor)
                assert (tensor.placements, tensor.device_mesh) == (division.placements, division.device_mesh)
                sizes.append(tensor.to_local().numel())
                assert torch.equal(tensor.full_tensor(), WHOLE), name
            elif isinstance(division, HeldBoxes):
                expected = boxes_of(WHOLE, rank, world_size).boxes
                assert [box for box, _ in tensor.boxes] == [box for box, _ in expected]
                assert all(
                    torch.equal(one, held) for (_, one), (_, held) in zip(tensor.boxes, expected, strict=True)
                )
                sizes.append(sum(box.num_elements for box, _ in tensor.boxes))
            else:
                expected = run_of(WHOLE, rank, world_size)
                assert tensor.start == expected.start
                assert torch.equal(tensor.elements, expected.elements), name
                sizes.append(tensor.elements.numel())
        return sizes


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.default_cases("4")
def test_tensors_in_parts_are_saved_and_loaded_whole_and_in_other_parts(
    run_ranks, tmp_path: Path, context: Context, world_size: int
) -> None:
    [files, *_] = run_ranks(save_in_parts, str(tmp_path), num_processes=world_size)
    assert [name for name in files if name.startswith("weights-model.r")] == [
        f"weights-model.r{rank}.safetensors" for rank in range(world_size)
    ]
    expected = {"rows", "columns", "same", "run", "boxes", "replica", "plain", "tied"}
    if world_size == 4:
        expected |= {"both", "hybrid"}
    for readers in (1, 2, 4):
        assert run_ranks(load_whole, str(tmp_path), num_processes=readers) == [sorted(expected)] * readers
    for readers in (2, 4):
        sizes = run_ranks(load_in_parts, str(tmp_path), num_processes=readers)
        assert [sum(parts) for parts in zip(*sizes, strict=True)] == [WHOLE.numel()] * 7


def test_each_element_is_in_one_file(run_ranks, tmp_path: Path) -> None:
    run_ranks(save_in_parts, str(tmp_path), num_processes=2)
    stored = read_manifest(tmp_path / "step-1").tensors["weights-model"]
    same = [box for boxes in stored["same"].boxes.values() for box in boxes]
    assert sum(box.num_elements for box in same) == WHOLE.numel()
    assert list(stored["plain"].boxes) == [0]
    rows = {rank: [box.offsets for box in boxes] for rank, boxes in stored["rows"].boxes.items()}
    assert rows == {0: [(0, 0)], 1: [(4, 0)]}


def refuse(directory: str) -> str:
    with connect(device="cpu") as context:
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(WHOLE, mesh, [Partial()])
        with pytest.raises((StateError, RuntimeError)) as caught:
            save(Checkpointer(context, directory), 1, {"x": partial})
        return str(caught.value)


def test_a_sum_that_was_not_taken_is_refused(run_ranks, tmp_path: Path) -> None:
    assert all("gives no rank a box" in said for said in run_ranks(refuse, str(tmp_path), num_processes=2))
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_another_shape_counts_for_nothing() -> None:
    target = make_target(whole((3, 2)), torch.float32, HeldRange(torch.Size((4,)), 0, torch.zeros(2)))
    assert isinstance(target.value, torch.Tensor)
    assert target.value.shape == (3, 2)


def test_a_plain_tensor_is_rank_zeros() -> None:
    assert shards_of(WHOLE, is_main=False) == ()
    assert len(shards_of(Replicated(WHOLE), is_main=False)) == 1


def scales_of_a_quarter(directory: str) -> list[list[float]]:
    """Load of 28 scales, one for each 4 elements of another tensor, those of some of its elements."""
    with connect(device="cpu") as context:
        found: list[list[float]] = []
        for start, stop in ((0, 56), (56, 112), (2, 6), (7, 8), (60, 60)):
            like = Proportional(start=start, stop=stop, of=112)
            loaded = Checkpointer(context, directory).load(like=lambda name, like=like: like)
            part = loaded.models["model"]["scales"]
            assert part.shape == (28,)
            first, elements = part.flat_range()
            assert torch.equal(elements, torch.arange(28.0)[first : first + elements.numel()])
            found.append(elements.tolist())
        return found


def test_what_belongs_to_a_range_of_another_tensor_is_read_alone(tmp_path: Path) -> None:
    with connect(device="cpu") as context:
        save(Checkpointer(context, tmp_path), 1, {"scales": torch.arange(28.0)})
    halves = [list(map(float, range(14))), list(map(float, range(14, 28)))]
    assert scales_of_a_quarter(str(tmp_path)) == [*halves, [0.0, 1.0], [1.0], []]
