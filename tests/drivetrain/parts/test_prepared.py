"""Prepared models are found by each of their parameters."""

import torch
from torch import nn

from drivetrain import Accelerator


class TrainsAPart(nn.Module):
    """A model whose `parameters` are those that it trains, as in reinforcement learning with adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2).requires_grad_(False)
        self.adapter = nn.Linear(2, 1)

    def parameters(self, recurse: bool = True):
        return iter(list(self.adapter.parameters(recurse)))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.body(batch))


def test_a_model_is_found_by_a_parameter_that_its_own_parameters_leave_out() -> None:
    with Accelerator(cpu=True) as accelerator:
        given = TrainsAPart()
        optimizer = torch.optim.SGD(given.parameters(), lr=0.1)
        model, _, optimizer = accelerator.prepare(given, nn.Linear(2, 1), optimizer)
        for of_wrapper in (True, False):  # which is torch's, of all of the module's, and the module's own
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(2, 2)).mean())
                chosen = nn.Module.parameters(given) if of_wrapper else given.parameters()
                every = [given.body.weight, *chosen]
                norm = accelerator.clip_grad_norm_(every, 0.01)
                assert norm is not None
                assert norm > 0.01
                clipped = nn.utils.get_total_norm(
                    [each.grad for each in given.adapter.parameters() if each.grad is not None]
                )
                assert torch.isclose(clipped, torch.tensor(0.01), rtol=1e-3)
                optimizer.step()
                optimizer.zero_grad()
