"""Weights that FSDP2 gathers in float8, with scales computed together at each forward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from drivetrain_backends import AccumulationWindow, DDPBackend, FSDPBackend
from drivetrain_precision import LayerFilter, TorchaoRecipe, choose_policy, convert_model
from drivetrain_state import CollectiveMismatchError
from optional_modules import skip_without
from plain_loop.backends import context, take_step

skip_without("torchao")
ALL = LayerFilter(skip_first=False, skip_last=False)


def recipe(*, all_gather: bool) -> TorchaoRecipe:
    return TorchaoRecipe(scaling="tensorwise", all_gather=all_gather, layers=ALL)


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 32), nn.Linear(32, 5))


def prepared_with(kind: Any, used: TorchaoRecipe, seed: int = 0) -> tuple[Any, Any]:
    where = context()
    policy = choose_policy("fp8", where.device, recipe=used)
    backend = kind(where, policy, window=AccumulationWindow(1))
    model = model_of(seed)
    optimizer = AdamW(model.parameters(), lr=0.01)
    convert_model(model, used)
    (prepared,) = backend.prepare([model], [optimizer], [])
    return backend, prepared


def step(prepared: Any, inputs: Tensor) -> float:
    loss = prepared.model(inputs).float().square().mean()
    take_step(prepared, loss)
    return loss.item()


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_it_trains_as_ddp_does_whose_weights_nobody_gathers() -> None:
    losses: list[list[float]] = []
    for kind, all_gather in ((DDPBackend, False), (FSDPBackend, True)):
        torch.manual_seed(0)
        _, prepared = prepared_with(kind, recipe(all_gather=all_gather))
        rank = torch.distributed.get_rank()
        losses.append([step(prepared, torch.randn(8, 16) + rank) for _ in range(4)])
    assert losses[0] == losses[1]


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_states_and_gathered_weights_are_plain_tensors() -> None:
    _, prepared = prepared_with(FSDPBackend, recipe(all_gather=True))
    step(prepared, torch.randn(8, 16))
    state = prepared.state_dict()
    (optimizer,) = state["optimizers"]
    moments = [value for kept in optimizer["state"].values() for value in kept.values()]
    for value in (*state["model"].values(), *moments):
        assert not isinstance(value, DTensor) or type(value.to_local()) is Tensor
    with prepared.gathered():
        assert all(type(value.data) is Tensor for value in prepared.unwrap().parameters())


@pytest.mark.ranks(2)
def test_weights_that_are_loaded_get_scales_of_their_own() -> None:
    used, inputs = recipe(all_gather=True), torch.randn(8, 16)
    _, wanted = prepared_with(FSDPBackend, used, seed=1)
    with torch.no_grad():
        for parameter in wanted.unwrap().parameters():
            parameter.mul_(100)  # scales of the first weights would cut these off
    state = wanted.state_dict()
    fresh = wanted.model(inputs).float().norm().item()
    _, prepared = prepared_with(FSDPBackend, used)
    step(prepared, inputs)
    before = prepared.model(inputs).float().norm().item()
    prepared.load_state_dict({**prepared.state_dict(), "model": state["model"]})
    assert prepared.model(inputs).float().norm().item() == fresh > 10 * before


class Other(nn.Sequential):
    """A model with weights of other sizes."""


@pytest.mark.ranks(2)
def test_ranks_that_scale_the_weights_of_different_models_are_told_instead_of_left_waiting() -> None:
    used, where = recipe(all_gather=True), context()
    backend = FSDPBackend(
        where, choose_policy("fp8", where.device, recipe=used), window=AccumulationWindow(1)
    )
    models = [model_of(0), Other(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))]
    for model in models:
        convert_model(model, used)
    prepared = backend.prepare(models, [], [])
    said = "rank 0: scale the weights of Sequential.*rank 1: scale the weights of Other"
    with pytest.raises(CollectiveMismatchError, match=said), torch.no_grad():
        prepared[torch.distributed.get_rank()].model(torch.randn(8, 16))


def test_scales_that_torchao_would_not_round_are_refused() -> None:
    with pytest.raises(ValueError, match="round_scales=True with all_gather=True: torchao does not round"):
        TorchaoRecipe(round_scales=True, all_gather=True)


def test_other_scalings_are_not_gathered_in_fp8() -> None:
    with pytest.raises(ValueError, match="scaling='tensorwise'"):
        TorchaoRecipe(scaling="rowwise", all_gather=True)
