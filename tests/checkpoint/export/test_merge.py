import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from checkpoint.saves import save
from drivetrain_checkpoint import (
    Checkpointer,
    CorruptCheckpointError,
    HeldRange,
    StateError,
    load_model,
    merge_shards,
    save_model,
)
from drivetrain_checkpoint.export.merge import names_in
from drivetrain_state import Context, connect
from host_peak import peak_above, reset_peak


def weights() -> dict[str, Tensor]:
    """A model's tensors: many dtypes, odd sizes, an empty one, a scalar, NaN."""
    draw = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(7, 5, generator=draw),
        "layer.weight": torch.randn(6, 4, generator=draw).to(torch.bfloat16),
        "layer.bias": torch.tensor([1.0, float("nan"), -0.0], dtype=torch.float64),
        "scale": torch.tensor(3, dtype=torch.int64),
        "mask": torch.tensor([True, False]),
        "none": torch.empty(0, 3),
    }


def save_3(context: Context, directory: Path | str, model: dict[str, Any], **others: dict[str, Any]) -> Path:
    return save(Checkpointer(context, directory), 3, models={"model": model, **others})


def exported(folder: Path) -> dict[str, Tensor]:
    """The tensors of an export, as the library alone reads them."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        one, other = (bytes(each.reshape(-1).view(torch.uint8)) for each in (found[name], tensor))
        assert one == other, name


def save_divided(directory: str) -> None:
    """Save the weights in parts: rows, columns, on each rank the whole, runs of elements, and tied ones."""
    with connect(device="cpu") as context:
        mesh = init_device_mesh("cpu", (2,))
        whole, rank = weights(), context.topology.rank
        state: dict[str, Any] = {
            "embed.weight": distribute_tensor(whole["embed.weight"], mesh, [Shard(0)]),
            "layer.weight": distribute_tensor(whole["layer.weight"], mesh, [Shard(1)]),
            "layer.bias": HeldRange(
                torch.Size((3,)), 2 * rank, whole["layer.bias"][2 * rank : 2 * rank + 2].clone()
            ),
            "scale": whole["scale"],
            "mask": distribute_tensor(whole["mask"], mesh, [Replicate()]),
            "none": distribute_tensor(whole["none"], mesh, [Shard(0)]),
        }
        state["head.weight"] = state["embed.weight"]
        save_3(context, directory, state)


@pytest.mark.parametrize("max_shard_size", ["5GB", 100])
def test_the_shards_of_two_ranks_become_one_model(
    run_ranks, tmp_path: Path, max_shard_size: int | str
) -> None:
    run_ranks(save_divided, str(tmp_path))
    folder = tmp_path / "step-3"
    assert (folder / "weights-model.r1.safetensors").is_file()
    plan = merge_shards(folder, tmp_path / "out", max_shard_size=max_shard_size)
    assert plan.ties == {"head.weight": "embed.weight"}
    assert plan.is_sharded == (max_shard_size == 100)
    assert_same(exported(tmp_path / "out"), weights())


def test_it_is_byte_for_byte_what_save_model_writes(tmp_path: Path, context: Context) -> None:
    folder = save_3(context, tmp_path, weights())
    merge_shards(folder, tmp_path / "merged", max_shard_size=100)
    save_model(weights(), tmp_path / "saved", max_shard_size=100)
    files = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert len(files) > 2
    assert sorted(path.name for path in (tmp_path / "merged").iterdir()) == files
    for name in files:
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()


def test_tied_weights_are_ties_of_the_export_and_load_into_a_module(tmp_path: Path, context: Context) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    folder = save_3(context, tmp_path, dict(model.state_dict()))
    merge_shards(folder, tmp_path / "out")
    assert list(exported(tmp_path / "out")) == ["0.weight"]
    other = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    load_model(other, tmp_path / "out")
    assert torch.equal(other[1].weight, model[0].weight)


def test_what_is_no_tensor_is_left_out_with_a_warning(tmp_path: Path, context: Context, caplog) -> None:
    state = {"weight": torch.ones(2), "_extra_state": {"scale": torch.ones(1)}, "version": 3}
    merge_shards(save_3(context, tmp_path, state), tmp_path / "out")
    assert list(exported(tmp_path / "out")) == ["weight"]
    assert caplog.messages == ["left out of the export, which holds only tensors: '_extra_state', 'version'"]


def test_a_model_is_named_where_there_are_several(tmp_path: Path, context: Context) -> None:
    folder = save_3(context, tmp_path, {"a": torch.ones(1)}, teacher={"b": torch.zeros(1)})
    merge_shards(folder, tmp_path / "out", model="teacher")
    assert list(exported(tmp_path / "out")) == ["b"]
    with pytest.raises(ValueError, match=r"model=None: must name .* which has model, teacher"):
        merge_shards(folder, tmp_path / "out")
    with pytest.raises(ValueError, match=r"model='student': must name"):
        merge_shards(folder, tmp_path / "out", model="student")


def test_names_that_json_could_not_tell_from_tags_are_names(tmp_path: Path, context: Context) -> None:
    merge_shards(save_3(context, tmp_path, {"$weight": torch.ones(2)}), tmp_path / "out")
    assert list(exported(tmp_path / "out")) == ["$weight"]
    folder = save_3(context, tmp_path / "keys", {3: torch.ones(2)})  # pyright: ignore[reportArgumentType]
    with pytest.raises(StateError, match="the name 3: must be a string"):
        merge_shards(folder, tmp_path / "out")


def test_a_stored_name_that_differs_is_followed() -> None:
    tree = {"a": {"$tensor": "x"}, "b": {"$tensor": "x"}, "c": {"d": {"$tensor": "c/d"}}, "e": None}
    names = names_in(tree)  # pyright: ignore[reportArgumentType]
    assert dict(names.stored) == {"a": "x", "b": "x"}
    assert names.others == ("c", "e")


def test_damage_in_what_is_read_is_an_error_and_the_export_before_stays(
    tmp_path: Path, context: Context
) -> None:
    folder = save_3(context, tmp_path, weights())
    save_model({"old": torch.ones(1)}, tmp_path / "out")
    path = folder / "weights-model.r0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    with pytest.raises(
        CorruptCheckpointError, match=r"weights-model.r0.safetensors is damaged between byte 0 and"
    ):
        merge_shards(folder, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert list(exported(tmp_path / "out")) == ["old"]


def test_what_is_wrong_is_said_before_anything_is_written(tmp_path: Path, context: Context) -> None:
    folder = save_3(context, tmp_path, weights())
    with pytest.raises(ValueError, match="is the checkpoint itself; name another folder"):
        merge_shards(folder, folder)
    with pytest.raises(ValueError, match="max_shard_size='huge': must be"):
        merge_shards(folder, tmp_path / "out", max_shard_size="huge")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_in_a_store_is_merged(tmp_path: Path, context: Context) -> None:
    pytest.importorskip("upath")
    save_3(context, "memory://merge/run", weights())
    merge_shards("memory://merge/run/step-3", tmp_path / "out", max_shard_size=100)
    assert_same(exported(tmp_path / "out"), weights())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights().keys()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux keeps the peak")
@pytest.mark.slow
def test_memory_holds_a_file_of_the_export_at_a_time(tmp_path: Path, context: Context) -> None:
    folder = save_3(context, tmp_path, {f"layer{i}": torch.full((2**22,), float(i)) for i in range(16)})
    counted: list[int] = []
    before = reset_peak()
    merge_shards(folder, tmp_path / "out", max_shard_size="32MiB", on_bytes=counted.append)
    # Alone it is 64 MiB: a file, a tensor of the one before, and a block. After other tests the C library may keep
    # freed blocks of this size beside them; the model is 256 MiB.
    assert peak_above(before) < 160
    assert sum(counted) == 256 * 2**20
    assert len(counted) > 16
