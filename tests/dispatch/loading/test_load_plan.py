from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain_dispatch.errors import WeightsMismatchError
from drivetrain_dispatch.loading.checkpoint_tensors import CheckpointTensors, TensorSpec, WeightLoadOptions
from drivetrain_dispatch.loading.load_plan import LoadPlan, plan_load
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.planning.device_map import Place, read_device_map


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding(5, 2)
        self.b = nn.Linear(2, 5, bias=False)
        self.c = nn.BatchNorm1d(2)
        self.b.weight = self.a.weight


def stored_of(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(tuple(value.shape), (dtype if value.is_floating_point() else None) or value.dtype)
        for name, value in model.state_dict().items()
    }


def planned(
    model: nn.Module,
    stored: Mapping[str, TensorSpec],
    devices: Mapping[str, str] | None = None,
    *,
    dtype: torch.dtype | None = None,
    **options: object,
) -> LoadPlan:
    layout = ModelLayout.of(model, dtype=dtype)
    checkpoint = CheckpointTensors(path=Path("x"), specs=stored, sources={})
    placements = read_device_map(layout, {"": "cpu"} if devices is None else devices)
    return plan_load(layout, checkpoint, placements, WeightLoadOptions(**options))


@pytest.mark.parametrize(
    ("devices", "place"),
    [
        ({"a": "cpu", "b": "disk", "c": "cpu"}, torch.device("cpu")),
        ({"a": "disk", "b": "cpu", "c": "disk"}, torch.device("cpu")),
        ({"a": "disk", "b": "disk", "c": "cpu"}, "disk"),
        ({"a": "cuda:1", "b": "cuda:0", "c": "cpu"}, torch.device("cuda:1")),
        ({"a": "meta", "b": "disk", "c": "cpu"}, torch.device("meta")),
    ],
)
def test_a_tied_tensor_goes_to_the_first_device_of_its_names(devices: dict[str, str], place: Place) -> None:
    model = Tied()
    plan = planned(model, stored_of(model), devices)
    tied = next(arrival for arrival in plan.tensors if len(arrival.names) > 1)
    assert (tied.names, tied.place) == (("a.weight", "b.weight"), place)
    assert tied.in_memory == (place != "disk" and place.type != "meta")
    assert tied.reads == (("a.weight",) if tied.in_memory else ())
    assert tied.maps == (("a.weight",) if place == "disk" else ())


def test_one_name_of_a_tie_will_do_and_other_dtypes_of_its_names_are_refused() -> None:
    model = Tied()
    stored = stored_of(model)
    del stored["a.weight"]
    plan = planned(model, stored)
    assert [arrival.stored for arrival in plan.tensors if "a.weight" in arrival.names] == ["b.weight"]
    assert plan.missing == plan.unexpected == ()
    model.register_buffer("scratch", torch.ones(1), persistent=False)  # which no state dict has
    named = {"scratch": TensorSpec((1,), torch.float32), **stored}
    plan = planned(model, dict(reversed(named.items())), strict=False)
    assert plan.unexpected == ("scratch",)
    taken = [arrival.stored for arrival in plan.tensors]
    assert taken == list(reversed(stored))  # in the order of the checkpoint, each once
    both = {**stored, "a.weight": TensorSpec((5, 2), torch.float16)}
    with pytest.raises(
        WeightsMismatchError, match=r"'a.weight', 'b.weight' are one tensor, but are .* float16 and "
    ):
        planned(model, both)
