"""Calls that FSDP would answer wrongly, or with an error about storage, are refused by name."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import functional_call

from backends.replicas import prepare_sgd
from drivetrain_backends import SecondDerivativeError, UnshardedParameterError
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


def each_way() -> list[str]:
    return [
        with_other_parameters("first"),
        with_other_parameters("later"),
        with_other_parameters("later", strategy="no_shard"),
        with_other_parameters("later", prefetch=1),
    ]


def test_a_functional_call_with_other_parameters_is_refused(run_ranks) -> None:
    for said in run_ranks(each_way):
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
    backend, model, prepared = prepare_sgd(fsdp(wrap=("Block",)), Direct())
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
