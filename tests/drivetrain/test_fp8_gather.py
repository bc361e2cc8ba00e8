"""Weights that FSDP2 gathers in fp8: whatever writes them, no gather clips them, and a release leaves plain ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from drivetrain import Accelerator
from drivetrain_precision import LayerFilter, TorchaoRecipe, convert_model
from optional_modules import skip_without

skip_without("torchao")  # an extra of drivetrain-precision brings it

ALL = LayerFilter(skip_first=False, skip_last=False)
FACTOR = 100.0  # a scale of the weights before would clip these


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, rows: Tensor) -> Tensor:
        return self.inner(rows).tanh()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(32, 32))


def rows() -> Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(1))


def make(*, all_gather: bool = True, **kwargs: Any) -> Accelerator:
    section = {"wrap": ["Block"], **kwargs.pop("fsdp", {})}
    sections = {"run": {"show_plan": False}, "fsdp": section, "model": kwargs.pop("model", {})}
    options: dict[str, Any] = {"cpu": True, "mixed_precision": "fp8", "backend": "fsdp", **kwargs}
    recipe = TorchaoRecipe(all_gather=all_gather, layers=ALL)
    return Accelerator(
        fp8_recipe=recipe if options["mixed_precision"] == "fp8" else None, sections=sections, **options
    )


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    accelerator.backward(model(rows()).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()


def by_gathering(accelerator: Accelerator, model: nn.Module) -> None:
    with accelerator.gathered(model, write=True):
        for parameter in accelerator.unwrap_model(model).parameters():
            parameter.mul_(FACTOR)


def by_loading(accelerator: Accelerator, model: nn.Module) -> None:
    del accelerator
    model.load_state_dict({name: value * FACTOR for name, value in model.state_dict().items()})


def by_each(write: Callable[[Any], object]) -> Callable[..., None]:
    def apply(accelerator: Accelerator, model: nn.Module) -> None:
        del accelerator
        for parameter in model.parameters():
            write(parameter)

    return apply


def by_a_step(accelerator: Accelerator, model: nn.Module) -> None:
    """By an optimizer that the run does not know."""
    del accelerator
    optimizer = SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * (1 - FACTOR)
    optimizer.step()


WRITES: dict[str, Callable[..., None]] = {
    "copy_": by_each(lambda p: p.copy_(p.detach().clone() * FACTOR)),
    "mul_": by_each(lambda p: p.mul_(FACTOR)),
    "data.mul_": by_each(lambda p: p.data.mul_(FACTOR)),
    "to_local": by_each(lambda p: p.to_local().mul_(FACTOR)),
    "gathered": by_gathering,
    "load_state_dict": by_loading,
    "step": by_a_step,
}


def outputs_after(write: str, *, all_gather: bool, backward: bool) -> tuple[float, float]:
    """The norms of the model's output and of the first block's alone, once the weights were written after a step."""
    with make(all_gather=all_gather) as accelerator:
        model = net()
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.0))
        step(accelerator, model, optimizer)
        if not backward:  # a forward with gradients that no backward follows
            model(rows())
        with torch.no_grad():
            WRITES[write](accelerator, model)
            alone = accelerator.unwrap_model(model)[0](rows()).float()
            whole = model(rows()).float()
        return alone.norm().item(), whole.norm().item()


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.default_cases("step", "load_state_dict")
def test_whatever_writes_the_weights_they_are_gathered_as_they_are(write: str) -> None:
    expected = outputs_after(write, all_gather=False, backward=True)
    assert expected[1] > 100
    assert outputs_after(write, all_gather=True, backward=True) == pytest.approx(expected, rel=0.02)


def test_a_forward_without_a_backward_leaves_no_scale_behind() -> None:
    expected = outputs_after("gathered", all_gather=False, backward=False)
    assert outputs_after("gathered", all_gather=True, backward=False) == pytest.approx(expected, rel=0.02)


def test_a_model_that_is_loaded_after_a_step_has_the_loss_of_a_new_one(tmp_path: Path) -> None:
    losses: list[float] = []
    for _ in range(2):  # the first run saves weights that the second loads over its own
        with make() as accelerator:
            model = net()
            model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.0))
            if losses:
                step(accelerator, model, optimizer)
                accelerator.load_model(model, tmp_path)
            else:
                with torch.no_grad():
                    WRITES["mul_"](accelerator, model)
                accelerator.save_model(model, tmp_path)
            with torch.no_grad():
                losses.append(model(rows()).float().square().mean().item())
    assert losses[1] == losses[0] > 100


def gradients(*, all_gather: bool, swaps: bool = False, **sections: Any) -> list[float]:
    """The norms of a window's gradients; with `swaps`, other weights are evaluated between forward and backward."""
    with make(all_gather=all_gather, gradient_accumulation_steps=2, **sections) as accelerator:
        model = net()
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.0))
        found: list[float] = []
        for _ in range(4):
            with accelerator.accumulate(model):
                loss = model(rows()).float().square().mean()
                if swaps:
                    with torch.no_grad():
                        by_gathering(accelerator, model)
                        model(rows())
                        for parameter in model.parameters():
                            parameter.div_(FACTOR)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
                    assert norm is not None
                    found.append(norm.item())
                optimizer.step()
                optimizer.zero_grad()
        return found


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.default_cases("shard_grad_op-none")
def test_backwards_gather_what_their_forwards_gathered(strategy: str, checkpointing: str) -> None:
    sections = {"fsdp": {"strategy": strategy}, "model": {"activation_checkpointing": checkpointing}}
    expected = gradients(all_gather=False, **sections)
    assert len(expected) == 2
    assert gradients(all_gather=True, **sections) == pytest.approx(expected, rel=0.05)


def test_weights_that_are_swapped_for_an_evaluation_before_the_backward_keep_their_gradients() -> None:
    plain = gradients(all_gather=True)
    assert gradients(all_gather=True, swaps=True) == pytest.approx(plain, rel=1e-4)


def released(mode: str, *, all_gather: bool) -> tuple[Tensor, nn.Sequential]:
    with make(all_gather=all_gather, mixed_precision=mode) as accelerator:
        model = net()
        if mode == "bf16":
            convert_model(model, TorchaoRecipe(all_gather=all_gather, layers=ALL))
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
        step(accelerator, model, optimizer)
        plain = accelerator.unwrap_model(model)
        accelerator.free_memory()
        assert all(type(parameter.to_local()) is Tensor for parameter in plain.parameters())
        return plain(rows()), plain


@pytest.mark.slow
def test_a_released_model_is_plain_and_computes() -> None:
    output, model = released("fp8", all_gather=True)
    expected, _ = released("fp8", all_gather=False)
    assert type(model[2]) is nn.Linear
    torch.testing.assert_close(output, expected, rtol=0.05, atol=0.02)
    output.float().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_released_model_that_was_converted_by_hand_still_computes_in_fp8() -> None:
    output, model = released("bf16", all_gather=True)
    assert type(model[2]) is not nn.Linear
    assert output.isfinite().all()
