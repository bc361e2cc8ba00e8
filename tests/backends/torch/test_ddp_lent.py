"""Gradients of replicas on which a program steps by itself: averaged, without a prepared optimizer."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from backends.replicas import ddp_backend
from drivetrain_backends import (
    AccumulationError,
    BackwardOptions,
    DDPBackend,
    PairingError,
    SingleBackend,
    SupportsManualSteps,
)


def made(mode: str = "no", **settings: object) -> DDPBackend:
    return ddp_backend(mode, **settings)


def trained(reduce: str | None) -> torch.Tensor:
    backend = made(reduce=reduce)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    (prepared,) = backend.prepare([model], [], [])
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(3):
        with prepared.no_sync():
            backend.backward_alone(prepared.model(torch.full((2, 3), 1.0 + dist.get_rank())).square().mean())
        output = prepared.model(torch.full((2, 3), float(step + dist.get_rank()))).mean()
        backend.backward_alone(output, options=BackwardOptions(retain_graph=True))
        backend.backward_alone(output * dist.get_rank())  # which the reducer does not see
        optimizer.step()
        optimizer.zero_grad()
    backend.close()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def expected() -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(2):
            output = model(torch.full((2, 3), float(step + rank))).mean()
            loss = model(torch.full((2, 3), 1.0 + rank)).square().mean() + output + output * rank
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def refused() -> list[str]:
    said: list[str] = []
    backend = made()
    model, foreign = nn.Linear(1, 1), nn.Linear(1, 1)
    with pytest.raises(AccumulationError, match="before prepare"):
        backend.backward_alone(model(torch.ones(1, 1)).sum())
    (prepared,) = backend.prepare([model], [], [])
    for loss, options in (
        (foreign(torch.ones(1, 1)).sum(), BackwardOptions()),
        (prepared.model(torch.ones(1, 1)).sum(), BackwardOptions(create_graph=True)),
    ):
        try:
            backend.backward_alone(loss, options=options)
        except (PairingError, AccumulationError) as error:
            said.append(str(error))
    backend.close()
    return said


def test_gradients_are_those_of_all_ranks_whatever_the_reducer_saw(run_ranks) -> None:
    for reduce in (None, "at_close"):
        for found in run_ranks(trained, reduce):
            torch.testing.assert_close(found, expected())


def test_a_foreign_loss_and_gradients_with_a_graph_are_refused(run_ranks) -> None:
    for foreign, graph in run_ranks(refused):
        assert "reaches no prepared model" in foreign
        assert "backward(create_graph=True): DDP averages gradients in place" in graph


def test_replicas_lend_their_gradients() -> None:
    assert issubclass(DDPBackend, SupportsManualSteps)
    assert not issubclass(SingleBackend, SupportsManualSteps)
