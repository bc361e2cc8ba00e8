"""ReplicatedWeights that have drifted apart are told of, by the first weight that differs and its ranks."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from drivetrain_backends import DriftedReplicasError
from drivetrain_backends.modules.replicated_weights import ReplicatedWeights, check_replicas, checksum
from plain_loop.backends import ddp, take_step

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int8]


@given(st.sampled_from(DTYPES), st.integers(1, 9), st.integers(1, 9), st.data())
def test_a_checksum_changes_with_any_element_and_with_no_layout(dtype, rows: int, columns: int, data) -> None:
    values = torch.arange(rows * columns).reshape(rows, columns).to(dtype)
    whole = checksum(values)
    assert whole.dtype is torch.int64
    padded = torch.zeros(rows, columns + 1, dtype=dtype)
    padded[:, 1:] = values  # of other strides, and at other addresses
    assert checksum(padded[:, 1:]) == checksum(values.t().contiguous().t()) == whole
    changed = values.clone()
    changed[data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))] += 1
    assert checksum(changed) != whole


def test_a_checksum_of_no_elements_and_of_one_is_an_integer() -> None:
    assert checksum(torch.empty(0)).item() == 0
    assert checksum(torch.tensor(1.0)).item() == 0x3F800000


def test_replicas_are_read_once_and_then_released() -> None:
    weight = torch.ones(3)
    replicas = ReplicatedWeights(
        {weight: "weight of Linear", torch.zeros(0): "bias of Linear"}, torch.device("cpu"), [[0]]
    )
    assert len(replicas.tensors) == 2
    sums = replicas.sums()
    weight.zero_()
    assert sums.tolist() == replicas.sums().tolist() == [checksum(torch.ones(3)).item(), 0]
    assert not replicas.tensors


@pytest.mark.parametrize(
    ("by_rank", "said"),
    [
        ([[1, 2], [1, 3]], "b differs on ranks 1 from rank 0. Weights"),
        (
            [[1, 2], [3, 2], [1, 2], [3, 4]],
            "a differs on ranks 1, 3 from rank 0, and 1 other weights. Weights",
        ),
    ],
)
def test_the_first_weight_that_differs_is_named_with_its_ranks(by_rank: list[list[int]], said: str) -> None:
    names = {torch.ones(1): "a", torch.ones(1): "b"}
    replicas = ReplicatedWeights(names, torch.device("cpu"), [range(len(by_rank))])
    told = replicas.explain(by_rank)
    assert told.startswith(f"the replicas have drifted apart: {said}")
    with pytest.raises(DriftedReplicasError, match="gathered"):
        replicas.refuse(told)


def test_ranks_are_compared_with_those_that_hold_the_same_weights() -> None:
    replicas = ReplicatedWeights({torch.ones(1): "a"}, torch.device("cpu"), [(0, 2), (1, 3)])
    told = replicas.explain([[1], [5], [1], [6]])
    assert told.startswith("the replicas have drifted apart: a differs on ranks 3 from rank 1.")


@pytest.mark.ranks(2)
def test_a_weight_that_drifted_is_named_when_asked_and_every_so_many_steps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    teacher = nn.Linear(2, 2).requires_grad_(False)
    backend = ddp(check_drift_every=2, broadcast_buffers=False)
    prepared, _ = backend.prepare([model, teacher], [SGD(model.parameters(), lr=0.1)], [])

    def step() -> None:
        take_step(prepared, prepared.model(torch.randn(4, 2) * (1 + dist.get_rank())).square().mean())

    def check() -> None:
        check_replicas(backend.context, [model, teacher])

    check()
    step()
    step()  # buffers differ, which is nothing
    with torch.no_grad():
        model[2].weight[0, 1] += 1e-6 * dist.get_rank()
        model[2].bias += 1e-6 * dist.get_rank()
    step()
    said = r"^the replicas have drifted apart: 2\.weight of Sequential differs on ranks 1 from rank 0, and 1 other"
    for act in (step, check):
        with pytest.raises(DriftedReplicasError, match=said) as caught:
            act()
        assert "gathered(model, write=True)" in str(caught.value)
    with prepared.gathered(write=True):
        pass
    check()
    with torch.no_grad():
        teacher.weight += dist.get_rank()
    with pytest.raises(DriftedReplicasError, match="weight of Linear differs on ranks 1"):
        check()
    replicas = backend.replicas()
    assert replicas is not None
    parameters = [each for one in (model, teacher) for each in one.parameters()]
    assert [each.shape for each in replicas.tensors] == [each.shape for each in parameters]


class Choosy(nn.Linear):
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield self.bias


@pytest.mark.ranks(2)
def test_what_rank_0_writes_reaches_weights_that_a_parameters_of_the_model_leaves_out() -> None:
    model = Choosy(2, 1)
    (prepared,) = ddp().prepare([model], [], [])
    with prepared.gathered(write=True), torch.no_grad():
        for weight in (model.weight, model.bias):
            weight.fill_(1.0 + dist.get_rank())
    assert [*model.weight[0].tolist(), model.bias.item()] == [1.0, 1.0, 1.0]
