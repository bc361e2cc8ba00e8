"""A watch on the device: its counts stay there until they are reported, and name the layer that overflows first."""

import torch
from torch import nn

from drivetrain_precision import watch_gradients
from hardware.devices import OnDevice, here


def step(model: nn.Module, x: torch.Tensor) -> None:
    """A forward and backward in fp16."""
    with torch.autocast(here().name, dtype=torch.float16):
        output = model(x)
    output.float().mean().backward()


def watched() -> tuple[list[str], str, str]:
    """Where the host waited in the second of two watched steps, the first value that is not finite, and the table."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(here().name)
    with torch.no_grad():
        model[1].weight.fill_(6e4)
    x = torch.full((2, 4), 10.0, device=here().name)
    with watch_gradients(model) as watch:
        step(model, x)
        with here().waits() as found:
            step(model, x)
    report = watch.report()
    return found, str(report.first_nonfinite), report.table()


def test_a_watched_step_does_not_wait_for_the_device(on_device: OnDevice) -> None:
    ((waited, first, table),) = on_device(watched)
    assert waited == []
    assert first == "the output of 1 (Linear, float16), whose inputs were finite"
    assert table.startswith("layer ")
