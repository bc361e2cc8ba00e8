"""What stands in for a wrapped model: DDP's replica here, and the same of one that nothing wraps."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from backends.replicas import ddp_backend, prepare_sgd
from drivetrain_backends import DDPBackend, ReplacedParameterError, UnreducedGradientError
from drivetrain_backends.torch.ddp import Replica


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


def ddp() -> DDPBackend:
    return ddp_backend()


def read_and_set() -> list[object]:
    torch.manual_seed(0)
    one, net, prepared = prepare_sgd(ddp(), Net())
    model = prepared.model
    found: list[object] = [
        type(model) is Replica,
        model.head is net.head and model.shift is net.shift,
        model.doubled,
        torch.equal(model.generate(torch.ones(1, 2)), net(torch.ones(1, 2)).round()),
        not hasattr(model, "nothing"),
    ]
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing
    model.temperature, model._cache, model.new, model._own = 4.0, "changed", 1, 2
    found += [net.temperature, net._cache, net.new, hasattr(net, "_own"), model.doubled]
    for value in (nn.Linear(2, 1), nn.Parameter(torch.ones(1))):
        for name in ("head", "added"):
            with pytest.raises(ReplacedParameterError, match=f"{name} is assigned to Net after prepare"):
                setattr(model, name, value)
    model.eval()
    found.append(net.training or net.body.training)
    one.close()
    return found


def test_reading_and_setting_reach_the_users_module(run_ranks) -> None:
    expected = [True, True, 4.0, True, True, 4.0, "changed", 1, False, 8.0, False]
    assert run_ranks(read_and_set) == [expected] * 2


def duplicate() -> list[object]:
    one, net, prepared = prepare_sgd(ddp(), Net())
    found: list[object] = []
    for copied in (copy.deepcopy(prepared.model), pickle.loads(pickle.dumps(prepared.model))):
        with torch.no_grad():
            net.head.weight.add_(1.0)
        difference = net.head.weight - copied.head.weight
        found += [type(copied) is Net, bool((difference > 0.5).all()), copied.training]
    one.close()
    return found


def test_a_copy_of_a_replica_is_the_plain_model(run_ranks) -> None:
    assert run_ranks(duplicate) == [[True] * 6] * 2


def prepare_again(kind: str) -> str:
    one, net, prepared = prepare_sgd(ddp(), Net())
    again = {
        "replica": prepared.model,
        "module": net,
        "compiled": torch.compile(prepared.model, backend="eager"),
    }
    with pytest.raises(ValueError, match="prepare") as caught:
        one.prepare([again[kind]], [], [])
    one.close()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["replica", "module", "compiled"])
def test_a_prepared_model_is_not_prepared_again(run_ranks, kind: str) -> None:
    for said in run_ranks(prepare_again, kind):
        assert said.startswith("Net is prepared already")


def exchange_a_layer_between_steps() -> str:
    one, net, prepared = prepare_sgd(ddp(), Net())
    said = ""
    for _ in range(3):
        one.window.begin()
        try:
            prepared.backward(prepared.model(torch.ones(1, 2)).sum())
            prepared.optimizers[0].step()
        except (ReplacedParameterError, UnreducedGradientError) as error:
            said = f"{type(error).__name__}: {error}"
            break
        prepared.optimizers[0].zero_grad()
        net.head = nn.Linear(2, 1)
    one.close()
    return said


def test_an_exchanged_layer_is_told_before_the_gradient_that_it_no_longer_gets(run_ranks) -> None:
    for said in run_ranks(exchange_a_layer_between_steps):
        assert said.startswith(
            "ReplacedParameterError: the parameters of Net are not those of prepare(): head.weight"
        )


def loaded() -> list[bool]:
    one, net, prepared = prepare_sgd(ddp(), Net())
    found: list[bool] = []
    for prefix in ("", "module."):
        state = {f"{prefix}{name}": torch.full_like(value, 3.0) for name, value in net.state_dict().items()}
        prepared.model.load_state_dict(state)
        found.append(all(bool((value == 3.0).all()) for value in net.state_dict().values()))
        with torch.no_grad():
            net.head.weight.zero_()
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .*\"body.bias\""):
        prepared.model.load_state_dict({"body.weight": net.body.weight})
    one.close()
    return found


def test_a_replica_loads_a_state_of_the_module_and_one_of_its_own(run_ranks) -> None:
    assert run_ranks(loaded) == [[True, True]] * 2
