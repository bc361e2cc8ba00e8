from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
from torch import nn

from drivetrain_memory import MemoryBreakdown, ModuleMemory, memory_breakdown, record_activations


class Tied(nn.Module):
    """An embedding whose weight is the head's too, a view of a buffer, and a buffer of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.head = nn.Linear(8, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.zeros(64))
        self.register_buffer("part", self.get_buffer("table")[:16])
        self.head.register_buffer("same", self.get_buffer("table"))


def test_parameters_gradients_states_and_buffers_count_once() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.Linear(20, 5, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(4, 10)).sum().backward()
    optimizer.step()
    found = memory_breakdown(model, optimizer)
    parameters = 4 * sum(one.numel() for one in model.parameters())
    buffers = sum(one.nbytes for one in model.buffers())
    assert found.totals == {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer_states": parameters,
        "buffers": buffers,
    }
    first = found.modules[0]
    assert (first.name, first.kind, first.parameters) == ("0", "Linear", 4 * (200 + 20))
    assert sum(module.total for module in found.modules) == sum(found.totals.values())
    assert found.largest(1) == (first,)


def test_tied_weights_views_and_shared_buffers_count_where_they_come_first() -> None:
    found = memory_breakdown(Tied())
    assert found.totals == {"parameters": 4 * 800, "buffers": 4 * 64}
    assert dict(found.shared) == {"head.weight": "embedding.weight", "part": "table", "head.same": "table"}
    assert {module.name for module in found.modules} == {"", "embedding"}


def test_sparse_gradients_count_their_parts_and_meta_tensors_nothing() -> None:
    embedding = nn.Embedding(1000, 4, sparse=True)
    embedding(torch.tensor([1, 1, 5])).sum().backward()
    assert memory_breakdown(embedding).totals["gradients"] == 3 * 4 * 4 + 3 * 8
    with torch.device("meta"):
        empty = nn.Linear(10, 10)
    assert memory_breakdown(empty).totals == {}


def test_several_optimizers_and_parameters_that_only_one_of_them_has() -> None:
    model = nn.Linear(10, 10, bias=False)
    master = nn.Parameter(torch.zeros(50))
    first = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.SGD([master], lr=0.1, momentum=0.9)
    for parameter in (model.weight, master):
        parameter.grad = torch.ones_like(parameter)
    first.step()
    second.step()
    found = memory_breakdown(model, [first, second])
    assert found.totals["optimizer_states"] == 4 * 100 + 2 * 4 * 50


def test_the_rest_is_what_the_allocator_holds_beside_it() -> None:
    found = memory_breakdown(nn.Linear(10, 10, bias=False), allocated={"cpu": 1000, "cuda:0": 7})
    assert found.by_device == {"cpu": {"parameters": 400, "rest": 600}, "cuda:0": {"rest": 7}}


def test_modules_are_summed_by_the_beginning_of_their_names() -> None:
    modules = tuple(
        ModuleMemory(name=name, kind="Linear", parameters=size)
        for name, size in {"layers.0.a": 1, "layers.0.b": 2, "layers.1.a": 4, "head": 8}.items()
    )
    found = MemoryBreakdown(by_device={}, modules=modules)
    assert {module.name: module.parameters for module in found.by_prefix(1)} == {"layers": 7, "head": 8}
    assert [module.name for module in found.by_prefix(2)] == ["layers.0", "layers.1", "head"]
    with pytest.raises(ValueError, match="depth=0: must be at least 1"):
        found.by_prefix(0)


def test_activations_are_what_forwards_save_and_go_with_the_graph() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 20))
    with record_activations(model) as recorder:
        loss = model(torch.ones(5, 10)).sum()
        forward = recorder.memory()
        loss.backward()
        backward = recorder.memory()
        with torch.no_grad():
            model(torch.ones(500, 10))
    # ReLU's output is saved by the layer behind it too, and counts once.
    assert dict(forward.by_module) == {"0": 5 * 10 * 4, "1": 5 * 20 * 4}
    assert (forward.peak_bytes, forward.held_bytes) == (600, 600)
    assert (backward.peak_bytes, backward.held_bytes) == (600, 0)
    assert recorder.memory() == backward  # no graph, nothing saved
    found = memory_breakdown(model, activations=backward)
    assert found.by_device["cpu"]["activations"] == 600
    assert asdict(found)["modules"][1]["activations"] == 400


def test_recorded_activations_leave_the_gradients_as_they_are() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 1))
    inputs = torch.randn(3, 6)
    model(inputs).sum().backward()
    expected = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    with record_activations(model):
        model(inputs).sum().backward()
    found = [one.grad for one in model.parameters() if one.grad is not None]
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_a_forward_that_raises_leaves_its_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 3))
    with record_activations(model) as recorder:
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(2, 4))
        outside = torch.ones(2, 4, requires_grad=True)
        result = outside * outside
    assert recorder.memory().by_module[""] == outside.nbytes
    del result


def local_bytes() -> dict[str, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(64, 64, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return memory_breakdown(model).totals


def test_a_sharded_parameter_counts_as_its_local_part(run_ranks: Callable[..., list[object]]) -> None:
    assert run_ranks(local_bytes) == [{"parameters": 64 * 64 * 4 // 2}] * 2
