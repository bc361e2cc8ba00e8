"""Models of other libraries whose layers or sequences ranks divide: they train and are exported as on one rank."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from drivetrain import Accelerator
from drivetrain_backends import NonFiniteGradientError
from drivetrain_state import ParallelDims
from optional_modules import skip_without
from parallel.transformers_cases import CASES
from plain_loop.accelerated import accelerator_of, take_steps

skip_without("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and PEFT warn of their own classes

TOKENS = torch.randint(5, 65, (4, 9), generator=torch.Generator().manual_seed(0))
MESHES = {
    "tensor 2": ("usual", ParallelDims(tensor=2), 2),
    "context 2": ("usual", ParallelDims(context=2), 2),
    "fsdp context 2": ("fsdp", ParallelDims(context=2), 2),
    "shard 2 x tensor 2": ("fsdp", ParallelDims(shard=2, tensor=2), 4),
}


def on(*names: str) -> Any:
    """Run a test's body on the ranks of each mesh; the first mesh by default."""
    cases = [
        pytest.param(name, marks=pytest.mark.ranks(MESHES[name][2], timeout_seconds=150)) for name in names
    ]
    given = pytest.mark.parametrize("mesh", cases)
    return lambda test: given(pytest.mark.default_cases(names[0])(test))


def divided(mesh: str, **options: Any) -> Accelerator:
    backend, parallelism, _ = MESHES[mesh]
    return accelerator_of(backend, parallelism=parallelism, **options)


def llama() -> nn.Module:
    return CASES["llama"].build().train().double()


def adapted(base: nn.Module) -> nn.Module:
    """Return a model with adapters of PEFT on queries and values, whose outputs they change from the beginning."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    targets = ["q_proj", "v_proj"]
    config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(base, config).double()


def optimizer_of(model: nn.Module) -> AdamW:
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def loss_of(model: nn.Module) -> Tensor:
    logits = model(input_ids=TOKENS[:, :-1]).logits  # the model's own loss would be in fp32
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # from bf16, in fp8
    return nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    return take_steps(accelerator, model, optimizer, lambda _: loss_of(model), range(steps))


def plainly(
    build: Callable[[], nn.Module], steps: int, *, autocast: bool = False
) -> tuple[list[float], nn.Module]:
    model = build()
    optimizer, losses = optimizer_of(model), list[float]()
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.02
    return losses, model


def logits_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def assert_near(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


@on("tensor 2", "context 2", "shard 2 x tensor 2")
def test_an_export_is_read_by_transformers_and_loaded_again(mesh: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    expected, plain = plainly(llama, 2)
    with divided(mesh) as accelerator:
        model = llama()
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        assert train(accelerator, model, optimizer, 2) == pytest.approx(expected, abs=1e-9)
        accelerator.save_model(model, tmp_path)
        if accelerator.is_main_process:
            accelerator.unwrap_model(model).config.save_pretrained(tmp_path)
        accelerator.wait_for_everyone()
        found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
        assert_near(logits_of(found), logits_of(plain))
        train(accelerator, model, optimizer, 1)
        assert accelerator.load_model(model, tmp_path) == ([], [])
        assert_near(logits_of(model), logits_of(plain))


@on("tensor 2", "context 2", "shard 2 x tensor 2")
@pytest.mark.slow
def test_adapters_train_are_saved_and_go_on_as_on_one_rank(mesh: str, tmp_path: Path) -> None:
    from peft import PeftModel

    expected, plain = plainly(lambda: adapted(llama()), 4)
    losses: list[float] = []
    for resumes in (False, True):
        with divided(mesh, project_dir=tmp_path) as accelerator:
            model = adapted(llama())
            model, optimizer = accelerator.prepare(model, optimizer_of(model))
            if resumes:
                assert accelerator.load_state() == 2
            losses += train(accelerator, model, optimizer, 2)
            accelerator.save_state(trained_only=True)
            accelerator.save_model(model, tmp_path / "adapters", trained_only=True)
            accelerator.wait_for_everyone()
            said = accelerator.plan.facts.get("layers")
    assert losses == pytest.approx(expected, abs=1e-9)
    found = PeftModel.from_pretrained(llama(), str(tmp_path / "adapters"))
    assert_near(logits_of(found), logits_of(plain))
    if "tensor" in mesh:  # the small matrices of adapters, and the perceptrons
        assert said.startswith(
            "divided among 2 ranks (tensor): PeftModelForCausalLM: 14 layers (found), left: "
        )


@on("context 2", "fsdp context 2", "tensor 2")
@pytest.mark.slow
def test_adapters_of_blocks_that_are_run_again_train_as_on_one_rank(mesh: str) -> None:
    expected, _ = plainly(lambda: adapted(llama()), 3)
    with divided(mesh) as accelerator:
        model = adapted(llama())
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        assert train(accelerator, model, optimizer, 3) == pytest.approx(expected, abs=1e-9)


@on("context 2", "tensor 2")
def test_adapters_over_a_quantised_base_train_as_on_one_rank_or_are_refused(mesh: str) -> None:
    ao = pytest.importorskip("torchao.quantization")

    def build() -> nn.Module:
        base = CASES["llama"].build().train()
        ao.quantize_(base.model, ao.Int8WeightOnlyConfig())
        return adapted(base).float()

    expected, _ = plainly(build, 3)
    with divided(mesh) as accelerator:
        model = build()
        if mesh == "tensor 2":
            with pytest.raises(ValueError, match=r"no layer that 2 ranks can divide: .*'whole'"):
                accelerator.prepare(model, optimizer_of(model))
            return
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        assert train(accelerator, model, optimizer, 3) == pytest.approx(expected, rel=1e-4)


@on("tensor 2", "context 2")
@pytest.mark.slow
def test_layers_in_float8_train_as_on_one_rank_or_are_refused(mesh: str) -> None:
    pytest.importorskip("torchao")
    from drivetrain_precision import LayerFilter, TorchaoRecipe, convert_model

    def build(recipe: TorchaoRecipe | None = None) -> nn.Module:
        model = CASES["llama"].build().train()
        if recipe is not None:
            convert_model(model, recipe)
        return model

    for scaling in ("rowwise", "tensorwise"):
        recipe = TorchaoRecipe(scaling=scaling, layers=LayerFilter(skip_first=False))
        expected, _ = plainly(partial(build, recipe), 3, autocast=True)
        with divided(mesh, mixed_precision="fp8", fp8_recipe=recipe) as accelerator:
            model = build()
            model, optimizer = accelerator.prepare(model, optimizer_of(model))
            if "context" in mesh and scaling == "tensorwise":
                with pytest.raises(ValueError, match=r"treat each position alone \(fp8: by row\)"):
                    train(accelerator, model, optimizer, 1)
                continue
            assert train(accelerator, model, optimizer, 3) == pytest.approx(expected, abs=2e-2)
            assert accelerator.plan.facts["fp8 layers"].startswith("14 of 15")
            if "tensor" in mesh:  # the embedding and the head; layers in fp8 stay whole
                said = accelerator.plan.facts["layers"]
                assert "LlamaForCausalLM: 2 layers (the model's own plan), left: " in said


@on("tensor 2")
def test_the_memory_of_a_divided_model_is_that_of_this_ranks_parts(mesh: str) -> None:
    from drivetrain_memory import memory_breakdown

    with divided(mesh) as accelerator:
        model = llama()
        whole = sum(p.numel() for name, p in model.named_parameters() if "norm" not in name)
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        train(accelerator, model, optimizer, 1)
        found = memory_breakdown(model, optimizer.optimizer)
        # The five norms of 32 elements are whole on both ranks.
        held = accelerator.gather(torch.tensor([found.totals["parameters"] - 8 * 5 * 32]))
        assert held.sum().item() == 8 * whole


@on("tensor 2", "shard 2 x tensor 2")
def test_the_layer_of_a_value_that_is_not_finite_is_named_on_all_ranks(mesh: str) -> None:
    sections = {"run": {"on_nonfinite": "raise", "show_plan": False}}
    accelerator, model = divided(mesh, sections=sections), llama()
    with torch.no_grad():
        model.get_parameter("model.layers.1.post_attention_layernorm.weight").fill_(torch.inf)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    accelerator.backward(loss_of(model))
    said = r"not finite is the output of model\.layers\.1\.post_attention_layernorm "
    with pytest.raises(NonFiniteGradientError, match=said):
        optimizer.step()
    accelerator.end_training()
