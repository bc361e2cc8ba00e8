import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator


class Kept:
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def test_what_has_no_state_is_refused() -> None:
    with pytest.raises(TypeError, match=r"dict has no state_dict\(\) and load_state_dict\(\)"):
        Accelerator(cpu=True).register_for_checkpointing({})


def test_a_name_is_given_once() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(ema=Kept())
    with pytest.raises(ValueError, match=r"ema=\.\.\.\): the name is taken"):
        accelerator.register_for_checkpointing(ema=Kept())


def test_registered_objects_come_back_by_name_in_any_order(tmp_path) -> None:
    saved = Accelerator(cpu=True, project_dir=tmp_path)
    saved.prepare(nn.Linear(1, 1))
    saved.register_for_checkpointing(a=Kept(1), b=Kept(2))
    saved.save_state()
    loaded = Accelerator(cpu=True, project_dir=tmp_path)
    loaded.prepare(nn.Linear(1, 1))
    a, b = Kept(), Kept()
    loaded.register_for_checkpointing(b=b, a=a)
    loaded.load_state()
    assert (a.value, b.value) == (1, 2)


def test_a_checkpoint_of_other_objects_is_refused(tmp_path) -> None:
    saved = Accelerator(cpu=True, project_dir=tmp_path)
    saved.prepare(nn.Linear(1, 1), DataLoader(TensorDataset(torch.arange(4))))
    saved.save_state()
    other = Accelerator(cpu=True, project_dir=tmp_path)
    other.prepare(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"the checkpoint holds loaders \['0'\], and this run has \[\]"):
        other.load_state()


def test_an_optimizer_over_other_parameters_is_refused_by_name(tmp_path) -> None:
    saved = Accelerator(cpu=True, project_dir=tmp_path)
    model = nn.Linear(1, 1)
    saved.prepare(model, SGD(model.parameters(), lr=0.1))
    saved.save_state()
    other = Accelerator(cpu=True, project_dir=tmp_path)
    model = nn.Linear(1, 1)
    other.prepare(model, SGD([model.weight], lr=0.1))
    with pytest.raises(ValueError, match=r"differs from the checkpoint's by \['bias'\]"):
        other.load_state()


def test_generators_go_on_where_they_were(tmp_path) -> None:
    saved = Accelerator(cpu=True, project_dir=tmp_path)
    saved.prepare(nn.Linear(1, 1))
    saved.save_state()
    expected = torch.rand(3)
    loaded = Accelerator(cpu=True, project_dir=tmp_path)
    loaded.prepare(nn.Linear(1, 1))
    loaded.load_state()
    assert torch.equal(torch.rand(3), expected)
