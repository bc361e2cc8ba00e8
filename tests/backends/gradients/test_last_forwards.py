"""Which layer is named where a gradient is not finite: forwards that are run again after the fact."""

import copy
import gc
import re
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain_backends import NonFiniteGradientError
from plain_loop.backends import backend_of, held, prepare_sgd, step_and_clear, take_step


class Log(nn.Module):
    """The logarithm, whose value at 0 is an infinity."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log()


class Net(nn.Module):
    """Layers of which `encoder.2` is the first whose output may not be finite."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.encoder = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), Log())
        self.head = nn.Linear(2, 1)
        with torch.no_grad():
            self.encoder[0].weight.fill_(0.0)
            self.encoder[0].bias.fill_(1.0)

    def forward(self, x: Tensor, *, zero: bool) -> Tensor:
        """Map (num_samples, 2) to (num_samples, 1); with `zero`, by a logarithm of zeros."""
        hidden = self.encoder[0](self.norm(x))
        return self.head(self.encoder[2](self.encoder[1](hidden * (not zero)) + (0.0 if zero else 1.0)))


def error_of(
    kind: str = "single",
    *,
    zeros: tuple[bool, ...] = (False, True),
    factor: float = 1.0,
    accumulation: int = 1,
    compiles: str | None = None,
    mode: str = "no",
) -> str:
    """Return the error of a run in which the forwards of some micro-batches hold zeros, on the last rank alone."""
    model = Net()
    if compiles is not None:
        model.get_submodule(compiles).compile(backend="eager")
    backend, _, prepared = prepare_sgd(
        backend_of(kind, mode, accumulation=accumulation, on_nonfinite="raise"), model
    )
    is_last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    with pytest.raises(NonFiniteGradientError) as caught:  # noqa: PT012 a loop
        for zero in zeros:
            backend.window.begin()
            with held(backend, [prepared]):
                loss = prepared.model(torch.randn(4, 2), zero=zero and is_last).float().sum()
                prepared.backward(loss * (factor if zero else 1.0))
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            state = torch.get_rng_state()
            step_and_clear(prepared)
    assert torch.equal(torch.get_rng_state(), state)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name])
    assert not any(module._forward_hooks for module in model.encoder.modules())
    return str(caught.value)


NAMED = "Nothing was stepped. The first value that was not finite is the output of encoder.2 (Log, float32), whose"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("compiles", [None, "encoder.2", ""])
def test_the_layer_of_the_first_value_is_named_on_one_device_also_in_what_is_compiled(
    compiles: str | None,
) -> None:
    assert NAMED in error_of(compiles=compiles)


def test_the_layer_is_named_under_autocast() -> None:
    assert NAMED.replace("float32", "bfloat16") in error_of(mode="bf16")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_all_ranks_name_the_layer_and_the_rank_where_it_was(kind: str) -> None:
    said = error_of(kind)
    assert NAMED in said
    assert " inputs were finite, on rank 1; on_nonfinite='skip'" in said


def test_what_a_loss_made_is_not_said_of_the_forward() -> None:
    model = Net()
    _, _, prepared = prepare_sgd(backend_of("single", on_nonfinite="raise"), model)
    prepared.backward(prepared.model(torch.randn(4, 2), zero=False).sum() * torch.nan)
    said = r"The forward, run again in eager mode, was finite: it arose in the loss or backward"
    with pytest.raises(NonFiniteGradientError, match=said):
        prepared.optimizers[0].step()


@pytest.mark.parametrize("kind", ["single", pytest.param("ddp", marks=pytest.mark.ranks(2))])
def test_of_several_forwards_the_last_is_run_again_and_the_error_says_so(kind: str) -> None:
    said = error_of(kind, zeros=(False, False, True, False), accumulation=2)
    assert (
        "The last of 2 forwards, run again in eager mode, was finite: it arose in an earlier one, the loss"
        in said
    )
    assert NAMED in error_of(kind, zeros=(False, False, False, True), accumulation=2)


def two_models() -> tuple[nn.Module, nn.Module]:
    """Return a generator, and a critic whose second layer is the first that is not finite."""
    generator, critic = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), Log(), nn.Linear(2, 1))
    with torch.no_grad():
        generator[0].weight.fill_(0.0)
        generator[0].bias.fill_(0.0)
        critic[0].bias.fill_(0.0)
    return generator, critic


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_layer_of_another_prepared_model_is_named_with_its_class(is_frozen: bool) -> None:
    generator, critic = two_models()
    critic.requires_grad_(not is_frozen)
    backend, _, prepared = prepare_sgd(backend_of("single", on_nonfinite="raise"), generator)
    (judge,) = backend.prepare(
        [critic], [] if is_frozen else [torch.optim.SGD(critic.parameters(), lr=0.1)], []
    )
    loss = judge.model(prepared.model(torch.ones(3, 2))).sum()
    backend.backward_of([prepared], loss)
    said = "The first value that was not finite is the output of Sequential 2.1 (Log"
    with pytest.raises(NonFiniteGradientError, match=re.escape(said)):
        prepared.optimizers[0].step()


class Holding(torch.autograd.Function):
    """The identity, whose graph holds an object."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: object) -> Tensor:
        ctx.held = held
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def test_a_graph_of_another_model_ends_with_its_step() -> None:
    generator, critic = two_models()
    backend, _, prepared = prepare_sgd(backend_of("single", on_nonfinite="raise"), generator)
    (judge,) = backend.prepare([critic.requires_grad_(False)], [], [])
    held = nn.Module()  # by the graph alone
    is_kept, made = ref(held), Holding.apply(prepared.model(torch.ones(3, 2)), held)
    del held
    gc.disable()
    try:
        take_step(prepared, judge.model(made + 1.0).sum())
        del made
        assert is_kept() is None
    finally:
        gc.enable()


class Force(nn.Module):
    """The gradient of an energy with respect to its input, and the logarithm of its square."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.log = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), Log()

    def forward(self, x: Tensor) -> Tensor:
        """Map (num_samples, 2) to the same shape."""
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return self.log((force * 0.0).square())


def test_a_forward_that_takes_gradients_itself_is_run_again() -> None:
    _, _, prepared = prepare_sgd(backend_of("single", on_nonfinite="raise"), Force())
    prepared.backward(prepared.model(torch.ones(3, 2)).sum())
    with pytest.raises(NonFiniteGradientError, match=r"the output of log \(Log, float32\)"):
        prepared.optimizers[0].step()


def test_a_forward_draws_the_same_random_numbers_again() -> None:
    said = list[str]()
    for seed in range(8):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), Log())
        _, _, prepared = prepare_sgd(backend_of("single", on_nonfinite="raise"), model)
        with torch.no_grad():
            model[0].weight.fill_(1.0)
            model[0].bias.fill_(1.0)
        prepared.backward(prepared.model(torch.ones(1, 2)).sum())
        torch.rand(3)  # as a loop may draw before its step
        try:
            step_and_clear(prepared)
        except NonFiniteGradientError as error:
            said.append(str(error))
    assert said
    assert all("the output of 2 (Log, float32)" in each for each in said)


class FailsAgain(nn.Linear):
    """A layer whose second forward is an error."""

    num_forwards = 0

    def forward(self, input: Tensor) -> Tensor:
        self.num_forwards += 1
        if self.num_forwards == 2:
            raise ValueError("a second forward")
        return super().forward(input) * torch.nan


def test_an_error_of_a_forward_that_is_run_again_does_not_hide_the_first_one() -> None:
    _, _, prepared = prepare_sgd(backend_of("single", on_nonfinite="raise"), FailsAgain(2, 1))
    prepared.backward(prepared.model(torch.ones(1, 2)).sum())
    said = (
        r"^the gradients of all 2 parameters .* Its layer is not known, as the last forward, run again, ended in "
        "ValueError: a second forward"
    )
    with pytest.raises(NonFiniteGradientError, match=said):
        prepared.optimizers[0].step()


@pytest.mark.parametrize("treatment", ["warn", "skip", "raise"])
def test_a_batch_is_kept_until_the_step_and_only_for_an_error_and_by_no_copy(treatment: Any) -> None:
    _, _, prepared = prepare_sgd(backend_of("single", on_nonfinite=treatment), nn.Linear(2, 1))
    gc.disable()
    try:
        batch = torch.ones(1, 2)
        is_kept = ref(batch)
        loss = prepared.model(batch).sum()
        assert type(copy.deepcopy(prepared.model)) is nn.Linear
        prepared.backward(loss)
        del batch, loss
        assert (is_kept() is not None) == (treatment == "raise")
        step_and_clear(prepared)
        assert is_kept() is None
    finally:
        gc.enable()


def test_a_forward_without_gradients_takes_no_place() -> None:
    _, _, prepared = prepare_sgd(backend_of("single", on_nonfinite="raise"), Net())
    take_step(prepared, prepared.model(torch.randn(4, 2), zero=False).sum())
    prepared.backward(prepared.model(torch.randn(4, 2), zero=True).sum())
    with torch.no_grad():
        prepared.model(torch.randn(4, 2), zero=False)
    with pytest.raises(NonFiniteGradientError) as caught:
        prepared.clip(norm=1.0)
    assert NAMED in str(caught.value)
