import json
import os
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from accelerate_layout import write_accelerate_state
from drivetrain_checkpoint import CorruptCheckpointError, ForeignStateError, read_accelerate_state
from drivetrain_state import load_rng_state


class Runs:
    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, ("made",)


@pytest.mark.parametrize("safe", [True, False])
def test_all_that_is_there_is_read(tmp_path: Path, safe: bool) -> None:
    weights = [{"a": torch.arange(3.0)}, {"b": torch.ones(2)}]
    scaler = {"scale": 64.0, "growth_factor": 2.0, "_growth_tracker": 2}
    folder = write_accelerate_state(
        tmp_path,
        models=weights,
        optimizers=[{"state": {}, "param_groups": [{"params": [0]}]}],
        schedulers=[{"last_epoch": 4}],
        loaders=[{"_num_yielded": 2}],
        custom=[{"n": 3}],
        scaler=scaler,
        world_size=2,
        num_accumulated=7,
        safe=safe,
    )
    found = read_accelerate_state(folder)
    assert [{n: t.tolist() for n, t in model.items()} for model in found.models] == [
        {"a": [0.0, 1.0, 2.0]},
        {"b": [1.0, 1.0]},
    ]
    assert found.optimizers == ({"state": {}, "param_groups": [{"params": [0]}]},)
    assert found.schedulers == ({"last_epoch": 4},)
    assert found.loaders == ({"_num_yielded": 2},)
    assert found.custom == ({"n": 3},)
    assert found.scaler == {"scale": 64.0, "growth_tracker": 2}
    assert (found.world_size, found.num_accumulated, found.left_out) == (2, 7, ())


def test_a_rank_gets_its_own_generators(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    folder = write_accelerate_state(tmp_path, world_size=2)
    generators = read_accelerate_state(folder, rank=1).generators
    assert generators is not None
    load_rng_state(generators)
    assert random.random() == random.Random(1).random()
    assert numpy.random.rand() == numpy.random.RandomState(1).rand()
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(1)))
    assert read_accelerate_state(folder, rank=2).generators is None


@pytest.mark.parametrize(("local_rank", "expected"), [(0, [1]), (1, [2]), (5, [1])])
def test_of_the_devices_a_rank_saw_its_own_is_taken(tmp_path: Path, local_rank: int, expected) -> None:
    states = [torch.tensor([n], dtype=torch.uint8) for n in (1, 2)]
    torch.save({"torch_cuda_manual_seed": states}, tmp_path / "random_states_0.pkl")
    generators = read_accelerate_state(tmp_path, local_rank=local_rank).generators
    assert generators is not None
    assert generators["accelerator"]["kind"] == "cuda"
    assert generators["accelerator"]["state"].tolist() == expected


def test_generators_that_cannot_be_read_are_left_out_and_told(tmp_path: Path) -> None:
    torch.save({"random_state": Runs()}, tmp_path / "random_states_0.pkl")
    found = read_accelerate_state(tmp_path)
    assert found.generators is None
    assert "random_states_0.pkl holds more than tensors" in found.left_out[0]


def test_what_is_not_known_is_told(tmp_path: Path) -> None:
    torch.save({"torch_manual_seed": torch.zeros(1), "tpu": 1}, tmp_path / "random_states_0.pkl")
    (tmp_path / "sampler.bin").touch()
    assert read_accelerate_state(tmp_path).left_out == (
        "sampler.bin: not known",
        "random_states_0.pkl: 'tpu' is not known",
    )


@pytest.mark.parametrize("name", ["custom_checkpoint_0.pkl", "optimizer.bin", "pytorch_model.bin"])
def test_a_pickle_that_could_run_code_is_refused(tmp_path: Path, name: str) -> None:
    torch.save({"a": Runs()}, tmp_path / name)
    with pytest.raises(ForeignStateError, match=rf"{name} holds more than tensors"):
        read_accelerate_state(tmp_path)
    assert not Path("made").exists()


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_arrays_of_numbers_are_read(tmp_path: Path, dtype: str) -> None:
    numpy = pytest.importorskip("numpy")
    value = numpy.arange(6).reshape(2, 3).astype(dtype)
    torch.save({"a": value}, tmp_path / "custom_checkpoint_0.pkl")
    found = read_accelerate_state(tmp_path).custom[0]["a"]
    assert found.dtype == value.dtype
    assert (found == value).all()


@pytest.mark.parametrize("content", [b"", b"no pickle", b"PK\x03\x04 and no more"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "optimizer.bin").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"optimizer\.bin is no whole file of torch\.save"):
        read_accelerate_state(tmp_path)


def test_an_optimizer_that_is_none_is_refused(tmp_path: Path) -> None:
    torch.save({"lr": 1}, tmp_path / "optimizer.bin")
    with pytest.raises(CorruptCheckpointError, match=r"optimizer\.bin does not hold what its name says"):
        read_accelerate_state(tmp_path)


def test_models_in_several_files_are_read_through_their_index(tmp_path: Path) -> None:
    shards = {"pytorch_model-00001-of-00002.bin": "a", "pytorch_model-00002-of-00002.bin": "b"}
    for file, name in shards.items():
        torch.save({name: torch.ones(1)}, tmp_path / file)
    index = {"weight_map": {name: file for file, name in shards.items()}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    found = read_accelerate_state(tmp_path)
    assert sorted(found.models[0]) == ["a", "b"]
    assert found.left_out == ()


class Kept:
    def state_dict(self) -> dict[str, object]:
        return {"n": 3, "t": torch.ones(2)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise AssertionError(state)


def test_accelerate_itself_writes_what_is_read(tmp_path: Path) -> None:
    pytest.importorskip("accelerate.state", reason="the peer is in the group bench")
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = AdamW(model.parameters())
    scheduler = StepLR(optimizer, 2)
    accelerator.register_for_checkpointing(Kept())
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.backward(model(torch.randn(4, 2)).square().sum())
    optimizer.step()
    scheduler.step()
    for safe in (True, False):
        folder = tmp_path / str(safe)
        accelerator.save_state(str(folder), safe_serialization=safe)
        found = read_accelerate_state(folder)
        assert {n: t.tolist() for n, t in found.models[0].items()} == {
            n: t.tolist() for n, t in model.state_dict().items()
        }
        assert found.optimizers[0]["param_groups"] == optimizer.state_dict()["param_groups"]
        assert torch.equal(
            found.optimizers[0]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
        )
        assert found.schedulers[0] == scheduler.state_dict()
        assert found.custom[0]["n"] == 3
        assert found.generators is not None
        assert torch.equal(found.generators["torch"], torch.get_rng_state())
        assert (found.world_size, found.left_out) == (1, ())
