"""Models whose sequences ranks divide train as whole ones under every strategy."""

import pytest

from drivetrain_backends import BackendContract, DDPBackend, FSDPBackend, SingleBackend
from drivetrain_state import ParallelDims
from plain_loop.backends import context
from sequence_layer import SequenceLayer

BACKENDS = {"ddp": DDPBackend, "fsdp": FSDPBackend, "single": SingleBackend}
MESHES = {
    "context 2": ParallelDims(context=2),
    "context 3": ParallelDims(context=3),
    "data 2 x context 2": ParallelDims(data=2, context=2),
    "shard 2 x context 2": ParallelDims(shard=2, context=2),
    "context 2 x tensor 2": ParallelDims(context=2, tensor=2),
    "tensor 2": ParallelDims(tensor=2, sequence=True),
    "shard 2 x tensor 2": ParallelDims(shard=2, tensor=2, sequence=True),
}
NUM_RANKS = {"context 2": 2, "context 3": 3, "tensor 2": 2}
CASES = ("count, accumulated, clipped, uneven tails, 20 steps", "tied weights")


def contract(kind: str, mesh: str, is_whole: bool) -> None:
    class Contract(BackendContract):
        backend = BACKENDS[kind]
        layer = SequenceLayer

    with context(parallelism=MESHES[mesh]) as where:
        if is_whole:
            Contract().check_all(where)
        for name in () if is_whole else CASES:
            Contract().check_case(where, name, Contract.cases[name])


@pytest.mark.parametrize("is_whole", [False, True], ids=["two cases", "whole"])
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("ddp", "context 2"),
        ("fsdp", "context 2"),
        ("ddp", "context 3"),
        ("ddp", "data 2 x context 2"),
        ("fsdp", "shard 2 x context 2"),
        ("ddp", "context 2 x tensor 2"),
        ("fsdp", "context 2 x tensor 2"),
        ("single", "tensor 2"),
        ("fsdp", "shard 2 x tensor 2"),
    ],
)
@pytest.mark.default_cases("ddp-context 2-two cases", "single-tensor 2-two cases")
def test_the_contract_holds_on_divided_sequences(run_ranks, kind: str, mesh: str, is_whole: bool) -> None:
    run_ranks(contract, kind, mesh, is_whole, num_processes=NUM_RANKS.get(mesh, 4), timeout_seconds=170)
