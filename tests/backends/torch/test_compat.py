"""Each undocumented name of DDP is what the backend relies on: these tests tell when a new torch changes one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from drivetrain_backends.torch import compat
from drivetrain_state import StateSettings, connect


def replicated(**options: object) -> DistributedDataParallel:
    connect(StateSettings(device="cpu", watchdog=False))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    return DistributedDataParallel(model, **options)


def arguments() -> bool:
    buffers = {compat.BUFFERS_ARGUMENT: False}
    ddp = replicated(
        bucket_cap_mb=3,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
        static_graph=True,
        **buffers,
    )
    said = {"find_unused_parameters": True, "static_graph": True, "gradient_as_bucket_view": True}
    return compat.applied_arguments(ddp) == said | {"broadcast_buffers": False, "bucket_size_mb": 3.0}


def hooks() -> bool:
    ddp = replicated()
    assert compat.communication_hooks(ddp) == []
    ddp.register_comm_hook(dist.group.WORLD, bf16_compress_hook)
    return compat.communication_hooks(ddp) == [(bf16_compress_hook, dist.group.WORLD)]


def rebuilt_buckets() -> list[bool]:
    ddp, told = replicated(), []
    for _ in range(3):
        ddp(torch.ones(1, 4)).sum().backward()
        told.append(compat.has_rebuilt_buckets(ddp))
    assert told == sorted(told)  # once, and for good
    return told[-1:]


def reducer() -> list[bool]:
    """Gradients of two ranks, whose inputs differ, are equal where the reducer runs."""
    ddp, equal = replicated(), []
    for turn in range(3):
        assert compat.reduces(ddp) == (turn < 2)
        ddp.zero_grad()
        ddp(torch.full((1, 4), float(dist.get_rank()))).sum().backward()
        compat.check_reduced(ddp)
        gradients = [torch.zeros(4, 4), torch.zeros(4, 4)]
        dist.all_gather(gradients, ddp.module[0].weight.grad)
        equal.append(torch.equal(*gradients))
        if turn == 1:
            with ddp.no_sync():
                assert not compat.reduces(ddp)
            compat.disable_reducer(ddp)
    return equal


def test_a_converted_parameter_has_another_accumulator_also_once_it_is_converted_back() -> None:
    model = nn.Linear(2, 2)
    parameters = list(model.parameters())
    nodes = compat.accumulators(parameters)
    model.weight.data = model.weight.data * 2
    model.bias.requires_grad_(False)
    assert compat.are_attached(parameters, nodes)
    model.double().float()
    assert not compat.are_attached(parameters, nodes)
    assert compat.are_attached(parameters[1:], nodes[1:])  # frozen


def test_a_transform_of_torch_func_is_told_from_a_plain_call() -> None:
    told: list[bool] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        told.append(compat.in_functional_transform())
        return x.sum()

    note(torch.ones(2))
    torch.func.grad(note)(torch.ones(2))
    torch.func.vmap(note)(torch.ones(2, 2))
    assert told == [False, True, True]


def buffers() -> list[float]:
    """The buffer of rank 1 after a forward that broadcasts those of rank 0, and one that does not."""
    connect(StateSettings(device="cpu", watchdog=False))
    model, found = nn.Linear(1, 1), []
    model.register_buffer("own", torch.zeros(()))
    ddp = DistributedDataParallel(model)
    compat.disable_reducer(ddp)
    for is_wanted in (True, False):
        model.own.fill_(dist.get_rank())
        compat.sync_buffers_next(ddp, is_wanted)
        ddp(torch.ones(1, 1))
        found.append(model.own.item())
    return found


def static_graph() -> list[bool]:
    ddp = replicated(static_graph=True)
    told = [compat.has_learnt_static_graph(ddp)]
    ddp(torch.ones(1, 4)).sum().backward()
    return [*told, compat.has_learnt_static_graph(ddp)]


def left_out() -> list[int] | None:
    ddp = replicated()
    output = ddp(torch.ones(1, 4))
    ddp.module[0](output.detach().sum().expand(4)).sum().backward()  # it reaches the first layer alone
    with pytest.raises(RuntimeError) as caught:
        compat.check_reduced(ddp)
    assert compat.unreduced_parameters(RuntimeError("another")) is None
    return compat.unreduced_parameters(caught.value)


def parameters_left_out() -> list[object]:
    connect(StateSettings(device="cpu", watchdog=False))
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        for layer in model:
            layer.weight.fill_(dist.get_rank())
    model[0].requires_grad_(False)
    with compat.leaving_out(model, ["0.weight"]):
        DistributedDataParallel(model)
    return [*(layer.weight.item() for layer in model), "_ddp_params_and_buffers_to_ignore" in vars(model)]


def after_backward() -> list[str]:
    """Functions run in the order in which they were queued, after every gradient."""
    order: list[str] = []
    layer = nn.Linear(2, 1)
    layer.weight.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))

    def queue_more(_: torch.Tensor) -> None:
        compat.call_after_backward(lambda: order.append("second"))

    hidden = torch.ones(1, 2).requires_grad_()
    hidden.register_hook(queue_more)
    loss = layer(hidden).sum()
    loss.register_hook(lambda _: compat.call_after_backward(lambda: order.append("first")))
    loss.backward()
    return order


@pytest.mark.parametrize(
    ("relied_on", "expected"),
    [
        (arguments, [True] * 2),
        (hooks, [True] * 2),
        (rebuilt_buckets, [[True]] * 2),
        (reducer, [[True, True, False]] * 2),
        (buffers, [[0.0, 0.0], [0.0, 1.0]]),
        (static_graph, [[False, True]] * 2),
        (left_out, [[2, 3, 4, 5]] * 2),
        (parameters_left_out, [[0.0, 0.0, False], [1.0, 0.0, False]]),
        (after_backward, [["gradient", "first", "second"]] * 2),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_torch_keeps_it_so(run_ranks, relied_on, expected) -> None:
    assert run_ranks(relied_on) == expected
