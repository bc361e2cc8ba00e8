"""What a program's own code does with sharded parameters means the full ones, or is refused by name."""

import io
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim import Optimizer

from plain_loop.backends import fsdp, prepare_sgd, take_step
from plain_loop.case import Trained, assert_equal, assert_equals_plain_loop, run_plain, train
from plain_loop.stack import CASE, loss_of, stack

pytestmark = pytest.mark.ranks(2)

Term = Callable[[nn.Module], Tensor]
Edit = Callable[[nn.Module], object]


def l2(model: nn.Module) -> Tensor:
    return sum(p.pow(2).sum() for p in model.parameters())


def norms(model: nn.Module) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(p) for p in model.parameters()]).sum()


def l1_of_matrices(model: nn.Module) -> Tensor:
    return sum(p.abs().sum() for name, p in model.named_parameters() if name.endswith("weight"))


def orthogonal(model: nn.Module) -> Tensor:
    weight = dict(model.named_parameters())["blocks.0.linear.weight"]
    return (weight @ weight.T - torch.eye(6)).square().sum()


def as_one_vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).square().mean()


def near_the_start(model: nn.Module) -> Tensor:
    """Values of another model of these weights."""
    start = stack(0).state_dict()
    return sum((p - start[name] * 0.5).square().sum() for name, p in model.named_parameters())


TERMS = (l2, norms, l1_of_matrices, orthogonal, as_one_vector, near_the_start)


def clamp(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.clamp(-0.1, 0.1)


def halve(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5


def set_anew(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = torch.linspace(-0.3, 0.3, p.numel()).view(p.shape)


def from_a_vector(model: nn.Module) -> None:
    nn.utils.vector_to_parameters(torch.linspace(-0.3, 0.3, 5 * 6 * 2 + 2 * 42), model.parameters())


def load(model: nn.Module) -> None:
    model.load_state_dict(stack(3).state_dict())


def copy(model: nn.Module) -> None:
    with torch.no_grad():
        for p, q in zip(model.parameters(), stack(4).parameters(), strict=True):
            p.copy_(q)


def merge(model: nn.Module) -> None:
    """As PEFT merges an adapter: a product of full tensors is added through `data`."""
    for block in model.blocks:
        block.linear.weight.data += torch.linspace(0, 0.1, 6).outer(torch.ones(6))


def mask(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(torch.arange(p.shape[-1]) % 2)
            p.lerp_(torch.ones(p.shape), 0.1).clamp_(max=torch.full((), 0.5))


EDITS = (clamp, halve, set_anew, from_a_vector, load, copy, merge, mask)


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize(
    ("term", "settings"),
    [
        *((term, {"wrap": ("Block",)}) for term in TERMS),
        *((l2, {"strategy": strategy}) for strategy in ("shard_grad_op", "no_shard", "full_shard")),
    ],
)
def test_losses_of_parameters_train_as_in_a_plain_loop(term: Term, settings: dict, first: bool) -> None:
    """With a term of the user's module in the loss, before the forward or after it."""
    backend, inner, prepared = prepare_sgd(fsdp(**settings), stack(0))

    def loss(model: nn.Module, rank: int, number: int) -> Tensor:
        parameters = inner if model is prepared.model else model
        if first:
            return 0.1 * term(parameters) + loss_of(model, rank)
        return loss_of(model, rank) + 0.1 * term(parameters)

    case = replace(CASE, loss=loss)
    found, expected = train(case, backend, [prepared]), run_plain(case, 2)
    backend.close()
    assert_equal(Trained(weights=found.weights), Trained(weights=expected.weights), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
def test_assigned_values_train_as_in_a_plain_loop(edit: Edit) -> None:
    case = replace(CASE, after_step=lambda model, step: edit(model))
    assert_equals_plain_loop(case, fsdp(wrap=("Block",)), rtol=0, atol=1e-6)


CONVERSIONS: dict[str, Edit] = {
    "double": lambda model: model.double(),
    "half": lambda model: model.half(),
    "part": lambda model: model.blocks[1].to(torch.bfloat16),
    "inside a block": lambda model: model.blocks[1].linear.double(),
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("mode", ["no", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_sharded_model_that_is_converted_is_refused_at_its_next_step(mode: str, conversion: str) -> None:
    _, inner, prepared = prepare_sgd(fsdp(mode, wrap=("Block",)), stack(0))
    take_step(prepared, loss_of(prepared.model, dist.get_rank()))
    CONVERSIONS[conversion](inner)
    with pytest.raises(RuntimeError, match="was converted from float32 to "):
        take_step(prepared, loss_of(prepared.model, dist.get_rank()))


class CompiledHalving(Optimizer):
    """Steps in a compiled function, as torchao's optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})
        self._halve = torch.compile(lambda p: p.mul_(0.5), backend="aot_eager", fullgraph=True, dynamic=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for p in self.param_groups[0]["params"]:
            self._halve(p.detach())


@pytest.mark.slow
def test_a_compiled_step_takes_sharded_parameters() -> None:
    """Torch asserts in each call that a tensor is of the class that it traced."""
    backend, inner = fsdp(), stack(0)
    (prepared,) = backend.prepare([inner], [CompiledHalving(inner.parameters())], [])
    expected = {name: p.full_tensor().detach() * 0.5 for name, p in inner.named_parameters()}
    take_step(prepared, loss_of(prepared.model, dist.get_rank()))
    found = {name: p.full_tensor().detach() for name, p in inner.named_parameters()}
    backend.close()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def assign(model: Any) -> None:
    model.blocks[0].linear.weight.data = torch.zeros(2, 2)


def multiply(model: Any) -> None:
    with torch.no_grad():
        model.blocks[0].linear.weight.addmm_(torch.ones(6, 6), torch.ones(6, 6))


PICKLED = r"embedding\.weight is pickled or written to a file, as by torch\.save\(model"
REFUSED: dict[str, tuple[Edit, str]] = {
    "shape": (assign, r"0\.linear\.weight, of float32 \(6, 6\) on cpu, is assigned float32 \(2, 2\)"),
    "product": (multiply, r"addmm_\(\) of a sharded parameter, in place and with a tensor that is not"),
    "grad": (
        lambda model: torch.autograd.grad(loss_of(model, 0), list(model.parameters())),
        r"torch\.autograd\.grad\(loss, model\.parameters\(\)\) through a model that FSDP sharded",
    ),
    "save": (lambda model: torch.save(model.state_dict(), io.BytesIO()), PICKLED),
    "storage": (lambda model: [p.untyped_storage() for p in model.state_dict().values()], PICKLED),
    "save parameters": (lambda model: torch.save(dict(model.named_parameters()), io.BytesIO()), PICKLED),
    "node": (
        lambda model: register_multi_grad_hook(list(model.parameters()), lambda _: None),
        r"the node that adds up the gradient of embedding\.weight, as register_multi_grad",
    ),
}


def test_what_shards_cannot_do_is_refused_by_the_parameters_name() -> None:
    _, inner, prepared = prepare_sgd(fsdp(wrap=("Block",)), stack(0))
    take_step(prepared, loss_of(prepared.model, 0))
    for act, said in REFUSED.values():
        with pytest.raises((RuntimeError, TypeError, ValueError), match=said):
            act(inner)
    deepcopy(inner.state_dict())
    inner.to(torch.float32)  # which it is already
    prepared.model.eval()
    with torch.no_grad():
        loss_of(prepared.model, 0)
