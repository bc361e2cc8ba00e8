import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from drivetrain_backends import AccumulationError, AccumulationWindow, DDPBackend, DDPSettings, PairingError
from drivetrain_precision import PrecisionSettings, choose_policy
from drivetrain_state import StateSettings, connect
from plain_loop.backends import linear, prepare_sgd
from plain_loop.backends import single as backend


class OwnSettings(DDPSettings):
    pass


class OwnBackend(DDPBackend):
    settings_type = OwnSettings


def test_a_backend_derived_from_another_has_the_defaults_of_its_own_section() -> None:
    with connect(StateSettings(device="cpu"), needs_group=True) as context:
        own = OwnBackend(context, choose_policy("no", context.device), window=AccumulationWindow())
        assert type(own.settings) is OwnSettings


@pytest.mark.ranks(2)
def test_several_processes_do_not_train_models_of_their_own() -> None:
    with pytest.raises(
        ValueError, match="backend='single' with 2 processes whose gradients add up"
    ) as caught:
        backend()
    assert "say ddp, fsdp or deepspeed" in str(caught.value)


def test_an_optimizer_prepared_after_its_model_is_paired() -> None:
    model, single = linear(), backend()
    (first,) = single.prepare([model], [], [])
    (again,) = single.prepare([], [SGD(model.parameters())], [])
    assert again is first
    assert len(first.optimizers) == 1


def test_an_optimizer_of_another_model_is_refused_and_nothing_changed() -> None:
    model = linear()
    with pytest.raises(PairingError, match="belongs to no prepared model"):
        backend().prepare([model], [SGD(linear().parameters())], [])
    assert type(model) is nn.Linear


def test_a_scheduler_of_an_unprepared_optimizer_is_refused() -> None:
    model = linear()
    with pytest.raises(PairingError, match="StepLR: its optimizer is not prepared"):
        backend().prepare([model], [], [StepLR(SGD(model.parameters()), 1)])


def test_a_model_is_prepared_once() -> None:
    model, single = linear(), backend()
    single.prepare([model], [], [])
    with pytest.raises(ValueError, match="Linear is prepared already"):
        single.prepare([model], [], [])


def test_an_overflow_skips_the_step_and_lowers_the_scale_for_the_next() -> None:
    single, model, prepared = prepare_sgd(
        backend("fp16", precision=PrecisionSettings(initial_scale=16.0)), linear()
    )
    (optimizer,) = prepared.optimizers
    before = model.weight.detach().clone()
    prepared.backward(model(torch.ones(1, 2)).sum() * float("inf"))
    optimizer.step()
    assert optimizer.was_skipped
    assert optimizer.num_steps == 0
    assert torch.equal(model.weight, before)
    optimizer.zero_grad()
    prepared.backward(model(torch.ones(1, 2)).float().sum())
    assert single.state_dict()["scaler"]["scale"] == 8.0
    optimizer.step()
    assert not optimizer.was_skipped
    torch.testing.assert_close(model.weight, before - 0.1)


def test_zero_grad_without_a_step_forgets_the_discarded_count() -> None:
    _single, model, prepared = prepare_sgd(backend(), linear())
    (optimizer,) = prepared.optimizers
    before = model.bias.item()
    prepared.backward(model(torch.ones(10, 2)).sum(), count=10)
    optimizer.zero_grad()  # the batch is thrown away
    prepared.backward(model(torch.ones(5, 2)).sum(), count=5)
    optimizer.step()
    assert model.bias.item() == pytest.approx(before - 0.1)


def test_two_trained_models_need_to_know_whose_items_are_counted() -> None:
    models, single = [linear(), linear()], backend()
    first, _ = single.prepare(models, [SGD(model.parameters()) for model in models], [])
    loss = models[0](torch.ones(1, 2)).sum()
    with pytest.raises(AccumulationError, match="say with model= whose items are counted"):
        single.backward(loss, count=1)
    first.backward(loss, count=1)
    assert models[0].weight.grad is not None


def test_backward_without_a_model_is_refused() -> None:
    with pytest.raises(AccumulationError, match=r"before prepare\(model\)"):
        backend().backward(torch.ones((), requires_grad=True))


def test_loading_a_checkpoint_of_another_precision_is_refused() -> None:
    with pytest.raises(
        ValueError, match="saved with fp16 loss scaling, and this run does not scale its loss"
    ):
        backend().load_state_dict({"scaler": {"scale": 2.0, "growth_tracker": 0}})


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_a_prepare_that_fails_at_its_second_model_leaves_the_first_as_it_was() -> None:
    model, single = linear(), backend("bf16")
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="TorchScript module"):
        single.prepare([model, torch.jit.script(linear())], [optimizer], [])
    assert type(model) is nn.Linear
    with pytest.raises(AccumulationError, match=r"before prepare\(model\)"):
        single.backward(torch.ones((), requires_grad=True))
    (prepared,) = single.prepare([model], [optimizer], [])
    assert [one.optimizer for one in prepared.optimizers] == [optimizer]


def test_a_prepare_that_fails_takes_its_optimizers_back() -> None:
    first, second, single = linear(), linear(), backend(accumulation=2)
    (one,) = single.prepare([first], [SGD(first.parameters())], [])
    single.window.begin()
    one.backward(first(torch.ones(1, 2)).sum())
    both = SGD([*first.parameters(), *second.parameters()])
    with pytest.raises(AccumulationError, match="call it between two windows"):
        single.prepare([second], [both], [])
    assert (len(one.optimizers), type(second)) == (1, nn.Linear)


@pytest.mark.parametrize("held", ["weight", "running_mean"])
def test_a_model_on_meta_is_refused_by_the_name_of_its_first_tensor(held: str) -> None:
    good, single = linear(), backend()
    model = nn.Sequential(nn.BatchNorm1d(2))
    if held == "weight":
        model.to("meta")
    else:
        model[0].running_mean = model[0].running_mean.to("meta")
    with pytest.raises(
        ValueError, match=rf"Sequential: 0\.{held} is on the meta device.*accelerator\.building\(\)"
    ):
        single.prepare([good, model], [], [])
    assert type(good) is nn.Linear
    with single.building():
        single.prepare([nn.Sequential(nn.BatchNorm1d(2))], [], [])
