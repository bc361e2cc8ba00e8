import copy
import pickle

import pytest
import torch
from torch import nn

from drivetrain_backends import BatchMismatchError, restore_forward
from drivetrain_backends.modules.autocast_forward import prepare_forward
from drivetrain_precision import choose_policy

CPU = torch.device("cpu")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.linear(x) * scale


def prepared(mode: str = "bf16") -> Scaled:
    model = Scaled()
    prepare_forward(model, choose_policy(mode, CPU), CPU)
    return model


def test_the_forward_computes_in_the_policys_dtype() -> None:
    assert prepared()(torch.ones(1, 2)).dtype is torch.bfloat16
    assert prepared("no")(torch.ones(1, 2)).dtype is torch.float32


def test_the_model_keeps_its_type_name_and_attributes() -> None:
    model = prepared()
    assert isinstance(model, Scaled)
    assert type(model).__name__ == "Scaled"
    assert set(model.state_dict()) == {"linear.weight", "linear.bias"}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_the_plain_model_with_weights_of_its_own(duplicate) -> None:
    model = prepared()
    other = duplicate(model)
    assert type(other) is Scaled
    with torch.no_grad():
        model.linear.weight.zero_()
    assert other.linear.weight.abs().sum() > 0
    assert other(torch.ones(1, 2)).dtype is torch.float32


def test_restoring_gives_the_class_back() -> None:
    model = prepared()
    assert type(restore_forward(model)) is Scaled
    assert type(restore_forward(model)) is Scaled


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"y": 1}, "missing: x; unexpected: y"),
        ({}, "missing: x"),
        ({"x": torch.ones(1, 2), "labels": 1, "ids": 2}, "unexpected: ids, labels"),
    ],
)
def test_a_batch_that_does_not_fit_says_which_keys(batch: dict[str, object], message: str) -> None:
    with pytest.raises(BatchMismatchError, match=rf"does not fit Scaled\.forward.*{message}"):
        prepared()(**batch)


@pytest.mark.parametrize(
    ("held", "given", "told"),
    [
        (torch.float16, torch.float32, "the batch holds float32, the model's weights are float16"),
        (torch.float32, torch.float64, "the batch holds float64, the model's weights are float32"),
    ],
)
def test_a_batch_in_another_dtype_than_the_weights_says_both(
    held: torch.dtype, given: torch.dtype, told: str
) -> None:
    model = Scaled().to(held)
    prepare_forward(model, choose_policy("no", CPU), CPU)
    with pytest.raises(BatchMismatchError, match=told):
        model(torch.ones(1, 2, dtype=given))


def test_a_type_error_inside_the_forward_stays_what_it_is() -> None:
    with pytest.raises(TypeError) as caught:
        prepared()(torch.ones(1, 2), scale="two")
    assert not isinstance(caught.value, BatchMismatchError)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_a_scripted_module_is_refused() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"prepare the nn\.Module it was made from"):
        prepare_forward(scripted, choose_policy("no", CPU), CPU)


def test_a_compiled_model_computes_in_the_policys_dtype() -> None:
    model = torch.compile(Scaled(), backend="eager")
    prepare_forward(model, choose_policy("bf16", CPU), CPU)
    assert model(torch.ones(1, 2)).dtype is torch.bfloat16
