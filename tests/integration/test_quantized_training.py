"""Models that train for quantised inference, and adapters over packed bases, under each backend of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain_backends import UnshardedParameterError
from drivetrain_precision import (
    LayerFilter,
    PrecisionError,
    QuantizedScheme,
    export_quantized,
    load_quantized,
    prepare_qat,
    undo_qat,
)
from plain_loop.accelerated import DDP, FSDP, SINGLE, accelerator_of, take_steps, weights_of

SCHEMES = (
    QuantizedScheme(),
    QuantizedScheme(weight_bits=8, group_size=None),
    QuantizedScheme(activations="full"),
    QuantizedScheme(weight_bits=8, group_size=None, activations="full"),
)


class Block(nn.Module):
    """Maps (batch, 64) to (batch, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """Maps (batch, 64) to (batch, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def steps(accelerator: Any, model: nn.Module, optimizer: Any, count: int = 2) -> list[float]:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(accelerator.process_index))
    return take_steps(accelerator, model, optimizer, lambda _: (model(x) - 1).square().mean(), range(count))


def check_resumes(accelerator: Any, model: nn.Module, optimizer: Any, **save: Any) -> Path:
    """Train, save, train on; and go on from the checkpoint as before."""
    first = steps(accelerator, model, optimizer)
    place = accelerator.save_state(**save)
    then = steps(accelerator, model, optimizer)
    assert then[-1] < first[0]
    accelerator.load_state()
    assert steps(accelerator, model, optimizer) == then
    return place


def train_resume_export(
    folder: Path, backend: str, scheme: QuantizedScheme, precision: str = "no", stage: int | None = None
) -> float:
    """Train, go on from a checkpoint, export; return the greatest difference between export and training."""
    place = folder / "export"
    # By default stage 3 keeps weights as small as these whole.
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    sections = None if stage is None else {"deepspeed": {"config": config}}
    with accelerator_of(
        backend, mixed_precision=precision, project_dir=folder, sections=sections
    ) as accelerator:
        plain = net()
        assert len(prepare_qat(plain, scheme).prepared) == 4
        model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
        check_resumes(accelerator, model, optimizer)
        if backend == "fsdp" or stage == 3:
            refused = PrecisionError if backend == "fsdp" else UnshardedParameterError
            with pytest.raises(refused, match=r"among ranks.* inside .*accelerator\.gathered\(model"):
                export_quantized(accelerator.unwrap_model(model), place)
        with accelerator.gathered(model):
            if accelerator.is_main_process:
                export_quantized(accelerator.unwrap_model(model), place)
        accelerator.wait_for_everyone()
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(5))  # stage 3 computes on all ranks
        model.eval()
        with torch.no_grad():
            expected = model(x).float()
        weights = weights_of(accelerator, model)
    found = net()  # outside: until it is closed, DeepSpeed's stage 3 has a product of its own for all models
    load_quantized(found, place)
    # Ordinary weights of the same run, into a plain model: what rounding is left out.
    other = net()
    other.load_state_dict(weights)
    assert undo_qat(other) == ()
    assert not torch.allclose(other(x), expected, atol=1e-4)
    return float((found(x) - expected).abs().max() / expected.abs().max())


@pytest.mark.ranks(2)
def test_a_trained_model_is_resumed_and_exported_under_ddp(tmp_path: Path) -> None:
    assert train_resume_export(tmp_path, "ddp", SCHEMES[0]) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("backend", [SINGLE, DDP, FSDP])
@pytest.mark.parametrize("place", range(4))
def test_each_scheme_trains_and_exports_under_each_backend(tmp_path: Path, backend: str, place: int) -> None:
    assert train_resume_export(tmp_path, backend, SCHEMES[place]) == 0.0


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[3]], ids=["4 bits", "8 bits"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_scheme_trains_and_exports_in_each_stage_of_deepspeed(
    tmp_path: Path, stage: int, scheme: QuantizedScheme
) -> None:
    assert train_resume_export(tmp_path, "deepspeed", scheme, "no", stage) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[3]], ids=["4 bits", "8 bits"])
@pytest.mark.parametrize("backend", [DDP, FSDP])
def test_in_bf16_the_export_computes_nearly_the_same(
    tmp_path: Path, backend: str, scheme: QuantizedScheme
) -> None:
    assert train_resume_export(tmp_path, backend, scheme, "bf16") < 0.05


def packed(kind: str, storage: torch.dtype = torch.uint8) -> Net:
    """A model whose blocks bitsandbytes holds in 4 or 8 bits."""
    import bitsandbytes as bnb

    model = net().requires_grad_(False)
    for block in model.blocks:
        for name in ("up", "down"):
            old = getattr(block, name)
            sizes = (old.in_features, old.out_features)
            if kind == "4bit":
                new: nn.Module = bnb.nn.Linear4bit(
                    *sizes, compute_dtype=torch.float32, quant_type="nf4", quant_storage=storage
                )
            else:
                new = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
            new.load_state_dict(old.state_dict())
            setattr(block, name, new.requires_grad_(False).to("cpu"))
    return model


def adapted(kind: str, storage: torch.dtype = torch.uint8) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    base = packed(kind, storage)
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(r=4, target_modules=["up", "down"]))


def train_adapters(folder: Path, backend: str, kind: str) -> None:
    from peft import PeftModel

    with accelerator_of(backend, project_dir=folder) as accelerator:
        plain = adapted(kind)
        optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01)
        model, optimizer = accelerator.prepare(plain, optimizer)
        with pytest.raises(
            ValueError, match=r"packed by bitsandbytes.*save_state\(trained_only=True\) leaves"
        ):
            accelerator.save_state()
        place = check_resumes(accelerator, model, optimizer, trained_only=True)
        stored = (place / "weights-model.json").read_text()
        assert "lora_A" in stored
        assert not any(word in stored for word in ("base_layer", "absmax", "SCB"))
        accelerator.save_model(model, folder / "adapters", trained_only=True)
        accelerator.wait_for_everyone()
        x = torch.randn(16, 64)
        with torch.no_grad():  # in training mode: in evaluation on CPUs, bitsandbytes computes in bf16
            expected = model(x)
        found = PeftModel.from_pretrained(packed(kind), str(folder / "adapters")).train()
        torch.testing.assert_close(found(x), expected, rtol=1e-4, atol=1e-4)
        # Merged into the weights that were not packed: no further rounding than that of the packed base.
        merged = PeftModel.from_pretrained(net(), str(folder / "adapters")).merge_and_unload()
        assert (merged(x) - expected).abs().max() / expected.abs().max() < 0.25
        assert type(merged.blocks[0].up) is nn.Linear


@pytest.mark.slow
@pytest.mark.parametrize("backend", [SINGLE, DDP, FSDP])
@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_adapters_over_a_packed_base_train_and_resume(tmp_path: Path, backend: str, kind: str) -> None:
    train_adapters(tmp_path, backend, kind)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.parametrize("kind", ["4bit", "8bit"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adapters_over_a_packed_base_train_and_resume_in_each_stage_of_deepspeed(
    tmp_path: Path, stage: int, kind: str
) -> None:
    train_adapters(tmp_path, f"deepspeed-{stage}", kind)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_packed_weight_that_fsdp_would_divide_is_refused() -> None:
    with accelerator_of("fsdp") as accelerator:
        with pytest.raises(ValueError, match=r"Params4bit of bitsandbytes held in bfloat16.*torch\.uint8"):
            accelerator.prepare(packed("4bit", torch.bfloat16))


def test_weights_that_are_trained_in_int8_are_refused() -> None:
    from torchao.prototype.quantized_training import (
        int8_mixed_precision_training,
        int8_weight_only_quantized_training,
    )
    from torchao.quantization import quantize_

    for config in (int8_weight_only_quantized_training(), int8_mixed_precision_training(module_swap=False)):
        model = net()
        quantize_(model, config)
        with accelerator_of() as accelerator:
            with pytest.raises(
                PrecisionError, match=r"blocks\.0\.up\.weight is trained as a Int8.*prepare_qat"
            ):
                accelerator.prepare(model)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [SINGLE, DDP, FSDP])
def test_products_in_int8_train_plain_weights(backend: str) -> None:
    from torchao.prototype.quantized_training import int8_mixed_precision_training
    from torchao.quantization import quantize_

    with accelerator_of(backend) as accelerator:
        plain = net()
        quantize_(plain.blocks, int8_mixed_precision_training(module_swap=True))
        model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
        losses = steps(accelerator, model, optimizer, 4)
        assert losses[-1] < losses[0]
        net().load_state_dict(weights_of(accelerator, model))


@pytest.mark.slow
def test_adapters_of_a_model_that_rounds_are_merged_before_its_export(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = net()
    adapted_model = get_peft_model(model, LoraConfig(r=2, target_modules=["up"], init_lora_weights=False))
    report = prepare_qat(adapted_model, QuantizedScheme(), LayerFilter(skip_first=False, exclude=("*.head",)))
    assert "is a low-rank adapter" in str(report)
    with pytest.raises(PrecisionError, match=r"merge_and_unload\(\) first"):
        export_quantized(adapted_model, tmp_path)
    assert list(tmp_path.iterdir()) == []
    merged = adapted_model.merge_and_unload()
    export_quantized(merged, tmp_path)
    found, x = net(), torch.randn(4, 64)
    load_quantized(found, tmp_path)
    assert torch.equal(found(x), merged(x))
