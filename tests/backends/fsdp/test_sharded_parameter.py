"""What a program's own code does with sharded parameters means the full ones, or is refused by name."""

import io
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim import SGD

from backends.replicas import prepare_sgd, step_and_clear
from sharded_stack import fsdp, loss_of, stack, weights

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


def plain(term: Term | None, edit: Edit | None) -> dict[str, Tensor]:
    model = stack(0)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.stack([loss_of(model, rank) for rank in range(2)]).mean()
        (loss if term is None else loss + 0.1 * term(model)).backward()
        optimizer.step()
        if edit is not None:
            edit(model)
    return dict(model.state_dict())


def sharded(term: Term | None, edit: Edit | None, *, first: bool, **settings: object) -> dict[str, Tensor]:
    """Train with a term in the loss, before the forward or after it, and an edit after each step."""
    backend, _model, prepared = prepare_sgd(fsdp(**settings), stack(0))
    for _ in range(3):
        backend.window.begin()
        early = 0.1 * term(prepared.unwrap()) if term is not None and first else 0.0
        loss = loss_of(prepared.model, dist.get_rank()) + early
        prepared.backward(loss + 0.1 * term(prepared.unwrap()) if term is not None and not first else loss)
        step_and_clear(prepared)
        if edit is not None:
            edit(prepared.unwrap())
    found = weights(prepared)
    backend.close()
    return found


def off(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def each_way() -> dict[str, float]:
    found = {
        f"{term.__name__} {'before' if first else 'after'}": off(
            sharded(term, None, first=first, wrap=("Block",)), plain(term, None)
        )
        for term in TERMS
        for first in (False, True)
    }
    found |= {
        f"l2 {strategy}": off(sharded(l2, None, first=False, strategy=strategy), plain(l2, None))
        for strategy in ("shard_grad_op", "no_shard", "full_shard")
    }
    edits = {
        edit.__name__: off(sharded(None, edit, first=False, wrap=("Block",)), plain(None, edit))
        for edit in EDITS
    }
    return found | edits


@pytest.mark.slow
def test_losses_of_parameters_and_assigned_values_train_as_in_a_plain_loop(run_ranks) -> None:
    for found in run_ranks(each_way):
        assert found == dict.fromkeys(found, pytest.approx(0, abs=1e-6))


def said_of(act: Callable[[], object]) -> str:
    try:
        act()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def refused() -> dict[str, str]:
    backend, _model, prepared = prepare_sgd(fsdp(wrap=("Block",)), stack(0))
    inner: Any = prepared.unwrap()
    prepared.backward(loss_of(prepared.model, 0))
    step_and_clear(prepared)
    weight = inner.blocks[0].linear.weight

    def assign() -> None:
        weight.data = torch.zeros(2, 2)

    def product() -> None:
        with torch.no_grad():
            weight.addmm_(torch.ones(6, 6), torch.ones(6, 6))

    found = {
        "shape": said_of(assign),
        "product": said_of(product),
        "grad": said_of(lambda: torch.autograd.grad(loss_of(prepared.model, 0), list(inner.parameters()))),
        "save": said_of(lambda: torch.save(inner.state_dict(), io.BytesIO())),
        "storage": said_of(lambda: [p.untyped_storage() for p in inner.state_dict().values()]),
        "save parameters": said_of(lambda: torch.save(dict(inner.named_parameters()), io.BytesIO())),
        "copied state": said_of(lambda: deepcopy(inner.state_dict())),
        "node": said_of(lambda: register_multi_grad_hook(list(inner.parameters()), lambda _: None)),
        "same dtype": said_of(lambda: inner.to(torch.float32)),
    }
    prepared.model.eval()
    with torch.no_grad():
        found["after"] = said_of(lambda: loss_of(prepared.model, 0))
    backend.close()
    return found


CONVERSIONS: dict[str, Edit] = {
    "double": lambda model: model.double(),
    "half": lambda model: model.half(),
    "part": lambda model: model.blocks[1].to(torch.bfloat16),
    "inside a block": lambda model: model.blocks[1].linear.double(),
}


def step(prepared: Any) -> None:
    prepared.backward(loss_of(prepared.model, dist.get_rank()))
    step_and_clear(prepared)


def converted(mode: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, convert in CONVERSIONS.items():
        _backend, _model, prepared = prepare_sgd(fsdp(mode, wrap=("Block",)), stack(0))

        step(prepared)
        convert(prepared.unwrap())
        found[name] = said_of(partial(step, prepared))
    return found


@pytest.mark.parametrize("mode", ["no", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_sharded_model_that_is_converted_is_refused_at_its_next_step(run_ranks, mode: str) -> None:
    for found in run_ranks(converted, mode):
        for way, said in found.items():
            assert "was converted from float32 to " in said, (way, said)


def test_what_shards_cannot_do_is_refused_by_the_parameters_name(run_ranks) -> None:
    for found in run_ranks(refused):
        assert (
            "blocks.0.linear.weight, of float32 (6, 6) on cpu, is assigned float32 (2, 2)" in found["shape"]
        )
        assert "addmm_() of a sharded parameter, in place and with a tensor that is not" in found["product"]
        assert (
            "torch.autograd.grad(loss, model.parameters()) through a model that FSDP sharded" in found["grad"]
        )
        for case in ("save", "save parameters", "storage"):
            assert "embedding.weight is pickled or written to a file, as by torch.save(model" in found[case]
        assert (
            "the node that adds up the gradient of embedding.weight, as register_multi_grad" in found["node"]
        )
        assert found["copied state"] == found["same dtype"] == found["after"] == "done"
