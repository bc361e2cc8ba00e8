"""What FSDP would train wrongly, drop, or fail on with an error about storage is refused by name."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.func import functional_call
from torch.optim import SGD

from backends.replicas import prepare_sgd, step_and_clear
from drivetrain_backends import AccumulationError, SecondDerivativeError, UnshardedParameterError
from sharded_stack import Stack, fsdp, stack, tokens


def with_other_parameters(when: str, **settings: object) -> str:
    backend, _model, prepared = prepare_sgd(fsdp(**settings), stack(0))
    if when == "later":
        prepared.backward(prepared.model(tokens(0)).square().mean())
    other = {"blocks.1.linear.weight": torch.zeros(6, 6)}
    try:
        functional_call(prepared.model, other, (tokens(0),))
        said = "computed"
    except UnshardedParameterError as error:
        said = str(error)
    output = prepared.model(tokens(0))  # the model is as it was
    backend.close()
    return said if torch.allclose(output, stack(0)(tokens(0))) else "changed"


def functional_calls() -> list[str]:
    return [
        with_other_parameters("first"),
        with_other_parameters("later"),
        with_other_parameters("later", strategy="no_shard"),
        with_other_parameters("later", prefetch=1),
    ]


def test_a_functional_call_with_other_parameters_is_refused(run_ranks) -> None:
    for said in run_ranks(functional_calls):
        for one in said:
            assert "a forward of Stack with another tensor in the place of blocks.1.linear.weight" in one


class Critic(Stack):
    """A stack that takes embedded inputs, (items, width); a gradient penalty asks for their gradient."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def penalised() -> list[str]:
    said: list[str] = []
    for strategy in ("full_shard", "shard_grad_op", "no_shard"):
        backend, _model, prepared = prepare_sgd(fsdp(strategy=strategy), Critic())
        x = torch.ones(4, 6, requires_grad=True)
        output = prepared.model(x + dist.get_rank())
        (slope,) = torch.autograd.grad(output.sum(), x, retain_graph=True)  # one derivative is as ever
        try:
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            said.append(f"{slope.norm()}")
        except SecondDerivativeError as error:
            said.append(str(error))
        backend.close()
    return said


def test_a_gradient_penalty_is_refused(run_ranks) -> None:
    for said in run_ranks(penalised):
        for one in said:
            assert "a backward through Critic with create_graph=True" in one


class Direct(Stack):
    """A stack that runs a block past its call, as some of transformers' classes do."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block.forward(x)
        return self.head(x)


def called_directly() -> tuple[str, bool]:
    backend, _model, prepared = prepare_sgd(fsdp(wrap=("Block",)), Direct())
    with pytest.raises(UnshardedParameterError) as caught:
        prepared.model(tokens(0))
    backend.close()
    whole, _model, prepared = prepare_sgd(fsdp(min_num_params=10**6), Direct())
    computes = bool(prepared.model(tokens(0)).isfinite().all())
    whole.close()
    return str(caught.value), computes


def test_a_block_that_is_run_past_its_call_is_refused_with_ways_out(run_ranks) -> None:
    for said, computes in run_ranks(called_directly):
        assert "a forward of Direct used parameters of a block that is not gathered" in said
        assert "Blocks are Block: have the model call them" in said
        assert computes


class Writing(nn.Module):
    """Two layers, of which the first writes into its weight in forward, once there is a way."""

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


def trained(way: Callable[[nn.Parameter], object] | None, *, first: int = 0, **settings: object) -> str:
    """Train 5 steps, with a forward that writes from step `first` on; at -1 in an evaluation before all steps."""
    backend, model, prepared = prepare_sgd(fsdp(**settings), Writing(None))
    try:
        if first < 0:
            model.way = way
            with torch.no_grad():
                prepared.model.eval()(torch.ones(2, 4))
            prepared.model.train()
            model.way = None
        for number in range(5):
            if number == first:
                model.way = way
            backend.window.begin()
            prepared.backward(prepared.model(torch.ones(2, 4) + dist.get_rank()).square().mean())
            step_and_clear(prepared)
        return f"{number + 1} steps"
    except UnshardedParameterError as error:
        return f"step {number}: {error}"
    finally:
        backend.close()


def each_way() -> dict[str, str]:
    found = {
        f"{way.__name__} {strategy} {first}": trained(way, strategy=strategy, first=first)
        for way in (clamped, clamped_through_data, assigned, copied)
        for strategy in ("full_shard", "shard_grad_op")
        for first in (-1, 0, 2)
    }
    found["none"] = trained(None)
    return found


def test_a_forward_that_writes_into_a_weight_is_refused_by_name(run_ranks) -> None:
    for found in run_ranks(each_way):
        assert found.pop("none") == "5 steps"
        for way, said in found.items():
            step = max(0, int(way.split()[-1]))
            assert said.startswith(f"step {step}: first.weight of Writing: a forward"), (way, said)


def saved_after_a_write() -> str:
    _backend, _model, prepared = prepare_sgd(fsdp(), Writing(clamped_through_data))
    with torch.no_grad():
        prepared.model(torch.ones(2, 4))
    with pytest.raises(UnshardedParameterError, match=r"first\.weight of Writing: a forward"):
        prepared.state_dict()
    prepared.state_dict()
    return "refused once"


def test_no_state_is_read_after_a_write_that_was_dropped(run_ranks) -> None:
    assert set(run_ranks(saved_after_a_write)) == {"refused once"}


def stepped_before_backward(way: str) -> str:
    backend, _model, prepared = prepare_sgd(fsdp(), Writing(None))

    def step(*_: object) -> None:
        step_and_clear(prepared)

    if "in forward" in way:
        prepared.unwrap().register_forward_hook(step)
    try:
        for _ in range(3):
            backend.window.begin()
            inputs = (1, 2)[: 1 if "in forward" in way else 2]
            losses = [prepared.model(torch.ones(2, 4) * k + dist.get_rank()).sum() for k in inputs]
            prepared.backward(losses[0] if way == "between losses" else sum(losses))
            if "in forward" not in way:
                step()
            if way == "between losses":
                backend.window.begin()
                prepared.backward(losses[1])
        return "3 steps"
    except UnshardedParameterError as error:
        return str(error)
    finally:
        backend.close()


@pytest.mark.parametrize("way", ["in forward", "between losses"])
def test_a_step_between_a_forward_and_its_backward_is_refused(run_ranks, way: str) -> None:
    for said in run_ranks(stepped_before_backward, way):
        assert "Writing was stepped between a forward and its backward" in said


def test_losses_are_added_up_before_the_step(run_ranks) -> None:
    assert set(run_ranks(stepped_before_backward, "after")) == {"3 steps"}


def stepped_in_a_hook(way: str) -> str:
    backend = fsdp()
    model = Writing(None)
    optimizers = [SGD(model.first.parameters(), lr=0.1), SGD(model.second.parameters(), lr=0.1)]
    (prepared,) = backend.prepare([model], optimizers, [])
    inner = prepared.unwrap()

    def step_prepared(_: Tensor) -> None:
        step_and_clear(prepared)

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


class Rows(nn.Module):
    """A table of rows and a complex factor."""

    def __init__(self, *, sparse: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=sparse)
        self.factor = nn.Parameter(torch.ones(2, dtype=dtype))


def refused_parameters() -> list[str]:
    said: list[str] = []
    for sparse, dtype in ((True, torch.float32), (False, torch.complex64), (False, torch.float32)):
        backend = fsdp()
        model = Rows(sparse=sparse, dtype=dtype)
        if not sparse and dtype is torch.float32:
            register_multi_grad_hook(list(model.parameters()), lambda _: None)
        before = model.table.weight
        with pytest.raises(ValueError, match="use backend='ddp'") as caught:
            backend.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
        assert model.table.weight is before
        said.append(str(caught.value))
        backend.close()
    return said


def test_parameters_that_cannot_be_divided_are_refused_by_name(run_ranks) -> None:
    for sparse, of_complex, hooked in run_ranks(refused_parameters):
        assert "Rows: table.weight gets sparse gradients (Embedding(sparse=True))" in sparse
        assert "Rows: factor is complex (complex64)" in of_complex
        assert "Rows: factor has a hook of register_multi_grad_hook, which would never run" in hooked
