"""What DDP alone brings: hooks that compress gradients, ranks that run out of batches."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from drivetrain_backends import (
    AccumulationError,
    AccumulationWindow,
    DDPBackend,
    DDPSettings,
    UnreducedGradientError,
)
from drivetrain_precision import choose_policy
from drivetrain_state import StateSettings, connect


def ddp(**settings: object) -> tuple[DDPBackend, nn.Linear, SGD]:
    context = connect(StateSettings(device="cpu", watchdog=False))
    backend = DDPBackend(
        context,
        choose_policy("no", context.device),
        window=AccumulationWindow(),
        settings=DDPSettings(**settings),
    )
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    return backend, model, SGD(model.parameters(), lr=0.1)


def trained_with(hook: str) -> torch.Tensor:
    backend, model, optimizer = ddp(communication_hook=hook, power_sgd_start_step=2)
    (prepared,) = backend.prepare([model], [optimizer], [])
    generator = torch.Generator().manual_seed(dist.get_rank())
    applied = backend.applied()
    assert applied["communication_hook"] == hook
    assert (applied.get("power_sgd_start_step"), applied.get("power_sgd_rank")) == (
        (2, 1) if hook == "power_sgd" else (None, None)
    )
    for _ in range(6):
        prepared.backward(prepared.model(torch.randn(16, 8, generator=generator)).square().mean())
        prepared.optimizers[0].step()
        prepared.optimizers[0].zero_grad()
    backend.close()
    return model.weight.detach()


@pytest.mark.parametrize(("hook", "tolerance"), [("fp16", 1e-3), ("bf16", 1e-2), ("power_sgd", 1e-1)])
def test_compressed_gradients_train_nearly_as_whole_ones(run_ranks, hook: str, tolerance: float) -> None:
    whole, other = run_ranks(trained_with, "none")
    compressed, on_other_rank = run_ranks(trained_with, hook)
    assert torch.equal(whole, other)
    assert torch.equal(compressed, on_other_rank)
    assert 0 < (compressed - whole).abs().max() < tolerance


def steps_of_uneven_ranks() -> tuple[int, float, str]:
    backend, model, optimizer = ddp()
    (prepared,) = backend.prepare([model], [optimizer], [])
    message = ""
    steps = 0
    with backend.join([prepared.model]):
        for _ in range(2 + 3 * dist.get_rank()):
            prepared.backward(prepared.model(torch.ones(1, 8)).sum())
            prepared.optimizers[0].step()
            prepared.optimizers[0].zero_grad()
            steps += 1
        try:
            prepared.backward(prepared.model.module(torch.ones(1, 8)).sum(), count=1)
        except AccumulationError as error:
            message = str(error)
    return steps, model.bias.sum().item(), message


def test_ranks_may_run_out_of_batches_at_different_steps(run_ranks) -> None:
    (first_steps, first, message), (second_steps, second, _) = run_ranks(steps_of_uneven_ranks)
    assert (first_steps, second_steps) == (2, 5)
    assert first == pytest.approx(second)
    assert "inside join_uneven_inputs" in message


def test_a_model_without_trainable_parameters_is_only_moved(run_ranks) -> None:
    assert run_ranks(kind_of_a_frozen_model) == ["Linear", "Linear"]


def kind_of_a_frozen_model() -> str:
    backend, model, _ = ddp()
    (prepared,) = backend.prepare([model.requires_grad_(False)], [], [])
    return type(prepared.model).__name__


def step_after_unfreezing(frozen: str) -> str:
    backend, model, _ = ddp()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    optimizer = SGD(model.parameters(), lr=0.1)
    (prepared,) = backend.prepare([model], [optimizer], [])
    model.requires_grad_(True)
    before = model.weight.detach().clone()
    prepared.backward(prepared.model(torch.full((2, 8), float(dist.get_rank() + 1))).square().mean())
    try:
        prepared.optimizers[0].step()
    except UnreducedGradientError as error:
        assert torch.equal(model.weight, before)
        return str(error)
    finally:
        backend.close()
    return "stepped"


@pytest.mark.parametrize("frozen", ["weight", "weight and bias"])
def test_a_parameter_unfrozen_after_prepare_is_refused_by_name(run_ranks, frozen: str) -> None:
    for said in run_ranks(step_after_unfreezing, frozen):
        assert said.startswith(
            "weight was frozen when prepare() replicated its model, and has a gradient now"
        )


def step_with_an_unused_layer() -> str:
    backend, _, _ = ddp()
    model = nn.ModuleDict({"used": nn.Linear(8, 8), "unused": nn.Linear(8, 8)})
    model.forward = lambda x: model["used"](x)
    (prepared,) = backend.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    try:
        for _ in range(2):
            prepared.backward(prepared.model(torch.ones(2, 8)).sum())
    except UnreducedGradientError as error:
        return str(error)
    finally:
        backend.close()
    return "trained"


def test_parameters_without_a_gradient_are_named_with_the_flag_that_allows_them(run_ranks) -> None:
    for said in run_ranks(step_with_an_unused_layer):
        assert "gave no gradient to unused.weight, unused.bias, and ranks wait" in said
        assert "--ddp-find-unused-parameters" in said
