"""Models larger than their budget on the device: the rest comes from the host and the disk at its use."""

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from drivetrain_dispatch import (
    BitsAndBytes4Bit,
    BitsAndBytes8Bit,
    Quantization,
    TorchAO,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    offload_stats,
    remove_hooks,
)
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.planning.bandwidth import measure_rates
from drivetrain_dispatch.planning.blocks import blocks_of
from drivetrain_dispatch.planning.infer_device_map import build_device_map, split_budgets
from drivetrain_dispatch.planning.solver import plan_places
from drivetrain_dispatch.quantization.block_scaled import BlockScaledTensor
from drivetrain_memory import record_peak
from hardware.devices import OnDevice, first, here, runs_on_device

VOCABULARY = 128


class Block(nn.Module):
    """A layer of a decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(2)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).relu())


class Decoder(nn.Module):
    """Predicts tokens; (sequences, tokens) to (sequences, tokens, vocabulary). 400 MB on a card."""

    def __init__(self) -> None:
        super().__init__()
        width = 64 * here().scale
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(8))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@torch.no_grad()
def generated(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Six further tokens, the likeliest each time; the tokens, and the last scores."""
    scores = model(tokens)
    for _ in range(6):
        tokens = torch.cat([tokens, scores[:, -1:].argmax(-1)], dim=1)
        scores = model(tokens)
    return tokens.cpu(), scores.cpu()


def saved(model: nn.Module, folder: Path) -> int:
    """Save a model; its bytes."""
    from safetensors.torch import save_file

    save_file(model.state_dict(), folder / "model.safetensors")
    return sum(tensor.nbytes for tensor in model.state_dict().values())


@runs_on_device()
def test_a_model_of_twice_its_budget_generates_the_same_tokens(folder: Path) -> None:
    """Generate with half of the weights on the device, and with none: the rest on the host and on the disk."""
    model, tokens = Decoder().eval(), torch.randint(0, VOCABULARY, (2, 9))
    size, largest = saved(model, folder), 4 * (64 * here().scale) ** 2 * 4
    model.to(first())
    gc.collect()
    with record_peak() as whole:
        expected = generated(model, tokens.to(first()))
    measure_rates(first())  # a plan would measure them, in memory that is no model's
    own = whole.devices[0].peak_bytes - whole.devices[0].before_bytes  # of activations
    del model
    for budget in (size // 2, largest + largest // 8):
        gc.collect()
        with init_empty_weights():
            model = Decoder().eval()
        budgets = {0: budget, "cpu": size // 4, "disk": size}
        with record_peak() as peak:
            load_checkpoint_and_dispatch(model, folder, "sequential", budgets)
            for _ in range(2):
                found = generated(model, tokens)
                assert torch.equal(found[0], expected[0])
                assert torch.equal(found[1], expected[1])
        most = peak.devices[0].peak_bytes - peak.devices[0].before_bytes
        assert most <= 1.02 * budget + own, (most, budget, own)
        assert offload_stats(model).bytes_fetched >= 14 * (size - budget)
        assert {"cpu", "disk"} <= {str(place) for place in model.hf_device_map.values()}
        del model


def packings(kind: str) -> Quantization:
    if kind.startswith("torchao"):
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

        return TorchAO(Int8WeightOnlyConfig() if kind == "torchao-int8" else Float8WeightOnlyConfig())
    return BitsAndBytes8Bit() if kind == "bnb-8bit" else BitsAndBytes4Bit(double_quant=True)


def loads_packed(kind: str, folder: Path) -> None:
    """Weights are packed as they are loaded, and come packed to the device."""
    tokens = torch.randint(0, VOCABULARY, (2, 9))
    size = saved(Decoder(), folder)
    results: list[tuple[Tensor, Tensor]] = []
    for device_map in ({"": 0}, {"embed": 0, "blocks": "cpu", "head": 0}):
        with init_empty_weights():
            model = Decoder().eval()
        load_checkpoint_and_dispatch(
            model,
            folder,
            device_map,
            dtype=torch.bfloat16,
            quantization=packings(kind),
            offload_folder=folder,
        )
        results.append(generated(model, tokens))
    stats = offload_stats(model)
    assert stats.num_missed == 0
    assert 0 < stats.bytes_fetched < 7 * size / 3  # in seven forwards, of fp32
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


@pytest.mark.parametrize("place", ["cpu", "disk", 0])
@runs_on_device()
def test_weights_that_are_kept_in_fp8_come_as_they_are(place: Any, folder: Path) -> None:
    """Weights that a checkpoint has in fp8, with a scale for each block, come as they are."""

    def kept() -> nn.Module:
        torch.manual_seed(0)
        model = Decoder().eval()
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                scales = torch.full([-(-size // 128) for size in layer.weight.shape], 0.5)
                values = layer.weight.detach().to(torch.float8_e4m3fn)
                packed = BlockScaledTensor(values, scales, torch.float32)
                layer.weight = nn.Parameter(packed, requires_grad=False)
        return model

    tokens, model, plain = torch.randint(0, VOCABULARY, (2, 9)), kept(), kept()
    with torch.no_grad():
        wanted = plain(tokens)
    dispatch_model(model, {"": place}, main_device=first(), offload_dir=folder)
    with torch.no_grad():
        for _ in range(2):
            found = model(tokens.to(first())).cpu()
            assert (found - wanted).norm() < 1e-3 * wanted.norm()  # of the host's products
    remove_hooks(model)


class Wide(nn.Module):
    """Layers of 64 MiB: with 4096 rows each takes the device longer than its copy takes the link."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.only_on("cuda", why="the simulated device computes nothing beside its copies")
@runs_on_device()
def test_copies_run_while_kernels_do(place: str, folder: Path) -> None:
    from hardware.cuda_device import kineto_events

    model, x = Wide(), torch.randn(4096, 4096, device=first())
    dispatch_model(model, {"": place}, main_device=first(), offload_dir=folder)
    with torch.no_grad():
        model(x)
        torch.accelerator.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            model(x)
            torch.accelerator.synchronize()
    events = [event for event in kineto_events(trace) if event.device_type() == DeviceType.CUDA]
    spans = [(event.name(), event.start_ns(), event.start_ns() + event.duration_ns()) for event in events]
    kernels = [span for span in spans if not span[0].startswith(("Memcpy", "Memset"))]
    copies = [span for span in spans if span[0].startswith("Memcpy HtoD")]
    beside = [
        copy for copy in copies if any(copy[1] < kernel[2] and kernel[1] < copy[2] for kernel in kernels)
    ]
    print(f"{place}: {len(beside)} of {len(copies)} copies run while kernels do")
    assert len(copies) >= len(model.layers)
    assert len(beside) >= len(model.layers) / 2  # of a layer from the disk, one of its chunks does


def takes_as_long_as_planned(folder: Path) -> str:
    """Compare a plan's seconds with those that a forward takes, where the link is what takes the time."""
    model, x = Wide(), torch.randn(1, 4096, device=first())
    size = sum(parameter.nbytes for parameter in model.parameters())
    blocks = blocks_of(ModelLayout.of(model), offload_buffers=False)
    computing, rooms = split_budgets({0: size // 2, "cpu": size})
    plan = plan_places(blocks, {}, rooms, measure_rates(0, cache=folder / "rates.json"))
    dispatch_model(model, build_device_map(plan, blocks, computing, {}))
    taken: list[float] = []
    with torch.no_grad():
        for _ in range(5):
            torch.accelerator.synchronize()
            start = time.perf_counter()
            model(x)
            torch.accelerator.synchronize()
            taken.append(time.perf_counter() - start)
    measured = min(taken[1:])
    told = f"planned {plan.seconds * 1e3:.1f} ms, measured {measured * 1e3:.1f} ms"
    assert 1 / 3 < measured / plan.seconds < 3, told
    return told


@pytest.mark.parametrize("kind", ["torchao-int8", "torchao-fp8"])
@pytest.mark.default_cases
def test_weights_that_torchao_packs_come_packed(on_device: OnDevice, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="wants torchao, which an extra of drivetrain-dispatch brings")
    on_device(loads_packed, kind, tmp_path)


@pytest.mark.parametrize("kind", ["bnb-8bit", "bnb-nf4"])
@pytest.mark.only_on("cuda", why="bitsandbytes has no kernels for the simulated device")
def test_weights_that_bitsandbytes_packs_come_packed(on_device: OnDevice, kind: str, tmp_path: Path) -> None:
    pytest.importorskip(
        "bitsandbytes", reason="wants bitsandbytes, which an extra of drivetrain-dispatch brings"
    )
    on_device(loads_packed, kind, tmp_path)


@pytest.mark.only_on("cuda", why="the rates of the simulated device are those of the host's memory")
def test_a_forward_takes_as_long_as_its_plan_says(on_device: OnDevice, tmp_path: Path) -> None:
    print(*on_device(takes_as_long_as_planned, tmp_path))
