"""Averages of weights, beside torch's own over models of installed libraries, and in runs that stop and go on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from drivetrain import ParallelDims
from optional_modules import skip_without
from plain_loop.accelerated import ON_TWO, accelerator_of, assert_equal_weights, weights_of
from planned_models import Perceptron

STEPS = 4


def gpt2() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Tied weights, and dropout."""
    import transformers as t

    model = t.GPT2LMHeadModel(t.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16))
    ids = torch.arange(12).view(2, 6)
    return model, lambda model: model(input_ids=ids, labels=ids).loss


def resnet() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Statistics of batch norms."""
    import transformers as t

    config = t.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )
    model, images = t.ResNetForImageClassification(config), torch.randn(4, 3, 32, 32)
    return model, lambda model: model(pixel_values=images, labels=torch.arange(4) % 3).loss


def adapted() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A frozen base model under adapters."""
    import peft

    base, loss_of = gpt2()
    return peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    ), loss_of


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's
@pytest.mark.parametrize("build", [gpt2, resnet, adapted])
@pytest.mark.parametrize("decay", [0.9, None])
@pytest.mark.default_cases("0.9-gpt2", "None-resnet")
def test_an_average_is_torchs(build: Callable[[], Any], decay: float | None) -> None:
    skip_without("transformers")
    skip_without("peft")
    torch.manual_seed(0)
    model, loss_of = build()
    theirs = AveragedModel(
        model, multi_avg_fn=None if decay is None else get_ema_multi_avg_fn(decay), use_buffers=True
    )
    if decay is not None:
        theirs.update_parameters(model)  # its first update takes the weights themselves
    accelerator = accelerator_of("single")
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    ema = accelerator.ema(model, decay=decay)
    for _ in range(STEPS):
        accelerator.backward(loss_of(model))
        optimizer.step()
        optimizer.zero_grad()
        theirs.update_parameters(accelerator.unwrap_model(model))
    own = weights_of(accelerator, model)
    expected = theirs.module.state_dict()
    with ema.applied():
        found = weights_of(accelerator, model)
    for name, value in found.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    assert_equal_weights(own, weights_of(accelerator, model))
    accelerator.end_training()


def small() -> nn.Module:
    torch.manual_seed(0)
    return Perceptron(4)


def start(backend: str, **options: Any) -> tuple[Any, Any, Any, Any]:
    accelerator = accelerator_of(backend, **options)
    model = small()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    return accelerator, model, optimizer, accelerator.ema(model, decay=0.9, warmup=10)


def step(
    accelerator: Any, model: nn.Module, optimizer: Any, loss: Callable[[Tensor], Tensor] = Tensor.mean
) -> None:
    accelerator.backward(loss(model(torch.ones(2, 4)).square()))
    optimizer.step()
    optimizer.zero_grad()


def average_of(accelerator: Any, model: nn.Module, ema: Any) -> dict[str, Tensor]:
    with ema.applied():
        return weights_of(accelerator, model)


@ON_TWO
@pytest.mark.parametrize("dims", [{}, {"tensor": 2}, {"pipeline": 2}], ids=str)
@pytest.mark.default_cases("{}", "{'tensor': 2}")
def test_a_run_that_goes_on_keeps_its_average(dims: dict[str, int], tmp_path: Path) -> None:
    options = {"parallelism": ParallelDims(**dims)} if dims else {}

    def train(accelerator: Any, model: Any, optimizer: Any) -> None:
        if "pipeline" in dims:
            accelerator.train_step(torch.ones(2, 4), loss=lambda model, x: model(x).square().mean())
        else:
            step(accelerator, model, optimizer)

    folder = str(tmp_path.parent)  # the same on all ranks
    accelerator, model, optimizer, ema = start("fsdp" if not dims else "ddp", project_dir=folder, **options)
    for number in range(STEPS):
        train(accelerator, model, optimizer)
        if number == 1:
            accelerator.save_state()
    expected = average_of(accelerator, model, ema)
    accelerator.end_training()
    accelerator, model, optimizer, ema = start("fsdp" if not dims else "ddp", project_dir=folder, **options)
    accelerator.load_state()
    assert (ema.num_steps, ema.num_updates) == (2, 2)
    for _ in range(STEPS - 2):
        train(accelerator, model, optimizer)
    assert_equal_weights(expected, average_of(accelerator, model, ema))
    accelerator.end_training()


def test_updates_follow_steps_that_moved_the_weights(tmp_path: Path) -> None:
    accelerator, model, optimizer, ema = start("single", sections={"run": {"on_nonfinite": "skip"}})
    sparse = accelerator.ema(model, decay=0.9, every=2, start=2)
    step(accelerator, model, optimizer)
    step(accelerator, model, optimizer, lambda loss: loss.mean() * float("nan"))
    assert (ema.num_updates, sparse.num_updates) == (1, 0)
    step(accelerator, model, optimizer)
    begun = weights_of(accelerator, model)
    assert_equal_weights(begun, average_of(accelerator, model, sparse))  # from where it starts
    for _ in range(2):
        step(accelerator, model, optimizer)
    expected = {
        name: value.lerp(weights_of(accelerator, model)[name], 1 - 0.9**2) for name, value in begun.items()
    }
    torch.testing.assert_close(expected, average_of(accelerator, model, sparse))
    with ema.applied():
        accelerator.save_model(model, tmp_path)
        with pytest.raises(RuntimeError, match=r"a step inside applied\(\)"):
            step(accelerator, model, optimizer)
        with pytest.raises(RuntimeError, match=r"a save inside applied\(\)"):
            accelerator.save_state(tmp_path)
    assert_equal_weights(load_file(tmp_path / "model.safetensors"), average_of(accelerator, model, ema))
    accelerator.end_training()


@ON_TWO
def test_an_average_that_is_made_while_replicas_train_apart_goes_on_behind_them() -> None:
    accelerator, model, optimizer, _ = start("ddp")
    with accelerator.local_updates(model, every=2):
        ema = accelerator.ema(model)
        step(accelerator, model, optimizer)
    step(accelerator, model, optimizer)
    assert ema.num_steps == 2
    accelerator.end_training()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.5}, "decay=1.5: at least 0 and below 1"),
        ({"every": 0}, "every=0: a whole number of 1 or more"),
        ({"decay": None, "warmup": 3}, "warmup=3 without a decay"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with accelerator_of("single") as accelerator:
        model = accelerator.prepare(small())
        with pytest.raises(ValueError, match=message):
            accelerator.ema(model, **options)
