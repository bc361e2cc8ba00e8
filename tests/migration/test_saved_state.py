import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.testing import assert_close

from drivetrain import Accelerator
from drivetrain_migration.saved_state import match_model, match_optimizer, steps_of

NAMES = ["0.weight", "0.bias", "1.weight"]
SHAPES = {"0.weight": (3, 2), "0.bias": (3,), "1.weight": (2, 3)}


def stepped(make, names=NAMES) -> Optimizer:
    """An optimizer that has stepped once over parameters of the given names, in that order."""
    parameters = [nn.Parameter(torch.ones(SHAPES[name])) for name in names]
    optimizer = make(parameters)
    sum(p.square().sum() for p in parameters).backward()
    optimizer.step()
    return optimizer


def groups(optimizer: Optimizer, names=NAMES):
    rest = iter(names)
    return [{**group, "params": [next(rest) for _ in group["params"]]} for group in optimizer.param_groups]


def matched(saved, make, names=NAMES, *, clone=False):
    return match_optimizer(
        saved, groups(stepped(make, names), names), shapes=SHAPES, kind="AdamW", clone=clone
    )


@pytest.mark.parametrize("make", [AdamW, Adafactor, lambda p: SGD(p, lr=0.1, momentum=0.9)])
def test_places_become_names_in_the_order_of_the_parameters(make) -> None:
    optimizer = stepped(make)
    saved = optimizer.state_dict()
    found = matched(saved, make)
    assert list(found["state"]) == NAMES
    for place, name in enumerate(NAMES):
        assert_close(found["state"][name], saved["state"][place], rtol=0, atol=0)
    assert [group["params"] for group in found["param_groups"]] == [NAMES]


def test_places_count_on_through_the_groups() -> None:
    def make(parameters):
        return AdamW([{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:], "weight_decay": 0.0}])

    found = matched(stepped(make).state_dict(), make)
    assert [(g["params"], g["lr"], g["weight_decay"]) for g in found["param_groups"]] == [
        (NAMES[:1], 0.5, 0.01),
        (NAMES[1:], 0.001, 0.0),
    ]
    assert [tuple(kept["exp_avg"].shape) for kept in found["state"].values()] == list(SHAPES.values())


def test_names_are_taken_as_they_are_in_any_order() -> None:
    saved = stepped(AdamW).state_dict()
    named = {
        "state": {f"_orig_mod.{name}": saved["state"][place] for place, name in enumerate(NAMES)},
        "param_groups": [{**saved["param_groups"][0], "params": [f"_orig_mod.{n}" for n in reversed(NAMES)]}],
    }
    found = matched(named, AdamW)
    expected = {name: saved["state"][place] for place, name in enumerate(NAMES)}
    assert_close(found["state"], expected, rtol=0, atol=0)
    assert found["param_groups"][0]["params"] == NAMES
    named["param_groups"][0]["params"][0] = "other"
    with pytest.raises(ValueError, match=r"group 0 differs from the checkpoint's by \['1.weight', 'other'\]"):
        matched(named, AdamW)


def test_parameters_in_another_order_are_refused_by_shape() -> None:
    saved = stepped(AdamW).state_dict()
    with pytest.raises(ValueError, match=r"exp_avg of 0.bias is of shape \(3, 2\) in the checkpoint"):
        matched(saved, AdamW, ["0.bias", "0.weight", "1.weight"])


def test_other_groups_and_other_numbers_of_parameters_are_refused() -> None:
    saved = stepped(AdamW).state_dict()
    with pytest.raises(ValueError, match="has 2 parameter groups, the checkpoint 1"):
        matched(saved, lambda p: AdamW([{"params": p[:1]}, {"params": p[1:]}]))
    with pytest.raises(ValueError, match="group 0 has 2 parameters, in the checkpoint 3"):
        matched(saved, AdamW, NAMES[:2])


def test_another_kind_of_optimizer_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"the checkpoint's optimizer has \['dampening', 'momentum', 'nesterov'\]"
    ):
        matched(stepped(lambda p: SGD(p, lr=0.1)).state_dict(), AdamW)


def test_options_of_a_scheduler_or_of_a_later_torch_are_no_other_kind() -> None:
    saved = stepped(AdamW).state_dict()
    saved["param_groups"][0] |= {"initial_lr": 0.5}
    del saved["param_groups"][0]["foreach"]
    (group,) = matched(saved, AdamW)["param_groups"]
    assert group["initial_lr"] == 0.5
    assert "foreach" in group


def test_clones_leave_the_files_memory() -> None:
    saved = stepped(AdamW).state_dict()
    moment = saved["state"][0]["exp_avg"]
    kept = matched(saved, AdamW)["state"]["0.weight"]
    assert kept["exp_avg"] is moment
    assert kept["step"].data_ptr() != saved["state"][0]["step"].data_ptr()  # torch leaves it where it is
    assert matched(saved, AdamW, clone=True)["state"]["0.weight"]["exp_avg"].data_ptr() != moment.data_ptr()


def test_steps_are_those_of_the_parameter_that_moved_most() -> None:
    assert steps_of({"state": {"a": {"step": torch.tensor(3.0)}, "b": {"step": 5}}}) == 5
    assert steps_of({"state": {"a": {"momentum_buffer": torch.ones(1)}}}) is None


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False)
        self.outer = nn.Linear(2, 2)
        self.outer.weight = self.inner.weight


def test_a_tied_weight_is_taken_from_any_of_its_names() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Tied())
    prepared = accelerator._parts.prepared.of(model)
    own, built = prepared.state_dict()["model"], prepared.unwrap()
    for name in ("inner.weight", "outer.weight"):
        saved = {name: torch.ones(2, 2), "_orig_mod.outer.bias": torch.zeros(2)}
        found = match_model(saved, own, built)
        assert sorted(found) == ["inner.weight", "outer.bias", "outer.weight"]
        assert found["inner.weight"] is found["outer.weight"]
    with pytest.raises(ValueError, match=r"not of this Tied: missing \['outer.bias'\], unexpected \['x'\]"):
        match_model({"inner.weight": torch.ones(2, 2), "x": torch.ones(1)}, own, built)
    with pytest.raises(ValueError, match=r"outer.bias is of shape \(2,\), in the checkpoint \(3,\)"):
        match_model({"inner.weight": torch.ones(2, 2), "outer.bias": torch.ones(3)}, own, built)
