"""Adapters over a frozen base that torchao packed, under each backend."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Accelerator

pytest.importorskip("torchao", reason="an extra of drivetrain-precision brings it")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without")  # none is merged

QUIET = {"run": {"show_plan": False}}
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


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def steps(accelerator: Accelerator, model: nn.Module, optimizer: Any, count: int = 2) -> list[float]:
    losses: list[float] = []
    for _ in range(count):
        loss = (model(batch(accelerator.process_index)).float() - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def alone(kind: str, num_ranks: int) -> list[list[float]]:
    """The losses of a plain loop over the batches of all ranks, by rank."""
    model = adapted(kind)
    optimizer = optimizer_of(model)
    found: list[list[float]] = [[] for _ in range(num_ranks)]
    for _ in range(4):
        for rank, losses in enumerate(found):
            loss = (model(batch(rank)) - 1).square().mean()
            (loss / num_ranks).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def train_resume_export(folder: str, backend: str, kind: str) -> list[float]:
    """Train adapters, go on from a checkpoint, export them; return the losses of four steps."""
    from peft import PeftModel

    with Accelerator(cpu=True, backend=backend, project_dir=folder, sections=QUIET) as accelerator:
        plain = adapted(kind, seed=accelerator.process_index)  # rank 0's base is everybody's
        model, optimizer = accelerator.prepare(plain, optimizer_of(plain))
        first = steps(accelerator, model, optimizer)
        with pytest.raises(ValueError, match=r"packed by torchao.*save_state\(trained_only=True\) leaves"):
            accelerator.save_state()
        accelerator.save_state(trained_only=True)
        then = steps(accelerator, model, optimizer)
        accelerator.load_state()
        assert steps(accelerator, model, optimizer) == then
        accelerator.save_model(model, Path(folder, "adapters"), trained_only=True)
        accelerator.wait_for_everyone()
        found = PeftModel.from_pretrained(base(kind), str(Path(folder, "adapters")))
        with torch.no_grad():
            assert torch.equal(found(batch(9)), model(batch(9)))
        return first + then


def ways() -> list[Any]:
    quick = ("ddp", "int8"), ("fsdp", "nf4")
    return [
        pytest.param(backend, kind, marks=() if (backend, kind) in quick else pytest.mark.slow)
        for backend in ("single", "ddp", "fsdp")
        for kind in KINDS
    ]


@pytest.mark.parametrize(("backend", "kind"), ways())
@pytest.mark.default_cases("fsdp-nf4")
def test_adapters_train_as_in_a_plain_loop_resume_and_are_exported(
    run_ranks: Any, tmp_path: Path, backend: str, kind: str
) -> None:
    if backend == "single":
        found = [train_resume_export(str(tmp_path), backend, kind)]
    else:
        found = run_ranks(train_resume_export, str(tmp_path), backend, kind)
    expected = alone(kind, len(found))
    assert expected[0][-1] < 0.9 * expected[0][0]
    for losses, wanted in zip(found, expected, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-5)


def train_in_bf16(backend: str, kind: str) -> None:
    with Accelerator(cpu=True, backend=backend, mixed_precision="bf16", sections=QUIET) as accelerator:
        plain = adapted(kind, dtype=torch.bfloat16)
        model, optimizer = accelerator.prepare(plain, optimizer_of(plain))
        losses = steps(accelerator, model, optimizer, 4)
        assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_base_that_was_built_in_bf16_computes_in_it(run_ranks: Any, backend: str, kind: str) -> None:
    if backend == "single":
        train_in_bf16(backend, kind)
    else:
        run_ranks(train_in_bf16, backend, kind)


def ranks_of_other_bases(folder: str) -> None:
    with Accelerator(cpu=True, backend="ddp", project_dir=folder, sections=QUIET) as accelerator:
        plain = adapted("int8")
        weight: Any = plain.get_parameter("base_model.model.0.base_layer.weight")
        model, _ = accelerator.prepare(plain, optimizer_of(plain))
        accelerator.save_state(trained_only=True)
        if accelerator.process_index == 1:
            with torch.no_grad():
                weight.scale.add_(1)
        with pytest.raises(RuntimeError, match=r"0\.base_layer\.weight"):
            accelerator.save_state(trained_only=True)
        del model


@pytest.mark.slow
def test_a_packed_base_that_differs_between_ranks_is_found(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(ranks_of_other_bases, str(tmp_path))


def refused_by_deepspeed(kind: str, stage: int) -> None:
    sections = {**QUIET, "deepspeed": {"stage": stage}}
    with Accelerator(cpu=True, backend="deepspeed", sections=sections) as accelerator:
        plain = adapted(kind)
        with pytest.raises(ValueError, match=r"packed by torchao.*or choose backend='ddp' or 'fsdp'"):
            accelerator.prepare(plain, optimizer_of(plain))


@pytest.mark.slow
@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_deepspeed_refuses_a_base_that_torchao_packed(run_ranks: Any, stage: int) -> None:
    for kind in KINDS:
        run_ranks(refused_by_deepspeed, kind, stage)
