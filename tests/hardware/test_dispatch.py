"""Models whose weights are elsewhere than on the device that computes with them."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drivetrain_dispatch import (
    apply_layerwise_casting,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    init_on_device,
    offload_stats,
    remove_hooks,
)
from drivetrain_dispatch.planning.bandwidth import measure_rates
from hardware.devices import OnDevice, first, here, runs_on_device

pytestmark = pytest.mark.as_tpu

LAYER = 1024 * 1024 * 4


class Layers(nn.Module):
    """Layers of 4 MiB each."""

    def __init__(self, num_layers: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Coder(nn.Module):
    """Used by two methods beside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.encoder = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.register_buffer("shift", torch.rand(8))

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def decode(self, x: Tensor) -> Tensor:
        return self.decoder(x) + self.shift

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.decode(self.encode(x))
        return {"y": y, "device": y.device.type, "none": None}


def on_the_device(model: nn.Module) -> nn.Module:
    """A copy that is on the device altogether."""
    return copy.deepcopy(model).to(first())


@runs_on_device()
def test_weights_are_made_on_the_device() -> None:
    with init_on_device(first(), include_buffers=True):
        model = Coder()
    assert {tensor.device for tensor in model.state_dict().values()} == {torch.device(first())}
    assert model.decoder[0].weight.abs().sum().item() > 0


def measures_rates(folder: Path) -> float:
    rates = measure_rates(first(), cache=folder / "rates.json")
    assert measure_rates(first(), cache=folder / "rates.json") == rates
    return rates.to_device


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.default_cases
@runs_on_device()
def test_the_device_computes_with_what_is_elsewhere(place: str, folder: Path) -> None:
    """Weights come before their use, on a stream beside, from pinned memory, and few are there at a time."""
    model, x = Layers(), torch.randn(8, 1024)
    num_layers = len(model.layers)
    plain = on_the_device(model)
    with torch.no_grad(), here().copies() as alone:
        expected = plain(x.to(first())).cpu()
    del plain
    if place == "cpu":
        cpu_offload(model)
    else:
        disk_offload(model, folder)
    with torch.no_grad():
        for _ in range(2):
            gc.collect()
            held = torch.accelerator.memory_allocated()
            torch.accelerator.reset_peak_memory_stats()
            assert torch.equal(model(x), expected)
            assert torch.accelerator.max_memory_allocated() - held < 5 * LAYER
        with here().copies() as copies:
            assert torch.equal(model(x), expected)
        beside = num_layers if here().copies_aside else 0
        assert (copies.beside, copies.kept) == (beside, beside)
        if beside:
            assert copies.pageable == alone.pageable  # the input, and what operations read
    assert offload_stats(model).num_missed == 0
    remove_hooks(model)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@runs_on_device()
def test_inputs_of_methods_go_to_the_device_and_outputs_come_back() -> None:
    model, x = Coder().eval(), torch.randn(2, 8)
    plain = on_the_device(model)
    before = model.__dict__.keys()
    cpu_offload(model)
    with torch.no_grad():
        for _ in range(2):
            code = model.encode(x)
            assert code.device == x.device
            assert torch.equal(code, plain.encode(x.to(first())).cpu())
            assert torch.equal(model.decode(code), plain.decode(code.to(first())).cpu())
        output = model(x)
    assert (output["device"], output["none"]) == (here().name, None)
    assert torch.equal(output["y"], plain(x.to(first()))["y"].cpu())
    remove_hooks(model)
    assert model.__dict__.keys() == before


class Checkpointed(Layers):
    """Its layers are computed again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda layer, x: layer(x).tanh(), layer, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.default_cases
@runs_on_device()
def test_models_that_are_elsewhere_are_trained(place: str, folder: Path) -> None:
    """Train models that are elsewhere: losses, gradients and weights are those of one that is on the device."""
    for number, build in enumerate((Layers, Checkpointed)):
        model = build(3)
        plain, x = on_the_device(model), torch.randn(3, 1024)
        dispatch_model(model, {"": place}, main_device=first(), offload_dir=folder / str(number))
        optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3, momentum=0.9) for each in (model, plain)]
        for _ in range(3):
            losses = [model(x).square().sum(), plain(x.to(first())).square().sum()]
            torch.testing.assert_close(losses[0].cpu(), losses[1].cpu())
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                optimizer.step()  # of the host, and of the device
            for own, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert own.grad is not None
                assert other.grad is not None
                assert own.grad.device.type == "cpu"
                torch.testing.assert_close(own.grad, other.grad.cpu(), rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(own, other.cpu(), rtol=1e-4, atol=1e-4)
            for optimizer in optimizers:
                optimizer.zero_grad()


@runs_on_device()
def test_threads_share_a_model() -> None:
    model = Layers(6)
    plain = on_the_device(model)
    dispatch_model(model, {"": "cpu"}, main_device=first())
    inputs = [torch.randn(2, 1024) for _ in range(3)]
    with torch.no_grad():
        expected = [plain(x.to(first())).cpu() for x in inputs]

    def work(index: int) -> bool:
        with torch.no_grad():
            return all(torch.equal(model(inputs[index]), expected[index]) for _ in range(5))

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(work, range(3))) == [True] * 3


@runs_on_device()
def test_weights_are_stored_small_and_computed_large() -> None:
    """Weights are stored in fp8, and computed with in bf16."""
    model, x = Layers(3).to(first()), torch.randn(2, 1024, dtype=torch.bfloat16, device=first())
    rounded = copy.deepcopy(model).to(torch.float8_e4m3fn).to(torch.bfloat16)
    apply_layerwise_casting(model, torch.float8_e4m3fn, torch.bfloat16)
    assert model.layers[0].weight.dtype == torch.float8_e4m3fn
    for _ in range(2):
        assert torch.equal(model(x).cpu(), rounded(x).cpu())


@runs_on_device()
def test_whole_models_take_turns() -> None:
    """Whole models come when they are called, and send away the one before."""
    models, x = [Layers(2), Layers(2)], torch.randn(2, 1024)
    expected = [on_the_device(model)(x.to(first())).cpu() for model in models]
    hook = None
    for model in models:
        _, hook = cpu_offload_with_hook(model, first(), hook)
    for number, model in enumerate(models):
        assert torch.equal(model(x).cpu(), expected[number])
        places = [one.layers[0].weight.device.type for one in models]
        assert places == [here().name if one is model else "cpu" for one in models]


def test_the_link_is_measured(on_device: OnDevice, device: str, tmp_path: Path) -> None:
    (bytes_a_second,) = on_device(measures_rates, tmp_path)
    assert bytes_a_second > (1e9 if device == "cuda" else 1e6)
