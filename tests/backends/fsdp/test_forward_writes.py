"""A forward or a hook that writes into gathered parameters is refused, as FSDP would drop what it writes."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from drivetrain_backends import AccumulationError, UnshardedParameterError
from sharded_stack import fsdp


class Writing(nn.Module):
    """Two layers, of which the first writes into its weight in forward, once `ways` is not empty."""

    def __init__(self, way: Callable[[nn.Parameter], object] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.way = nn.Linear(4, 4), nn.Linear(4, 1), way
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if self.way is not None:
            with torch.no_grad():
                self.way(self.first.weight)
        return self.second(torch.tanh(self.first(x)))


def clamped(weight: nn.Parameter) -> None:
    weight.clamp_(-0.1, 0.1)


def clamped_through_data(weight: nn.Parameter) -> None:
    weight.data.clamp_(-0.1, 0.1)


def assigned(weight: nn.Parameter) -> None:
    weight.data = weight.data * 0.5


def copied(weight: nn.Parameter) -> None:
    weight.copy_(weight * 0.5)


def trained(way: Callable[[nn.Parameter], object] | None, *, late: bool, **settings: object) -> str:
    backend = fsdp(**settings)
    model = Writing(None if late else way)
    (prepared,) = backend.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    try:
        for number in range(20):
            if number == 2:
                model.way = way
            backend.window.begin()
            prepared.backward(prepared.model(torch.ones(2, 4) + dist.get_rank()).square().mean())
            prepared.optimizers[0].step()
            prepared.optimizers[0].zero_grad()
        return f"{number + 1} steps"
    except UnshardedParameterError as error:
        return f"step {number}: {error}"
    finally:
        backend.close()


def each_way() -> dict[str, str]:
    found = {
        f"{way.__name__} {strategy}": trained(way, late=False, strategy=strategy)
        for way in (clamped, clamped_through_data, assigned, copied)
        for strategy in ("full_shard", "shard_grad_op")
    }
    found["late"] = trained(clamped, late=True)
    found["none"] = trained(None, late=False)
    return found


def test_a_forward_that_writes_into_a_weight_is_refused_by_name(run_ranks) -> None:
    for found in run_ranks(each_way):
        assert found.pop("none") == "20 steps"
        assert "first.weight of Writing: a forward, or a hook in backward, wrote into it" in found.pop("late")
        for way, said in found.items():
            assert said.startswith("step 0: first.weight of Writing: a forward"), (way, said)


def stepped_in_a_hook(way: str) -> str:
    backend = fsdp()
    model = Writing(None)
    optimizers = [SGD(model.first.parameters(), lr=0.1), SGD(model.second.parameters(), lr=0.1)]
    (prepared,) = backend.prepare([model], optimizers, [])
    inner = prepared.unwrap()

    def step_prepared(_: Tensor) -> None:
        prepared.optimizers[0].step()
        prepared.optimizers[0].zero_grad()

    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)

    own = SGD([inner.first.weight], lr=0.1)

    def step_own(_: Tensor) -> None:
        own.step()
        own.zero_grad()

    hook = {"prepared": step_prepared, "own": step_own, "update": update}[way]
    inner.first.weight.register_post_accumulate_grad_hook(hook)
    try:
        for _step in range(5):
            backend.window.begin()
            prepared.backward(prepared.model(torch.ones(2, 4) + dist.get_rank()).square().mean())
            for optimizer in prepared.optimizers[way == "own" :]:
                optimizer.step()
        return "5 steps"
    except (AccumulationError, UnshardedParameterError) as error:
        return str(error)


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("prepared", "Writing while backward() runs, from a hook on a parameter"),
        ("own", "first.weight changed while backward() ran: a hook steps there"),
        ("update", "first.weight of Writing: a forward, or a hook in backward, wrote into it"),
    ],
)
def test_a_step_in_a_hook_of_backward_is_refused(run_ranks, way: str, told: str) -> None:
    for said in run_ranks(stepped_in_a_hook, way):
        assert told in said
