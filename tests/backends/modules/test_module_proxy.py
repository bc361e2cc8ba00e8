"""What stands in for a wrapped model: DDP's replica here, and the same of one that nothing wraps."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from drivetrain_backends import ReplacedParameterError
from drivetrain_backends.ddp.replica import Replica
from plain_loop.backends import ddp, prepare_sgd, take_step


class Net(nn.Module):
    """A model with what users keep on theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.head = nn.Linear(2, 1)
        self.register_buffer("shift", torch.zeros(1))
        self.temperature = 2.0
        self._cache = "kept"

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)) / self.temperature + self.shift

    def generate(self, x: Tensor) -> Tensor:
        return self(x).round()

    @property
    def doubled(self) -> float:
        return 2 * self.temperature


pytestmark = pytest.mark.ranks(2)


def test_reading_and_setting_reach_the_users_module() -> None:
    _, net, prepared = prepare_sgd(ddp(), Net())
    model = prepared.model
    assert type(model) is Replica
    assert model.head is net.head
    assert model.shift is net.shift
    assert model.doubled == 4.0
    assert torch.equal(model.generate(torch.ones(1, 2)), net(torch.ones(1, 2)).round())
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing
    model.temperature, model._cache, model.new, model._own = 4.0, "changed", 1, 2
    assert (net.temperature, net._cache, net.new, hasattr(net, "_own")) == (4.0, "changed", 1, False)
    assert model.doubled == 8.0
    for value in (nn.Linear(2, 1), nn.Parameter(torch.ones(1))):
        for name in ("head", "added"):
            with pytest.raises(ReplacedParameterError, match=f"{name} is assigned to Net after prepare"):
                setattr(model, name, value)
    model.eval()
    assert not net.training
    assert not net.body.training


def test_a_copy_of_a_replica_is_the_plain_model() -> None:
    _, net, prepared = prepare_sgd(ddp(), Net())
    for copied in (copy.deepcopy(prepared.model), pickle.loads(pickle.dumps(prepared.model))):
        before = copied.head.weight.clone()
        with torch.no_grad():
            net.head.weight.add_(1.0)
        assert type(copied) is Net
        assert torch.equal(copied.head.weight, before)
        assert copied.training


@pytest.mark.parametrize("kind", ["replica", "module", "compiled"])
def test_a_prepared_model_is_not_prepared_again(kind: str) -> None:
    one, net, prepared = prepare_sgd(ddp(), Net())
    compiled = torch.compile(prepared.model, backend="eager")
    again = {"replica": prepared.model, "module": net, "compiled": compiled}
    with pytest.raises(ValueError, match=r"^Net is prepared already.*prepare"):
        one.prepare([again[kind]], [], [])


def test_an_exchanged_layer_is_told_before_the_gradient_that_it_no_longer_gets() -> None:
    _, net, prepared = prepare_sgd(ddp(), Net())
    take_step(prepared, prepared.model(torch.ones(1, 2)).sum())
    net.head = nn.Linear(2, 1)

    def train_on() -> None:
        for _ in range(2):
            take_step(prepared, prepared.model(torch.ones(1, 2)).sum())

    said = r"^the parameters of Net are not those of prepare\(\): head\.weight"
    with pytest.raises(ReplacedParameterError, match=said):
        train_on()


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_replica_loads_a_state_of_the_module_and_one_of_its_own(prefix: str) -> None:
    _, net, prepared = prepare_sgd(ddp(), Net())
    state = {f"{prefix}{name}": torch.full_like(value, 3.0) for name, value in net.state_dict().items()}
    prepared.model.load_state_dict(state)
    assert all((value == 3.0).all() for value in net.state_dict().values())
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .*\"body.bias\""):
        prepared.model.load_state_dict({"body.weight": net.body.weight})
