"""Words about lines of a loop that do not do what they seem to: once each, and none about a loop that is right."""

import logging
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from logged_messages import messages_of

QUIET: Any = {"run": {"show_plan": False}}


def data() -> TensorDataset:
    return TensorDataset(torch.randn(16, 4), torch.randn(16, 1))


class Loop:
    """A loop over two epochs of four batches, and what it was made of."""

    def __init__(self, **settings: Any) -> None:
        self.accelerator = Accelerator(cpu=True, seed=0, sections=QUIET, **settings)
        self.model: Any = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 1))
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader: Any = DataLoader(data(), batch_size=4)

    def prepare(self) -> None:
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            self.model, self.optimizer, self.loader
        )

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def train(self) -> None:
        for _ in range(2):
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(self.loss(batch))
                    self.optimizer.step()
                    self.optimizer.zero_grad()

    def evaluate(self) -> None:
        validation = self.accelerator.prepare(DataLoader(data(), batch_size=4))
        with torch.no_grad():
            for inputs, _ in validation:
                self.accelerator.gather_for_metrics(self.model(inputs))


def drop_results(loop: Loop) -> None:
    loop.loader = loop.accelerator.prepare(loop.loader)
    loop.accelerator.prepare(loop.model, loop.optimizer)
    loop.train()


def never_clear(loop: Loop) -> None:
    loop.prepare()
    loop.optimizer.zero_grad = lambda: None
    loop.train()


def forget_backward(loop: Loop) -> None:
    loop.prepare()
    for _ in range(2):
        loop.optimizer.step()


def evaluate_in_training_mode(loop: Loop) -> None:
    loop.prepare()
    loop.train()
    loop.evaluate()
    loop.evaluate()


def log_nowhere(loop: Loop) -> None:
    loop.accelerator.log({"loss": 1.0})
    loop.accelerator.log({"loss": 2.0})


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (drop_results, "the loop steps the SGD that was passed to prepare()"),
        (never_clear, "SGD adds the gradients of this step to those of the one before"),
        (forget_backward, "SGD steps without a gradient"),
        (evaluate_in_training_mode, "from a model in training mode, in which Dropout computes otherwise"),
        (log_nowhere, "log() goes nowhere"),
    ],
)
def test_a_mistake_is_told_of_once_with_its_line(
    caplog: pytest.LogCaptureFixture, mistake: Callable[[Loop], None], said: str
) -> None:
    loop = Loop()
    with caplog.at_level(logging.WARNING):
        mistake(loop)
    assert len(caplog.messages) == 1
    assert said in caplog.messages[0]
    assert __file__ in caplog.messages[0]
    loop.accelerator.end_training()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_prepared", [True, False])
def test_training_on_all_data_on_every_rank_is_told_of(is_prepared: bool) -> None:
    loop = Loop()
    given = loop.loader
    loop.prepare()
    if not is_prepared:
        loop.loader = given
    with messages_of("drivetrain") as messages:
        loop.train()
    told = not is_prepared and loop.accelerator.is_main_process
    assert len(messages) == told
    if told:
        assert "in the loop over `self.loader`" in messages[0]
    loop.accelerator.end_training()


@pytest.mark.parametrize("accumulation", [1, 3])
def test_loops_that_are_right_are_not_told_of(caplog: pytest.LogCaptureFixture, accumulation: int) -> None:
    loop = Loop(gradient_accumulation_steps=accumulation, log_with=[])
    loop.prepare()
    with caplog.at_level(logging.WARNING):
        loop.train()
        loop.model.eval()
        loop.evaluate()
        loop.model.train()
        for batch in islice(loop.loader, 3):  # cleared before, and by the model
            loop.model.zero_grad()
            with loop.accelerator.accumulate(loop.model, last=True):
                loop.accelerator.backward(loss := loop.loss(batch))
                loop.optimizer.step()
            with torch.no_grad():
                loop.accelerator.gather_for_metrics(loss)  # of training
        loop.accelerator.log({"loss": 1.0})
    assert caplog.messages == []
    loop.accelerator.end_training()


def test_two_optimizers_in_turns_are_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, seed=0, sections=QUIET)
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    first, second = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (generator, critic))
    generator, critic, first, second = accelerator.prepare(generator, critic, first, second)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            second.zero_grad()
            accelerator.backward(critic(generator(torch.randn(4, 2)).detach()).mean(), model=critic)
            second.step()
            first.zero_grad()
            accelerator.backward(critic(generator(torch.randn(4, 2))).mean(), model=(generator, critic))
            first.step()
    assert caplog.messages == []
    accelerator.end_training()


def test_two_backwards_before_two_steps_and_training_metrics_are_not_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    accelerator = Accelerator(cpu=True, seed=0, sections=QUIET)
    models = [nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.1)) for _ in range(2)]
    for model in models:
        nn.init.zeros_(model[0].weight)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    first, second, one, other = accelerator.prepare(*models, *optimizers)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # a loader of its own for each epoch
            for inputs, _ in accelerator.prepare(DataLoader(data(), batch_size=4)):
                found = second(first(inputs).expand(-1, 4))
                accelerator.backward(found.square().mean(), model=(first, second))
                one.step()
                other.step()
                one.zero_grad()
                other.zero_grad()
                with torch.no_grad():
                    accelerator.gather_for_metrics(found)
        accelerator.free_memory()
        optimizers[0].step()
    assert caplog.messages == []
    accelerator.end_training()


def test_an_optimizer_that_steps_seldom_costs_later_backwards_nothing() -> None:
    accelerator = Accelerator(cpu=True, seed=0, sections=QUIET)
    seldom, often = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (seldom, often)]
    seldom, often, rare, usual = accelerator.prepare(seldom, often, *optimizers)
    for step in range(30):
        accelerator.backward(
            (seldom(torch.ones(1, 2)) + often(torch.ones(1, 2))).mean(), model=(seldom, often)
        )
        usual.step()
        usual.zero_grad()
        if step == 0:
            rare.step()
    words = accelerator._parts.words
    assert words is not None
    assert not words._uncleared
    accelerator.end_training()
