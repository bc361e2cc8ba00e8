"""What stands in for a model that an engine trains, and losses that reach another one."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD

from deepspeed_backend.engines import Weights, backend, error_of
from drivetrain_backends import AccumulationError, BackwardOptions, PairingError, ReplacedParameterError

X = torch.tensor([1.0, 2.0, 3.0])


def stands_in(stage: int) -> dict[str, object]:
    with backend(stage=stage) as one:
        model = Weights()
        model.temperature = 2.0
        (prepared,) = one.prepare([model], [SGD([model.w], lr=1.0)], [])
        wrapper = prepared.model
        found: dict[str, object] = {"read": wrapper.w is model.w and wrapper.temperature == 2.0}
        wrapper.temperature = 3.0
        found["set"] = model.temperature
        found["assigned"] = error_of(
            ReplacedParameterError, lambda: setattr(wrapper, "head", nn.Linear(1, 1))
        )
        found["twice"] = error_of(ValueError, lambda: one.prepare([wrapper], [], []))
        found["copied"] = error_of(TypeError, lambda: copy.deepcopy(wrapper))
        prepared.backward(wrapper(X))
        prepared.optimizers[0].step()
        return found


@pytest.mark.parametrize("stage", [2, 3])
def test_reading_and_setting_reach_the_users_module(run_ranks, stage: int) -> None:
    (found,) = run_ranks(stands_in, stage, num_processes=1, timeout_seconds=150)
    assert found["read"]
    assert found["set"] == 3.0
    assert str(found["assigned"]).startswith("head is assigned to Weights after prepare()")
    assert str(found["twice"]).startswith("Weights is prepared already")
    assert "load accelerator.get_state_dict(model) into it" in str(found["copied"])


def forgotten(stage: int) -> list[str]:
    with backend(stage=stage) as one:
        said = [error_of(PairingError, lambda: one.backward(Weights()(X)))]
        untrained = Weights()
        (bare,) = one.prepare([untrained], [], [])
        said.append(error_of(PairingError, lambda: one.backward(bare.model(X))))
        model = Weights()
        (prepared,) = one.prepare([model], [SGD([model.w], lr=1.0)], [])
        prepared.backward(prepared.model(X))
        said.append(error_of(PairingError, lambda: one.backward(Weights()(X))))
        said.append(error_of(PairingError, lambda: bare.backward(bare.model(X))))
        return said


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_loss_without_an_engine_is_refused_with_what_to_prepare(run_ranks, stage: int) -> None:
    ((first, bare, foreign, untrained),) = run_ranks(forgotten, stage, num_processes=1, timeout_seconds=150)
    assert "pass them to one prepare() call" in first
    assert "pass them to one prepare() call" in bare
    assert "reaches no prepared model" in foreign
    assert "trains Weights, of which no prepared optimizer holds a parameter" in untrained


def with_options() -> list[str]:
    with backend(stage=2) as one:
        model = Weights()
        (prepared,) = one.prepare([model], [SGD([model.w], lr=1.0)], [])
        chosen = (BackwardOptions(retain_graph=True), BackwardOptions(inputs=(model.w,)))
        return [
            error_of(
                AccumulationError, lambda options=options: one.backward(prepared.model(X), options=options)
            )
            for options in chosen
        ]


def test_a_graph_is_not_kept_and_inputs_are_not_chosen(run_ranks) -> None:
    ((kept, chosen),) = run_ranks(with_options, num_processes=1, timeout_seconds=150)
    assert "backward(retain_graph=True): DeepSpeed's engine moves the gradients of all parameters" in kept
    assert "backward(inputs=(1 tensors))" in chosen


def through_another_of_its_class() -> str:
    with backend(stage=2) as one:
        a, b = Weights(), Weights()
        first, second = one.prepare([a, b], [SGD([a.w], lr=1.0), SGD([b.w], lr=1.0)], [])
        return error_of(AccumulationError, lambda: first.backward(second.model(first.model(X) * X)))


def test_models_of_one_class_are_told_apart(run_ranks) -> None:
    (said,) = run_ranks(through_another_of_its_class, num_processes=1)
    assert "a loss of Weights (number 1 of 2 prepared) reached Weights (number 2 of 2 prepared)" in said
