"""Rules of autocast, checks of half precision and losses by chunks on a device."""

import torch
import torch.nn.functional as F

from drivetrain_precision import (
    autocast,
    chunked_cross_entropy,
    cross_entropy,
    find_half_operations,
    fp32_operations,
)
from hardware.devices import OnDevice, first, here


def rules() -> tuple[tuple[str, ...], dict[str, torch.dtype]]:
    """The operations that the device's autocast keeps in fp32, and what ran in which dtype."""
    place = torch.device(first())
    with autocast(here().name, torch.bfloat16, record=True) as recorded:
        x = torch.ones(3, 4, device=place)
        F.linear(x, x).exp()
    return fp32_operations(here().name), {one.name: one.dtype for one in recorded.operations()}


SIMULATED = ("exp", "layer_norm", "log_softmax", "mse_loss", "nll_loss", "pow", "sum")  # as CUDA, of more


def test_the_devices_own_rules_are_told_and_recorded(on_device: OnDevice, device: str) -> None:
    ((names, ran),) = on_device(rules)
    assert (names == SIMULATED) if device == "simulated" else {*SIMULATED} < {*names}
    assert ran == {"linear": torch.bfloat16, "exp": torch.float32}


def found() -> list[tuple[str, str]]:
    """What is found in half precision on the device, without autocast."""
    x = torch.ones(3, 4, device=torch.device(first()), dtype=torch.bfloat16, requires_grad=True)
    with find_half_operations(warn=False) as result:
        F.mse_loss(x, x.detach())
        F.mse_loss(x.float(), x.detach().float())
    return [(one.operation, one.kind) for one in result.operations]


def test_a_loss_in_half_is_found_on_the_device(on_device: OnDevice) -> None:
    assert on_device(found) == [[("mse_loss", "loss")]]


def losses(kind: str) -> list[torch.Tensor]:
    """Losses and gradients by chunks on a device, of inputs in bf16."""
    torch.manual_seed(0)
    values = torch.randn(6, 4), torch.randn(9, 4)
    hidden, weight = (one.to(torch.bfloat16).to(kind).requires_grad_() for one in values)
    labels = torch.tensor([1, 2, -100, 8, 0, 4]).to(kind)
    loss = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=4, label_smoothing=0.1)
    loss = loss + cross_entropy(hidden, labels.clamp(max=3), chunk_tokens=4)
    return [one.detach().cpu() for one in (loss, *torch.autograd.grad(loss, (hidden, weight)))]


def losses_on_device() -> list[torch.Tensor]:
    """The losses on the device."""
    return losses(here().name)


def test_losses_by_chunks_are_those_of_the_host(on_device: OnDevice) -> None:
    (found,) = on_device(losses_on_device)
    torch.testing.assert_close(found, losses("cpu"))
