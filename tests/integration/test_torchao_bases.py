"""Adapters over a frozen base that torchao packed, under each backend."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optional_modules import skip_without
from plain_loop.accelerated import DDP, FSDP, SINGLE, accelerator_of, take_steps
from plain_loop.case import Case, own_rank, run_plain

skip_without("torchao")  # an extra of drivetrain-precision brings it
skip_without("peft")
pytestmark = pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without")  # none is merged

KINDS = ("int8", "int4", "float8", "nf4")


def base(kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A frozen model whose first two layers torchao holds in 8 or 4 bits."""
    from torchao import quantization as ao
    from torchao.quantization.granularity import PerGroup

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 4))
    model.to(dtype).requires_grad_(False)
    if kind == "nf4":
        for layer in (model[0], model[2]):
            layer.weight = nn.Parameter(ao.to_nf4(layer.weight, 64, 64), requires_grad=False)
        return model
    configs = {
        "int8": ao.Int8WeightOnlyConfig(),
        "int4": ao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4,  # pyright: ignore[reportAttributeAccessIssue]
            granularity=PerGroup(32),
        ),
        "float8": ao.Float8WeightOnlyConfig(),
    }
    ao.quantize_(model[:4], configs[kind])
    return model


def adapted(kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    packed = base(kind, seed=seed, dtype=dtype)
    torch.manual_seed(1)
    return get_peft_model(packed, LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False))


def batch(rank: int) -> Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model.parameters())


def loss_of(model: nn.Module, rank: int, number: int = 0) -> Tensor:
    return (model(batch(rank)).float() - 1).square().mean()


def steps(accelerator: Any, model: nn.Module, optimizer: Any, count: int = 2) -> list[float]:
    return take_steps(accelerator, model, optimizer, lambda _: loss_of(model, own_rank()), range(count))


def ways() -> list[Any]:
    quick = ("ddp", "int8"), ("fsdp", "nf4")
    return [
        pytest.param(
            backend,
            kind,
            marks=[pytest.mark.ranks(num), *[pytest.mark.slow] * ((backend, kind) not in quick)],
        )
        for backend, num in (("single", 1), ("ddp", 2), ("fsdp", 2))
        for kind in KINDS
    ]


@pytest.mark.parametrize(("backend", "kind"), ways())
@pytest.mark.slow
def test_adapters_train_as_in_a_plain_loop_resume_and_are_exported(
    tmp_path: Path, backend: str, kind: str
) -> None:
    from peft import PeftModel

    with accelerator_of(backend, project_dir=tmp_path) as accelerator:
        plain = adapted(kind, seed=own_rank())  # rank 0's base is everybody's
        model, optimizer = accelerator.prepare(plain, optimizer_of(plain))
        losses = steps(accelerator, model, optimizer)
        with pytest.raises(ValueError, match=r"packed by torchao.*save_state\(trained_only=True\) leaves"):
            accelerator.save_state()
        accelerator.save_state(trained_only=True)
        losses += steps(accelerator, model, optimizer)
        accelerator.load_state()
        assert steps(accelerator, model, optimizer) == losses[2:]
        accelerator.save_model(model, tmp_path / "adapters", trained_only=True)
        accelerator.wait_for_everyone()
        found = PeftModel.from_pretrained(base(kind), str(tmp_path / "adapters"))
        with torch.no_grad():
            assert torch.equal(found(batch(9)), model(batch(9)))
        case = Case(build=lambda: adapted(kind), loss=loss_of, optimizer=sgd, steps=4)
        expected = run_plain(case, accelerator.num_processes).losses
        assert expected[-1] < 0.9 * expected[0] or own_rank()
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [SINGLE, DDP, FSDP])
@pytest.mark.parametrize("kind", KINDS)
def test_a_base_that_was_built_in_bf16_computes_in_it(backend: str, kind: str) -> None:
    with accelerator_of(backend, mixed_precision="bf16") as accelerator:
        plain = adapted(kind, dtype=torch.bfloat16)
        model, optimizer = accelerator.prepare(plain, optimizer_of(plain))
        losses = steps(accelerator, model, optimizer, 4)
        assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_packed_base_that_differs_between_ranks_is_found(tmp_path: Path) -> None:
    with accelerator_of("ddp", project_dir=tmp_path) as accelerator:
        plain = adapted("int8")
        weight: Any = plain.get_parameter("base_model.model.0.base_layer.weight")
        model, _ = accelerator.prepare(plain, optimizer_of(plain))
        accelerator.save_state(trained_only=True)
        if own_rank() == 1:
            with torch.no_grad():
                weight.scale.add_(1)
        with pytest.raises(RuntimeError, match=r"0\.base_layer\.weight"):
            accelerator.save_state(trained_only=True)
        del model


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_deepspeed_refuses_a_base_that_torchao_packed(stage: int, kind: str) -> None:
    with accelerator_of(f"deepspeed-{stage}") as accelerator:
        plain = adapted(kind)
        with pytest.raises(ValueError, match=r"packed by torchao.*or choose backend='ddp' or 'fsdp'"):
            accelerator.prepare(plain, optimizer_of(plain))
