"""Weights come while others compute, whoever uses them and in whatever order."""

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from dispatch.models import (
    WIDTH,
    Coder,
    Converts,
    Pair,
    Stack,
    Writes,
    assert_same_gradients,
    run_threads,
    same_values,
    streamed,
)
from drivetrain_dispatch.errors import DeviceMapError, OffloadedError
from drivetrain_dispatch.offload.dispatch import dispatch_model, offload_stats, remove_hooks, trace_offload
from drivetrain_dispatch.offload.trace import OffloadTrace


def test_every_part_is_on_its_way_before_its_turn(stack: Pair) -> None:
    model, _ = stack
    for _ in range(3):
        model(torch.randn(2, WIDTH))
    stats = offload_stats(model)
    assert (stats.num_used, stats.num_missed) == (18, 0)


def test_a_part_that_nobody_expected_is_brought_and_counted(stack: Pair) -> None:
    model, plain = stack
    x = torch.randn(2, WIDTH)
    model(x, skip=4)
    missed = offload_stats(model).num_missed
    assert torch.equal(model(x), plain(x))  # layer 4 comes though the last forward left it out
    assert offload_stats(model).num_missed == missed + 1
    assert torch.equal(model.layers[3](x), plain.layers[3](x))  # by itself


def test_each_method_that_computes_has_an_order_of_its_own() -> None:
    plain = Coder()
    model = streamed(copy.deepcopy(plain))
    x = torch.randn(2, WIDTH)
    for way in ("encode", "decode", "forward"):
        getattr(model, way)(x)
    missed = offload_stats(model).num_missed
    for _ in range(2):
        assert torch.equal(model.encode(x), plain.encode(x))
        assert torch.equal(model.decode(x, shift=x), plain.decode(x, shift=x))
        assert torch.equal(model(x), plain(x))
    assert offload_stats(model).num_missed == missed
    for one in (model, plain):
        one.decode(one.encode(x)).sum().backward()
    assert_same_gradients(model, plain)
    remove_hooks(model)
    assert model.__dict__.keys() == plain.__dict__.keys()


def test_two_threads_may_use_one_model(stack: Pair) -> None:
    model, plain = stack
    wrong: list[str] = []

    def use(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for turn in range(40):
            x = torch.randn(2, WIDTH, generator=generator)
            skip = (seed + turn) % 7
            with torch.no_grad():
                if not torch.equal(model(x, skip=skip), plain(x, skip=skip)):
                    wrong.append(f"thread {seed}, turn {turn}")

    run_threads(use, 4)
    assert not wrong


def test_a_forward_that_fails_leaves_weights_away_and_the_next_one_goes_on(stack: Pair) -> None:
    model, plain = stack
    handle = model.layers[2].register_forward_hook(_fail)
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        model(torch.randn(2, WIDTH))
    handle.remove()
    x = torch.randn(2, WIDTH)
    assert torch.equal(model(x), plain(x))
    remove_hooks(model)
    assert torch.equal(model(x), plain(x))


def _fail(*_: object) -> None:
    raise ZeroDivisionError("in the middle")


def test_hooks_of_others_stay_and_are_called(stack: Pair) -> None:
    model, _ = stack
    seen: list[str] = []
    model.layers[1].register_forward_hook(lambda *_: seen.append("after"))
    model.layers[1].register_forward_pre_hook(lambda *_: seen.append("before"))
    model(torch.randn(2, WIDTH))
    remove_hooks(model)(torch.randn(2, WIDTH))
    assert seen == ["before", "after"] * 2


def test_layers_that_are_compiled_stream_their_weights() -> None:
    torch.manual_seed(0)
    model = Stack(3).eval()
    plain = copy.deepcopy(model)
    streamed(model)
    for layer in model.layers:
        layer.compile(backend="eager")
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x), plain(x))
    assert offload_stats(model).num_used == 9


def test_what_a_forward_writes_into_a_streamed_buffer_is_kept() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).train()
    plain = copy.deepcopy(model)
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert set(names) == set(dtypes)
    dispatch_model(model, {"": "cpu"}, offload_buffers=True, dtypes=dtypes)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, WIDTH)
            assert torch.equal(model(x), plain(x))
    assert same_values(model.state_dict(), plain.state_dict())


def test_stored_weights_can_be_read_and_written_while_they_are_away(stack: Pair) -> None:
    model, plain = stack
    assert model.layers[0].weight.shape == (WIDTH, WIDTH)
    with torch.no_grad():
        for one in (model, plain):
            one.layers[0].weight.mul_(2)
    x = torch.randn(2, WIDTH)
    assert torch.equal(model(x), plain(x))
    weights = {name: torch.full_like(tensor, 0.1) for name, tensor in plain.state_dict().items()}
    model.load_state_dict(weights)
    plain.load_state_dict(weights)
    assert torch.equal(model(x), plain(x))


def test_a_dispatched_model_is_not_copied_with_its_hooks(stack: Pair) -> None:
    with pytest.raises(OffloadedError, match=r"save its state_dict\(\)"):
        copy.deepcopy(stack[0])


def test_a_model_is_dispatched_once(stack: Pair) -> None:
    with pytest.raises(OffloadedError, match="dispatched already"):
        dispatch_model(stack[0], {"": "cpu"})
    with pytest.raises(OffloadedError, match="not dispatched"):
        offload_stats(stack[1])


def test_a_trace_tells_what_came_while_others_computed(stack: Pair) -> None:
    model, _ = stack
    with trace_offload(model) as trace:
        model(torch.randn(2, WIDTH))
    model(torch.randn(2, WIDTH))
    assert [use.name for use in trace.uses] == [f"layers.{index}" for index in range(6)]
    for use in trace.uses:
        assert use.fetched[0] <= use.fetched[1] <= use.waited[1] == use.computed[0] <= use.computed[1]
    for use, later in pairwise(trace.uses):
        assert later.fetched[0] < use.computed[1]  # on its way before the one in front was through
    picture = trace.svg()
    assert picture.count("<rect") >= 1 + 2 * 6
    assert "layers.3" in picture
    with pytest.raises(ValueError, match="nothing was traced"):
        OffloadTrace().svg()
    with pytest.raises(OffloadedError, match="not dispatched"), trace_offload(nn.Linear(1, 1)):
        pass


def test_what_a_forward_writes_by_a_view_is_stored() -> None:
    model = streamed(Writes())
    assert not model(torch.tensor([0])).any()
    assert not model.embed.weight[0].any()
    assert model.embed.weight[1].any()
    around = nn.Sequential(model)
    remove_hooks(model)
    streamed(around, preload_module_classes="Writes")
    model.embed.weight.data.fill_(1)
    model(torch.tensor([1]))  # the part by itself
    assert not model.embed.weight[0].any()
    remove_hooks(around)  # nothing is in use any more


class Rescaled(nn.Module):
    """Changes a weight in its forward before it is used, as RWKV does when it goes from inference to training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(2)
        return self.layer(x)


def test_what_is_written_to_a_weight_before_its_use_is_what_a_backward_meets() -> None:
    torch.manual_seed(0)
    plain = Rescaled()
    model, x = streamed(copy.deepcopy(plain)), torch.randn(2, WIDTH, requires_grad=True)
    expected = x.detach().clone().requires_grad_()
    for _ in range(2):
        model(x).square().sum().backward()
        plain(expected).square().sum().backward()
    assert torch.equal(x.grad, expected.grad)
    assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)
    assert torch.equal(model.layer.weight, plain.layer.weight)


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_layer_may_be_converted_in_a_forward_to_what_it_is(context: Callable[[], object]) -> None:
    plain = Converts(torch.float32)
    model, x = streamed(copy.deepcopy(plain)), torch.randn(2, WIDTH)
    with context():
        for _ in range(2):
            assert torch.equal(model(x), plain(x))
    remove_hooks(model)
    assert same_values(model.state_dict(), plain.state_dict())


def test_a_layer_cannot_be_converted_in_a_forward_to_another_dtype() -> None:
    with pytest.raises(OffloadedError, match="give the dtype when the model is dispatched"):
        streamed(Converts(torch.float64))(torch.randn(2, WIDTH))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("learns", [True, False])
def test_inputs_that_are_not_contiguous_meet_the_kernel_of_the_model_in_memory(
    context: Callable[[], object], learns: bool
) -> None:
    """It depends on whether a weight learns, also where no gradient is computed."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH)).requires_grad_(learns)
    model, x = streamed(copy.deepcopy(plain)), torch.randn(2, WIDTH, 256).transpose(1, 2)
    with context():
        assert torch.equal(model(x), plain(x))
    outer = model[0].weight
    assert outer.grad is None
    assert outer.requires_grad is learns


def test_a_weight_cannot_be_replaced_in_a_forward(stack: Pair) -> None:
    model, _ = stack

    def replace(*_: object) -> None:
        model.layers[4].weight.data = torch.zeros(WIDTH, WIDTH)

    model.layers[2].register_forward_hook(replace)
    with pytest.raises(OffloadedError, match="cannot be replaced"):
        model(torch.randn(2, WIDTH))


def test_what_belongs_to_a_dispatched_model_is_not_dispatched_again(tmp_path: Path) -> None:
    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    streamed(whole[1:])
    values = whole[0].weight.data_ptr()
    with pytest.raises(OffloadedError, match=r"'1\.weight' belongs to another model that is dispatched"):
        dispatch_model(whole, {"": "disk"}, offload_dir=tmp_path)
    outer = nn.Sequential(nn.Linear(2, 2), streamed(nn.Sequential(nn.Linear(2, 2))))
    with pytest.raises(OffloadedError, match="'1' of the model is dispatched already"):
        dispatch_model(outer, {"": "cpu"})
    assert whole[0].weight.data_ptr() == values
    assert list(tmp_path.iterdir()) == []


def test_weights_made_in_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        model = Stack()
    with pytest.raises(DeviceMapError, match=r"was made in torch\.inference_mode"):
        streamed(model)
