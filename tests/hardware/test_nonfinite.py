"""What is not finite on the device: the layer is named by the same random numbers; losses are told without a wait."""

import torch
from torch import Tensor, nn

from drivetrain import Accelerator
from drivetrain_backends import NonFiniteGradientError
from hardware.devices import here, runs_on_device
from logged_messages import messages_of


class Log(nn.Module):
    """The logarithm, whose value at 0 is an infinity."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log()


@runs_on_device()
def test_the_layer_is_named_though_dropout_draws_on_the_device() -> None:
    accelerator = Accelerator(
        seed=0, backend="single", sections={"run": {"show_plan": False, "on_nonfinite": "raise"}}
    )
    model = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5), Log())
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.fill_(1.0)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    told = list[str]()
    for _ in range(8):
        accelerator.backward(model(torch.ones(1, 4, device=accelerator.device)).sum())
        torch.rand(1, device=accelerator.device)
        state = torch.get_device_module(accelerator.device).get_rng_state()
        try:
            optimizer.step()
        except NonFiniteGradientError as error:
            told.append(str(error))
            assert torch.equal(torch.get_device_module(accelerator.device).get_rng_state(), state)
        optimizer.zero_grad()
    accelerator.end_training()
    assert told
    assert all("the output of 2 (Log, float32)" in each for each in told), told


@runs_on_device()
def test_the_first_loss_that_is_not_finite_is_told_without_a_wait() -> None:
    accelerator = Accelerator(seed=0, backend="single", sections={"run": {"show_plan": False}})
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.ones(1, 4, device=accelerator.device)
    with messages_of("drivetrain.accelerator.loss_watch") as told:
        for step in range(1, 33):
            factor = torch.full((), torch.nan if step == 5 else 1.0, device=accelerator.device)
            with here().waits() as found:
                accelerator.backward(model(x).mean() * factor)
                optimizer.step()
                optimizer.zero_grad()
            assert step in (1, 32) or not found, (step, found)
    accelerator.end_training()
    assert [one.partition(",")[0] for one in told] == ["the loss of step 5 is nan"]
