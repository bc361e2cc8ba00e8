"""Ranks along an axis that nothing divides yet are copies: they train as the ranks that read other data do."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain_backends import BackendContract, DDPBackend, FSDPBackend
from drivetrain_backends.gradients.accumulation import AccumulationWindow
from drivetrain_precision import choose_policy
from drivetrain_state import ParallelDims, gather
from plain_loop.backends import context

BACKENDS = {"ddp": DDPBackend, "fsdp": FSDPBackend}
MESHES = {
    "data 2 x whole layers 2": ParallelDims(data=2, tensor=2, tensor_styles={"*": "whole"}),
}
CASES = ("count, accumulated, clipped, uneven tails, 20 steps", "fp16, count, accumulated, clipped")


def check(kind: str, mesh: str, is_whole: bool) -> int:
    class Contract(BackendContract):
        backend = BACKENDS[kind]

    with context(parallelism=MESHES[mesh]) as where:
        if is_whole:
            return len(Contract().check_all(where))
        for name in CASES:
            Contract().check_case(where, name, Contract.cases[name])
        return len(CASES)


@pytest.mark.parametrize("is_whole", [False, True], ids=["two cases", "whole"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.default_cases("ddp-data 2 x whole layers 2-two cases")
def test_the_contract_holds_on_a_mesh(run_ranks, kind: str, mesh: str, is_whole: bool) -> None:
    run_ranks(check, kind, mesh, is_whole, num_processes=4, timeout_seconds=170)


def first_weights(kind: str) -> list[list[float]]:
    with context(parallelism=MESHES["data 2 x whole layers 2"]) as where:
        torch.manual_seed(where.topology.rank)
        model = nn.Sequential(nn.Linear(2, 2))
        backend = BACKENDS[kind](where, choose_policy("no", where.device), window=AccumulationWindow(1))
        (prepared,) = backend.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
        with prepared.gathered():
            found = gather(where, model[0].weight.detach()[None].clone())
        backend.close()
        return found.flatten(1).tolist()


@pytest.mark.parametrize("kind", BACKENDS)
def test_models_that_were_built_differently_begin_with_rank_0s_weights(run_ranks, kind: str) -> None:
    torch.manual_seed(0)
    expected = nn.Linear(2, 2).weight.flatten().tolist()
    assert run_ranks(first_weights, kind, num_processes=4)[0] == [expected] * 4
