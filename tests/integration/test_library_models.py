"""Models of transformers train under each dimension as in a plain loop: losses, norms and weights of 20 steps."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from drivetrain_state import ParallelDims
from optional_modules import skip_without
from parallel.transformers_cases import CASES, VOCABULARY
from plain_loop.accelerated import accelerator_of

skip_without("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of its own classes

STEPS = 20
MESHES = {
    "tensor 2": ("usual", ParallelDims(tensor=2), 2),
    "tensor 2, sequence": ("usual", ParallelDims(tensor=2, sequence=True), 2),
    "context 2, heads": ("ddp", ParallelDims(context=2, context_method="heads"), 2),
    "context 2, gathered": ("fsdp", ParallelDims(context=2, context_method="gathered"), 2),
    "shard 2 x expert 2": ("fsdp", ParallelDims(shard=2, expert=2), 2),
    "tensor 2 x expert 2": ("usual", ParallelDims(tensor=2, expert=2), 2),
    "shard 2 x tensor 2": ("fsdp", ParallelDims(shard=2, tensor=2), 4),
    "context 2 x tensor 2": ("usual", ParallelDims(context=2, tensor=2), 4),
}
DENSE, EXPERTS = ("qwen3", "llama", "llama tied", "gpt2", "bert", "vit"), ("mixtral", "qwen3 moe")
RUNS = [
    pytest.param(name, mesh, marks=pytest.mark.ranks(MESHES[mesh][2], timeout_seconds=170))
    for mesh in MESHES
    for name in (EXPERTS if "expert" in mesh else (*DENSE, *EXPERTS))
]


def build(name: str) -> nn.Module:
    case = CASES[name]
    if name in EXPERTS:  # grouped products are of fp32 at most
        case = replace(case, settings={**case.settings, "experts_implementation": "eager"})
    model = case.build().train().double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    if hasattr(model.config, "image_size"):
        pixels = torch.randn(4, 3, 32, 32, generator=generator, dtype=torch.float64)
        logits = model(pixel_values=pixels).logits
        return nn.functional.cross_entropy(logits, torch.arange(4) % logits.shape[1])
    tokens = torch.randint(5, VOCABULARY, (4, 9), generator=generator)
    logits = model(input_ids=tokens[:, :-1]).logits  # the model's own loss would be in fp32
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_of(model: nn.Module) -> AdamW:
    return AdamW(
        model.parameters(), lr=3e-3, eps=1e-6
    )  # the gradient of a key's bias is what rounding leaves


@pytest.mark.parametrize(("name", "mesh"), RUNS)
@pytest.mark.default_cases("mixtral-shard 2 x expert 2")
def test_20_steps_are_those_of_a_plain_loop(name: str, mesh: str) -> None:
    plain = build(name)
    optimizer = optimizer_of(plain)
    expected: list[float] = []
    for step in range(STEPS):
        loss = loss_of(plain, step)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected += loss.item(), norm.item()

    backend, parallelism, _ = MESHES[mesh]
    with accelerator_of(backend, parallelism=parallelism) as accelerator:
        model = build(name)
        called, optimizer = accelerator.prepare(model, optimizer_of(model))
        found: list[float] = []
        for step in range(STEPS):
            loss = loss_of(called, step)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(called.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found += loss.item(), float(norm)
        # Routers and norms of these models compute in fp32, whatever the model's dtype.
        assert found == pytest.approx(expected, rel=1e-6 if name in EXPERTS else 1e-9)
        weights = accelerator.get_state_dict(called)
        if accelerator.is_main_process:
            for key, value in plain.state_dict().items():
                torch.testing.assert_close(
                    weights[key], value, rtol=0, atol=1e-6 if name in EXPERTS else 1e-8
                )
