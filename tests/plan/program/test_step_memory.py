from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain_dispatch.compat import FakeTensorMode
from drivetrain_dispatch.errors import CostError
from drivetrain_plan.model.training_modes import OPTIMIZERS
from drivetrain_plan.program.step_memory import (
    StepMemory,
    StorageTally,
    give_fake_tensors,
    measure_forward,
    measure_step,
)

WIDTH, BATCH = 64, 16
LAYER = (WIDTH * WIDTH + WIDTH) * 4  # the bytes of a linear layer
ROWS = BATCH * WIDTH * 4  # those of its inputs, or outputs


class Stack(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def measured(
    model: Callable[[], nn.Module], *, optimizer: str = "adamw-loop", autocast: torch.dtype | None = None
) -> StepMemory:
    with torch.device("meta"):
        made = model()
    with FakeTensorMode():
        give_fake_tensors(made)
        return measure_step(
            made,
            {"x": torch.empty(BATCH, WIDTH)},
            loss_of=lambda outputs: outputs.sum(),
            make_optimizer=OPTIMIZERS[optimizer],
            autocast=autocast,
        )


def test_weights_gradients_and_states_are_counted_to_the_byte() -> None:
    step = measured(Stack)
    assert step.weights == step.gradients == 4 * LAYER
    steps = 8 * 4  # AdamW's count of steps, a number for each of 8 parameters
    assert step.optimizer_states == 2 * 4 * LAYER + steps


def test_activations_are_what_the_forward_leaves() -> None:
    # ReLU saves its output, which is the next layer's input; the loss is a number.
    assert measured(Stack).activations == 4 * ROWS + 4


def test_the_peak_is_that_of_real_tensors() -> None:
    torch.manual_seed(0)
    model = Stack()
    x = torch.ones(BATCH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tally = StorageTally()
    with tally:
        tally.add((*model.parameters(), x))
        for number in range(2):
            if number:
                tally.restart()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert measured(Stack).peak == tally.peak_bytes


def test_operations_over_all_parameters_hold_temporary_results_of_all() -> None:
    loop, foreach = measured(Stack), measured(Stack, optimizer="adamw")
    assert foreach.stepping >= 4 * LAYER > loop.stepping
    assert foreach.optimizer_states == loop.optimizer_states


def test_sgd_keeps_nothing_and_momentum_a_copy() -> None:
    assert measured(Stack, optimizer="sgd").optimizer_states == 0
    assert measured(Stack, optimizer="sgd-momentum").optimizer_states == 4 * LAYER


def test_autocast_saves_halves_and_the_cast_weights() -> None:
    step = measured(Stack, autocast=torch.bfloat16)
    assert step.weights == 4 * LAYER
    casts = 4 * LAYER // 2
    assert casts <= step.activations <= casts + 5 * ROWS // 2 + 8


def test_frozen_weights_get_no_gradients_and_tied_ones_count_once() -> None:
    def adapted() -> nn.Module:
        model = Stack()
        model.requires_grad_(False)
        model.layers[3].requires_grad_(True)
        model.layers[1].weight = model.layers[0].weight  # type: ignore[union-attr]
        return model

    step = measured(adapted)
    assert step.weights == 4 * LAYER - WIDTH * WIDTH * 4
    assert step.gradients == LAYER


def test_a_forward_alone_holds_no_activations() -> None:
    with torch.device("meta"):
        model = Stack(10)
    with FakeTensorMode():
        give_fake_tensors(model)
        forward = measure_forward(model, {"x": torch.empty(BATCH, WIDTH)})
    assert forward.peak - forward.weights <= 4 * ROWS


def test_a_model_that_trains_nothing_is_refused() -> None:
    with pytest.raises(
        CostError, match="Stack has no parameter with requires_grad: nothing would be trained"
    ):
        measured(lambda: Stack().requires_grad_(False))


class Choosing(nn.Module):
    """A forward that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x


def test_a_forward_that_depends_on_values_is_named() -> None:
    with pytest.raises(CostError, match="Choosing: its forward depends on the values of tensors"):
        measured(Choosing)


class Table(nn.Module):
    """A buffer, and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(3), persistent=False)
        self.plain = torch.ones(4)
        self.register_parameter("absent", None)


def test_shapes_dtypes_ties_and_frozen_weights_stay() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16(), Table())
        model[1].weight = model[0].weight
        model[1].bias.requires_grad_(False)
    with FakeTensorMode():
        give_fake_tensors(model)
    assert model[1].weight is model[0].weight
    assert isinstance(model[1].bias, nn.Parameter)
    assert (model[1].bias.dtype, model[1].bias.requires_grad) == (torch.bfloat16, False)
    tensors = [*model.parameters(), *model.buffers(), model[2].plain]
    assert all(tensor.device.type == "cpu" for tensor in tensors)
