"""Weights that FSDP2 gathers in float8, with scales computed together at each forward."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from backends.replicas import step_and_clear
from drivetrain_backends import AccumulationWindow, DDPBackend, FSDPBackend
from drivetrain_precision import LayerFilter, TorchaoRecipe, choose_policy, convert_model
from drivetrain_state import CollectiveMismatchError
from sharded_stack import context

pytest.importorskip("torchao")
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


def step(backend: Any, prepared: Any, inputs: Tensor) -> float:
    backend.window.begin()
    loss = prepared.model(inputs).float().square().mean()
    prepared.backward(loss)
    step_and_clear(prepared)
    return loss.item()


def train(kind: str, all_gather: bool) -> list[float]:
    used = recipe(all_gather=all_gather)
    backend, prepared = prepared_with({"fsdp": FSDPBackend, "ddp": DDPBackend}[kind], used)
    rank = torch.distributed.get_rank()
    losses = [step(backend, prepared, torch.randn(8, 16) + rank) for _ in range(4)]
    backend.close()
    return losses


@pytest.mark.slow
def test_it_trains_as_ddp_does_whose_weights_nobody_gathers(run_ranks) -> None:
    expected = run_ranks(train, "ddp", False)
    assert run_ranks(train, "fsdp", True) == expected


def states() -> tuple[Mapping[str, str], bool]:
    used = recipe(all_gather=True)
    backend, prepared = prepared_with(FSDPBackend, used)
    step(backend, prepared, torch.randn(8, 16))
    state = prepared.state_dict()
    kinds = {name: type(value.to_local()).__name__ for name, value in state["model"].items()}
    (optimizer,) = state["optimizers"]
    moments = all(
        type(value.to_local()) is Tensor
        for kept in optimizer["state"].values()
        for value in kept.values()
        if isinstance(value, DTensor)
    )
    with prepared.gathered():
        moments &= all(type(value.data) is Tensor for value in prepared.unwrap().parameters())
    backend.close()
    return kinds, moments


def test_states_and_gathered_weights_are_plain_tensors(run_ranks) -> None:
    for kinds, are_plain in run_ranks(states):
        assert set(kinds.values()) == {"Tensor"}
        assert are_plain


def loaded_after_a_step() -> tuple[float, float, float]:
    used = recipe(all_gather=True)
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))
    other, wanted = prepared_with(FSDPBackend, used, seed=1)
    with torch.no_grad():
        for parameter in wanted.unwrap().parameters():
            parameter.mul_(100)  # scales of the first weights would cut these off
    state = wanted.state_dict()
    fresh = wanted.model(inputs).float().norm().item()
    backend, prepared = prepared_with(FSDPBackend, used)
    step(backend, prepared, inputs)
    before = prepared.model(inputs).float().norm().item()
    prepared.load_state_dict({**prepared.state_dict(), "model": state["model"]})
    after = prepared.model(inputs).float().norm().item()
    for each in (other, backend):
        each.close()
    return before, after, fresh


def test_weights_that_are_loaded_get_scales_of_their_own(run_ranks) -> None:
    for before, after, fresh in run_ranks(loaded_after_a_step):
        assert after == fresh
        assert after > 10 * before


class Other(nn.Sequential):
    """A model with weights of other sizes."""


def different_models() -> str:
    used, where = recipe(all_gather=True), context()
    backend = FSDPBackend(
        where, choose_policy("fp8", where.device, recipe=used), window=AccumulationWindow(1)
    )
    models = [model_of(0), Other(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))]
    for model in models:
        convert_model(model, used)
    prepared = backend.prepare(models, [], [])
    try:
        with pytest.raises(CollectiveMismatchError) as raised, torch.no_grad():
            prepared[torch.distributed.get_rank()].model(torch.randn(8, 16))
    finally:
        backend.close()
    return str(raised.value)


def test_ranks_that_scale_the_weights_of_different_models_are_told_instead_of_left_waiting(run_ranks) -> None:
    for message in run_ranks(different_models):
        assert "rank 0: scale the weights of Sequential" in message
        assert "rank 1: scale the weights of Other" in message


def test_scales_that_torchao_would_not_round_are_refused() -> None:
    with pytest.raises(ValueError, match="round_scales=True with all_gather=True: torchao does not round"):
        TorchaoRecipe(round_scales=True, all_gather=True)


def test_other_scalings_are_not_gathered_in_fp8() -> None:
    with pytest.raises(ValueError, match="scaling='tensorwise'"):
        TorchaoRecipe(scaling="rowwise", all_gather=True)
