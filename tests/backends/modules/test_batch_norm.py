"""Batch normalisation over all ranks: which layers change, what stays as it is, where it is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from drivetrain_backends.modules.batch_norm import (
    check_batch_norms,
    restore_batch_norms,
    synchronise_batch_norms,
)
from drivetrain_backends.optim.parameter_matching import owners
from plain_loop.backends import ddp, held, prepare_sgd, step_and_clear
from plain_loop.case import assert_same_on_all_ranks

GPU = torch.device("cuda")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, eps=0.1, momentum=None))
    return nn.Sequential(inner, nn.Flatten(), nn.BatchNorm1d(8, affine=False), nn.LayerNorm(8))


def test_layers_become_synchronised_and_all_else_is_the_same_object() -> None:
    model = net()
    modules, parameters, names = list(model.modules()), list(model.parameters()), list(model.state_dict())
    optimizer = SGD(model.parameters())
    calls = []
    model[2].register_forward_hook(lambda *_: calls.append(1))
    changed = synchronise_batch_norms([model], None)
    assert [type(m).__name__ for m in changed] == ["SyncBatchNorm", "SyncBatchNorm"]
    assert (model[0][1].eps, model[0][1].momentum, model[2].affine) == (0.1, None, False)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == names
    assert owners(optimizer, [model]) == [0]
    model.eval()(torch.ones(2, 1, 2, 2))
    assert calls == [1]


def test_evaluation_computes_what_it_computed_before_and_restoring_gives_the_classes_back() -> None:
    model, x = net().eval(), torch.randn(2, 1, 2, 2)
    expected = model(x)
    changed = synchronise_batch_norms([model], None)
    assert torch.equal(model(x), expected)
    restore_batch_norms(changed)
    assert [type(model[0][1]), type(model[2])] == [nn.BatchNorm2d, nn.BatchNorm1d]
    assert vars(model[2]).keys() == vars(nn.BatchNorm1d(8)).keys()


def test_a_model_that_is_itself_a_batch_normalisation_is_changed() -> None:
    model = nn.BatchNorm1d(2)
    synchronise_batch_norms([model], None)
    assert type(model) is nn.SyncBatchNorm


def test_layers_that_are_synchronised_already_are_left_alone() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(net())
    check_batch_norms(model, GPU)
    assert synchronise_batch_norms([model], None) == {}


def test_a_layer_with_a_forward_of_its_own_is_refused_by_name() -> None:
    class Halved(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) / 2

    with pytest.raises(ValueError, match="1 is a Halved, whose own forward SyncBatchNorm would not run"):
        check_batch_norms(nn.Sequential(nn.Linear(2, 2), Halved(2)), GPU)


@pytest.mark.ranks(2)
def test_on_the_cpu_it_is_refused_where_there_is_something_to_synchronise() -> None:
    backend, model = ddp(sync_batch_norm=True), net()
    said = "torch has no SyncBatchNorm on cpu, and 0.1 is a BatchNorm2d; leave the setting off"
    with pytest.raises(ValueError, match=said):
        backend.prepare([model], [], [])
    assert not any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    backend.prepare([nn.Linear(2, 2)], [], [])
    assert backend.applied()["sync_batch_norm"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("broadcast", [False, True])
def test_running_statistics_are_each_ranks_own_or_those_of_rank_0(broadcast: bool) -> None:
    backend, model, prepared = prepare_sgd(
        ddp(accumulation=2, broadcast_buffers=broadcast), nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
    )
    x = torch.tensor([[1.0], [3.0]]) * (1 + dist.get_rank())
    for _ in range(4):
        backend.window.begin()
        with held(backend, [prepared]):
            prepared.backward(prepared.model(x).sum())
        step_and_clear(prepared)
    trained = model[0].running_mean.item()
    with torch.no_grad():
        prepared.model.eval()(x)
    later = model[0].running_mean.item()
    assert backend.applied()["broadcast_buffers"] is broadcast
    if broadcast:
        assert (trained == later) == (dist.get_rank() == 0)  # each went on by itself in its last forward
        assert_same_on_all_ranks(later)
    else:
        assert trained == later == pytest.approx(2 * (1 + dist.get_rank()) * (1 - 0.9**4))
