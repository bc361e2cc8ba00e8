"""Each undocumented name of DDP is what the backend relies on: these tests tell when a new torch changes one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from drivetrain_backends.ddp import compat
from plain_loop.backends import context


def replicated(**options: object) -> DistributedDataParallel:
    context()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    return DistributedDataParallel(model, **options)


@pytest.mark.ranks(2)
def test_arguments_are_read_back() -> None:
    buffers = {compat.BUFFERS_ARGUMENT: False}
    ddp = replicated(
        bucket_cap_mb=3,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
        static_graph=True,
        **buffers,
    )
    said = {"find_unused_parameters": True, "static_graph": True, "gradient_as_bucket_view": True}
    assert compat.applied_arguments(ddp) == said | {"broadcast_buffers": False, "bucket_size_mb": 3.0}


@pytest.mark.ranks(2)
def test_a_hook_of_communication_is_read_back_and_there_is_one() -> None:
    ddp = replicated()
    assert compat.communication_hook(ddp) == (None, None)
    ddp.register_comm_hook(dist.group.WORLD, bf16_compress_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    assert compat.communication_hook(ddp) == (bf16_compress_hook, dist.group.WORLD)


@pytest.mark.ranks(2)
def test_buckets_are_rebuilt_once_and_for_good() -> None:
    ddp, told = replicated(), []
    for _ in range(3):
        ddp(torch.ones(1, 4)).sum().backward()
        told.append(compat.has_rebuilt_buckets(ddp))
    assert told == sorted(told)
    assert told[-1]


@pytest.mark.ranks(2)
def test_gradients_of_ranks_are_equal_where_the_reducer_runs() -> None:
    ddp, equal = replicated(), []
    for turn in range(3):
        assert ddp.require_backward_grad_sync == (turn < 2)
        ddp.zero_grad()
        ddp(torch.full((1, 4), float(dist.get_rank()))).sum().backward()
        compat.check_reduced(ddp)
        gradients = [torch.zeros(4, 4), torch.zeros(4, 4)]
        dist.all_gather(gradients, ddp.module[0].weight.grad)
        equal.append(torch.equal(*gradients))
        if turn == 1:
            with ddp.no_sync():
                assert not ddp.require_backward_grad_sync
            ddp.require_backward_grad_sync = False
    assert equal == [True, True, False]


def test_a_converted_parameter_has_another_accumulator_also_once_it_is_converted_back() -> None:
    model = nn.Linear(2, 2)
    parameters = list(model.parameters())
    nodes = compat.accumulators(parameters)
    model.weight.data = model.weight.data * 2
    model.bias.requires_grad_(False)
    assert compat.are_attached(parameters, nodes)
    model.double().float()
    assert not compat.are_attached(parameters, nodes)
    assert compat.are_attached(parameters[1:], nodes)  # frozen


def test_a_transform_of_torch_func_is_told_from_a_plain_call() -> None:
    told: list[bool] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        told.append(compat.in_functional_transform())
        return x.sum()

    note(torch.ones(2))
    torch.func.grad(note)(torch.ones(2))
    torch.func.vmap(note)(torch.ones(2, 2))
    assert told == [False, True, True]


@pytest.mark.ranks(2)
def test_the_next_forward_broadcasts_buffers_or_does_not() -> None:
    context()
    model, found = nn.Linear(1, 1), []
    model.register_buffer("own", torch.zeros(()))
    ddp = DistributedDataParallel(model)
    ddp.require_backward_grad_sync = False
    for is_wanted in (True, False):
        model.own.fill_(dist.get_rank())
        ddp.require_forward_param_sync = is_wanted
        ddp(torch.ones(1, 1))
        found.append(model.own.item())
    assert found == [0.0, dist.get_rank()]


@pytest.mark.ranks(2)
def test_a_static_graph_is_learnt_at_the_first_backward() -> None:
    ddp = replicated(static_graph=True)
    assert compat.awaits_static_graph(ddp)
    ddp(torch.ones(1, 4)).sum().backward()
    assert not compat.awaits_static_graph(ddp)
    assert not compat.awaits_static_graph(replicated())


@pytest.mark.ranks(2)
def test_parameters_that_were_not_reduced_are_told() -> None:
    ddp = replicated()
    output = ddp(torch.ones(1, 4))
    ddp.module[0](output.detach().sum().expand(4)).sum().backward()  # it reaches the first layer alone
    with pytest.raises(RuntimeError) as caught:
        compat.check_reduced(ddp)
    assert compat.unreduced_parameters(RuntimeError("another")) is None
    assert compat.unreduced_parameters(caught.value) == [2, 3, 4, 5]


@pytest.mark.ranks(2)
def test_parameters_are_left_out_of_a_replica() -> None:
    context()
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        for layer in model:
            layer.weight.fill_(dist.get_rank())
    model[0].requires_grad_(False)
    with compat.leaving_out(model, ["0.weight"]):
        DistributedDataParallel(model)
    assert [layer.weight.item() for layer in model] == [dist.get_rank(), 0.0]
    assert "_ddp_params_and_buffers_to_ignore" not in vars(model)
