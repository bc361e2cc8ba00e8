"""Engines of compiled models: the same training, and the names of plain models."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from deepspeed_engines import Weights, backend
from drivetrain_backends.state_dict import full_tensors as states


def compiled(stage: int, how: str) -> list[float]:
    """Losses of a compiled model, with the last weights, beside those of the same model as it is."""
    found: list[list[float]] = []
    for compiles in (False, True):
        with backend(stage=stage) as one:
            torch.manual_seed(0)
            model = given = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
            if compiles and how == "block":
                model[0].compile(backend="eager", fullgraph=stage < 3)
            elif compiles and how == "in place":
                model.compile(backend="eager")  # the engine's own hooks are in it
            elif compiles:
                given = torch.compile(model, backend="eager", fullgraph=True)
            (prepared,) = one.prepare([given], [SGD(model.parameters(), lr=0.1)], [])
            losses: list[float] = []
            for _ in range(3):
                one.window.begin()
                loss = prepared.model(torch.ones(2, 4)).square().mean()
                prepared.backward(loss)
                prepared.optimizers[0].step()
                losses.append(loss.item())
            state = prepared.state_dict()
            prepared.load_state_dict(state)
            found.append([*losses, *states.full_tensor(state["model"]["2.weight"]).flatten().tolist()])
    return [a - b for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize(
    ("stage", "how"),
    [(s, how) for s in range(4) for how in ("block", "in place", "whole") if (s, how) != (3, "whole")],
)
@pytest.mark.default_cases("1-in place")
@pytest.mark.ranks(1)
def test_a_compiled_model_trains_alike_and_is_saved_under_plain_names(stage: int, how: str) -> None:
    assert compiled(stage, how) == pytest.approx([0.0] * 7, abs=1e-6)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("is_trained", [True, False])
def test_a_wrapper_of_the_compiler_is_refused_in_stage_3(is_trained: bool) -> None:
    model = torch.compile(Weights(), backend="eager")
    optimizers = [SGD(model.parameters(), lr=0.1)] if is_trained else []
    with backend(stage=3) as one:
        with pytest.raises(ValueError, match=r"Weights is wrapped by torch\.compile.*model\.compile\(\)"):
            one.prepare([model], optimizers, [])
