"""What stands in for a model that an engine trains, and losses that reach another one."""

import copy

import pytest
from torch import nn
from torch.optim import SGD

from deepspeed_engines import Weights, X, backend, engine_of, take_step
from drivetrain_backends import AccumulationError, BackwardOptions, PairingError, ReplacedParameterError

pytestmark = pytest.mark.ranks(1, timeout_seconds=150)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_reading_and_setting_reach_the_users_module(stage: int) -> None:
    with engine_of(stage=stage) as (one, model, prepared):
        model.temperature = 2.0
        wrapper = prepared.model
        assert wrapper.w is model.w
        assert wrapper.temperature == 2.0
        wrapper.temperature = 3.0
        assert model.temperature == 3.0
        with pytest.raises(ReplacedParameterError, match=r"^head is assigned to Weights after prepare\(\)"):
            wrapper.head = nn.Linear(1, 1)
        with pytest.raises(ValueError, match=r"^Weights is prepared already"):
            one.prepare([wrapper], [], [])
        with pytest.raises(TypeError, match=r"load accelerator\.get_state_dict\(model\) into it"):
            copy.deepcopy(wrapper)
        take_step(prepared, wrapper(X))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_loss_without_an_engine_is_refused_with_what_to_prepare(stage: int) -> None:
    with backend(stage=stage) as one:
        with pytest.raises(PairingError, match=r"pass them to one prepare\(\) call"):
            one.backward(Weights()(X))
        (bare,) = one.prepare([Weights()], [], [])
        with pytest.raises(PairingError, match=r"pass them to one prepare\(\) call"):
            one.backward(bare.model(X))
        model = Weights()
        (prepared,) = one.prepare([model], [SGD([model.w], lr=1.0)], [])
        prepared.backward(prepared.model(X))
        with pytest.raises(PairingError, match="reaches no prepared model"):
            one.backward(Weights()(X))
        with pytest.raises(
            PairingError, match="trains Weights, of which no prepared optimizer holds a param"
        ):
            bare.backward(bare.model(X))


def test_a_graph_is_not_kept_and_inputs_are_not_chosen() -> None:
    with engine_of(stage=2) as (one, model, prepared):
        for options, said in (
            (
                BackwardOptions(retain_graph=True),
                r"retain_graph=True\): DeepSpeed's engine moves the gradients",
            ),
            (BackwardOptions(inputs=(model.w,)), r"backward\(inputs=\(1 tensors\)\)"),
        ):
            loss = prepared.model(X)
            with pytest.raises(AccumulationError, match=said):
                one.backward(loss, options=options)
