"""What holds of dispatched models on an accelerator: `test_on_an_accelerator.py` runs it, in a process of its own."""

import copy
import gc
import tempfile
import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from dispatch.models import WIDTH, Coder, Gate, Recurrent, Tree, same_values, trees
from drivetrain_dispatch import (
    Bandwidths,
    DeviceMapError,
    LoadError,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    remove_hooks,
)
from hardware.simulated import device

toy = device.make(device.NPU)
FIRST, SECOND = (torch.device(device.NPU.name, index) for index in range(2))


def on_device(model: nn.Module) -> nn.Module:
    """A copy that is on the first accelerator altogether."""
    return copy.deepcopy(model).to(FIRST)


def folder() -> Path:
    return Path(tempfile.mkdtemp())


@settings(max_examples=60, deadline=None)
@given(tree=trees, data=st.data())
def test_every_placement_computes_the_same(tree: Tree, data: st.DataObject) -> None:
    assume(not any(isinstance(part, Recurrent) for part in tree.parts))  # torch has no LSTM for such a device
    tree.eval()
    names = ["head", *(f"parts.{index}" for index in range(len(tree.parts)))]
    shares = getattr(tree.head, "weight", tree.parts[0].weight) is tree.parts[0].weight
    places = [0, "cpu", "disk"] if shares else [0, 1, "cpu", "disk"]  # shared weights have one device
    device_map = {name: data.draw(st.sampled_from(places), label=name) for name in names}
    whole = ("Gate",) if any(isinstance(part, Gate) for part in tree.parts) else ()
    plain, x = on_device(tree), torch.randn(3, WIDTH)
    stored = {name: tensor.clone() for name, tensor in tree.state_dict().items()}
    dispatch_model(
        tree,
        device_map,
        main_device=0,
        offload_dir=folder(),
        preload_module_classes=data.draw(st.sampled_from([(), whole]), label="whole"),
    )
    with torch.inference_mode(data.draw(st.booleans(), label="inference_mode")), torch.no_grad():
        for _ in range(3):
            tree.calls = plain.calls = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
            result = tree(x)
            assert result.device == x.device
            assert torch.equal(result, plain(x.to(FIRST)).cpu())
    assert same_values({name: tensor.cpu() for name, tensor in tree.state_dict().items()}, stored)
    remove_hooks(tree)
    assert {type(parameter) for parameter in tree.parameters()} == {nn.Parameter}


class Large(nn.Module):
    """Layers of a mebibyte each."""

    def __init__(self, num_layers: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


LAYER = 512 * 512 * 4


class Counting(Gate):
    """Writes to one buffer in its forward, and replaces the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        self.shift = self.shift + 1
        return super().forward(x) * self.count


@pytest.mark.parametrize("in_place", [True, False])
def test_buffers_come_and_go_also_if_torch_cannot_move_them_in_place(in_place: bool) -> None:
    model, x = Counting(), torch.randn(2, WIDTH)
    plain = on_device(model)
    toy.move_in_place(in_place)
    try:
        dispatch_model(model, {"": "cpu"}, main_device=0, offload_buffers=True)
        assert model.shift.device.type == model.scale.device.type == "cpu"
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(model(x), plain(x.to(FIRST)).cpu())
        assert model.count.device.type == "cpu"
        assert model.count == 3
        assert torch.equal(model.shift.cpu(), plain.shift.cpu())
    finally:
        toy.move_in_place(True)


class Nested(nn.Module):
    """Takes and gives tensors in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, given: dict[str, list[Tensor]], *, kept: Tensor) -> dict[str, Any]:
        x = self.one(given["x"][0])
        return {"both": (x, [self.two(x)]), "kept": kept, "number": 3}


def test_inputs_follow_and_outputs_come_back() -> None:
    model, x = Nested(), torch.randn(2, WIDTH)
    plain = on_device(model)
    expected = plain({"x": [x.to(FIRST)]}, kept=x)
    dispatch_model(model, {"one": 0, "two": 1}, skip_keys=("kept",))
    assert (model.one.weight.device, model.two.weight.device) == (FIRST, SECOND)
    found = model({"x": [x]}, kept=x)
    assert {found["both"][0].device, found["both"][1][0].device} == {x.device}
    assert torch.equal(found["both"][1][0], expected["both"][1][0].cpu())
    assert found["kept"] is x
    assert found["number"] == 3


def without_room(act: Callable[[], object], kind: type[Exception], room: int) -> str:
    """What an error says that comes where the device has so many bytes left."""
    gc.collect()
    toy.set_capacity(toy.counts()["in_use"] + room)
    try:
        with pytest.raises(kind) as caught:
            act()
    finally:
        toy.set_capacity(2**62)
    return str(caught.value)


def test_a_device_without_room_leaves_a_model_as_it_was() -> None:
    model, x = Large(4), torch.randn(2, 512)
    before = dict(model.named_parameters())
    values = {name: tensor.clone() for name, tensor in before.items()}
    said = without_room(lambda: dispatch_model(model, {"": 0}), DeviceMapError, int(2.5 * LAYER))
    assert "'layers.2.weight'" in said
    for name, tensor in model.named_parameters():
        assert tensor is before[name]
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, values[name])
    path = folder()
    save_file(values, path / "model.safetensors")
    with init_empty_weights():
        empty = Large(4)
    said = without_room(
        lambda: load_checkpoint_and_dispatch(empty, path, {"": 0}), LoadError, int(2.5 * LAYER)
    )
    assert f"{FIRST} has no room for 'layers.2.weight'" in said
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert torch.isfinite(model(x)).all()


@pytest.mark.parametrize("place", ["cpu", "disk"])  # asked for by the forward itself, and by a thread
def test_a_forward_without_room_fails_and_the_next_one_does_not(place: str) -> None:
    model, x = Large(4), torch.randn(2, 512)
    expected = model(x)
    dispatch_model(model, {"": place}, main_device=0, offload_dir=folder())
    for _ in range(2):
        gc.collect()
        before = toy.counts()["in_use"]
        # Layers fit one by one, where the thread that brings them is late: sooner or later two meet.
        said = without_room(lambda: [model(x) for _ in range(100)], torch.OutOfMemoryError, int(1.5 * LAYER))
        assert "no room" in said
        for _ in range(100):  # a thread may be bringing what nobody waits for any more
            toy.finish()
            gc.collect()
            if toy.counts()["in_use"] <= before:
                break
            time.sleep(0.1)
        assert toy.counts()["in_use"] <= before  # nothing that had come is kept
        assert torch.allclose(model(x), expected)
    remove_hooks(model)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(
    "device_map",
    [None, {"decoder": 0, "encoder": 1}, {"": "cpu"}, {"decoder": 0, "encoder": "cpu"}, {"": "disk"}],
)
@pytest.mark.parametrize("goes_back", [False, True])
def test_a_model_is_freed_at_once(device_map: dict[str, Any] | None, goes_back: bool) -> None:
    model = on_device(Coder())
    if device_map is not None:
        dispatch_model(model, device_map, main_device=FIRST, offload_dir=folder())
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            output = model(torch.ones(2, WIDTH, device=FIRST)).sum()
            if goes_back:
                output.backward()
        model.encode(torch.ones(2, WIDTH, device=FIRST))
        parts = [weakref.ref(part) for part in [*model.modules(), *model.parameters()]]
        del model, output
        # The device's thread of autograd holds the last node of a backward a moment longer than the caller waits.
        end = time.monotonic() + 10
        while goes_back and any(part() is not None for part in parts) and time.monotonic() < end:
            time.sleep(0.01)
        assert [part() for part in parts if part() is not None] == []
    finally:
        gc.enable()


class Mixture(nn.Module):
    """Layers of a router and eight experts, of which each forward uses others."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attention": nn.Linear(256, 256, bias=False),
                    "experts": nn.ModuleList(
                        nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False))
                        for _ in range(8)
                    ),
                }
            )
            for _ in range(num_layers)
        )

    def forward(self, x: Tensor, chosen: list[list[int]]) -> Tensor:
        for layer, experts in zip(self.layers, chosen, strict=True):
            x = layer["attention"](x)
            for index in experts:
                x = x + layer["experts"][index](x)
        return x


SOME_BUDGETS = [(1.0, "experts", 0.15), (0.2, "layers", 0.4), (0.2, "experts", 0.8)]


def most_during(act: Callable[[], object]) -> int:
    """The bytes that the device holds at the peak of something."""
    gc.collect()
    toy.finish()
    toy.reset_most()
    act()
    return toy.counts()["most"]


@pytest.mark.parametrize(
    ("host_share", "kind", "share"),
    [
        pytest.param(*case, marks=() if case in SOME_BUDGETS else pytest.mark.slow)
        for case in product([1.0, 0.2], ["layers", "experts"], [0.15, 0.4, 0.8])
    ],
)
def test_what_is_on_the_device_keeps_to_what_stays_and_the_window(
    kind: str, share: float, host_share: float
) -> None:
    model: nn.Module = Large(12) if kind == "layers" else Mixture()
    total = sum(parameter.nbytes for parameter in model.parameters())
    budget = max(int(total * share), LAYER)
    x = torch.randn(2, 512 if kind == "layers" else 256)
    everything = [list(range(8))] * 4
    backward_bytes = LAYER // 4  # gradients of activations
    plain = on_device(model)
    gc.collect()
    toy.finish()
    here = toy.counts()["in_use"]
    # What operations take for themselves, and activations, which a plan counts by `costs`.
    with torch.no_grad():
        given = (x.to(FIRST),) if kind == "layers" else (x.to(FIRST), everything)
        own = most_during(partial(plain, *given)) - here
    del plain, given
    gc.collect()
    toy.finish()
    empty = toy.counts()["in_use"]
    device_map = infer_auto_device_map(
        model, {0: budget, "cpu": int(total * host_share)}, rates=Bandwidths(to_device=1e9, from_disk=1e9)
    )
    dispatch_model(model, device_map, offload_dir=folder())
    gc.collect()
    toy.finish()
    stays = toy.counts()["in_use"] - empty
    assert stays + device_map.window_bytes[0] <= budget
    generator = torch.Generator().manual_seed(0)
    for turn in range(6):
        chosen = [torch.randperm(8, generator=generator)[: 1 + turn % 3].tolist() for _ in range(4)]
        with torch.no_grad():
            most = most_during(lambda chosen=chosen: model(x) if kind == "layers" else model(x, chosen))
        assert most - empty <= stays + device_map.window_bytes[0] + own
    model.requires_grad_(False)  # the gradients of what stays would stay too
    x.requires_grad_(True)
    most = most_during(lambda: (model(x) if kind == "layers" else model(x, chosen)).sum().backward())
    assert most - empty <= stays + device_map.window_bytes[0] + own + backward_bytes
