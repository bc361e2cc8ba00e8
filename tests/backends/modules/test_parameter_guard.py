"""Parameters that a model gets after it was prepared, which nothing would train."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain_backends import AccumulationError, PairingError, ReplacedParameterError
from drivetrain_backends.composed.prepared import ComposedPrepared
from drivetrain_backends.modules.parameter_guard import STEPS_A_LOOK, KnownParameters
from plain_loop.backends import ddp, fsdp, prepare_sgd, step_and_clear, take_step
from plain_loop.backends import single as backend
from plain_loop.case import Case, assert_equals_plain_loop
from plain_loop.stack import loss_of, stack


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))
        self.head = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def replace_module(model: Net) -> None:
    model.head = nn.Linear(2, 1)


def assign_parameter(model: Net) -> None:
    model.body[0].weight = nn.Parameter(torch.zeros(2, 2))


def create_parameter(model: Net) -> None:
    model.body.scale = nn.Parameter(torch.ones(1))


def load_by_assignment(model: Net) -> None:
    model.load_state_dict(Net().state_dict(), assign=True)


CHANGES = pytest.mark.parametrize(
    ("change", "named"),
    [
        (replace_module, r"head\.weight, head\.bias.* created or assigned"),
        (assign_parameter, r"body\.0\.weight.* created or assigned"),
        (create_parameter, r"body\.scale.* created or assigned"),
        (load_by_assignment, r"body\.0\.weight, .* head\.bias.* created or assigned"),
    ],
)


def start() -> tuple[Net, ComposedPrepared]:
    model = Net()
    (prepared,) = backend().prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    return model, prepared


def train(prepared: ComposedPrepared, num_steps: int) -> None:
    for _ in range(num_steps):
        prepared.backward(prepared.model(torch.ones(1, 2)).sum())
        step_and_clear(prepared)


@CHANGES
def test_the_first_step_refuses_what_was_not_prepared(change, named: str) -> None:
    model, prepared = start()
    change(model)
    with pytest.raises(
        ReplacedParameterError, match=rf"parameters of Net are not those of prepare\(\): {named}"
    ):
        train(prepared, 1)


@CHANGES
def test_saving_refuses_what_was_not_prepared(change, named: str) -> None:
    model, prepared = start()
    train(prepared, 3)
    saved = prepared.state_dict()
    change(model)
    with pytest.raises(ReplacedParameterError, match=named):
        prepared.state_dict()
    with pytest.raises(ReplacedParameterError, match=named):
        prepared.load_state_dict(saved)


def test_a_change_in_the_midst_of_training_is_found_within_the_steps_of_one_look() -> None:
    model, prepared = start()
    train(prepared, 3)
    replace_module(model)
    with pytest.raises(ReplacedParameterError, match=r"head\.weight"):
        train(prepared, STEPS_A_LOOK)


def test_a_module_without_parameters_may_be_exchanged() -> None:
    model, prepared = start()
    model.body[1] = nn.Dropout(0.5)
    train(prepared, 1)
    model.head = nn.Linear(2, 1)
    with pytest.raises(ReplacedParameterError, match=r"head\.weight"):
        prepared.state_dict()


def test_a_layer_that_was_taken_out_is_named() -> None:
    model, prepared = start()
    model.head = nn.Identity()
    with pytest.raises(
        ReplacedParameterError, match=r"prepare\(\): head\.weight, head\.bias replaced or taken out"
    ):
        prepared.state_dict()


def test_values_copied_or_loaded_in_place_are_no_change() -> None:
    model, prepared = start()
    with torch.no_grad():
        model.head.weight.copy_(torch.zeros(1, 2))
    model.load_state_dict(Net().state_dict())
    model.to(torch.float32).requires_grad_(True)
    train(prepared, STEPS_A_LOOK + 1)


def test_a_parameter_under_a_second_name_is_no_change() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    known = KnownParameters(model)
    model.alias = model[0].weight
    known.look()
    model.alias = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ReplacedParameterError, match="alias created or assigned"):
        known.look()


def test_a_layer_unfrozen_later_that_no_optimizer_holds_is_named() -> None:
    model = Net()
    model.head.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    (prepared,) = backend().prepare([model], [SGD(trained, lr=0.1)], [])
    train(prepared, 3)
    model.head.requires_grad_(True)
    with pytest.raises(
        PairingError, match=r"head\.weight, head\.bias: frozen when Net was prepared, trained now"
    ):
        train(prepared, STEPS_A_LOOK)


def test_an_unfrozen_layer_that_an_optimizer_holds_trains() -> None:
    model = Net()
    model.head.requires_grad_(False)
    one = backend()
    (prepared,) = one.prepare([model], [SGD(model.body.parameters(), lr=0.1)], [])
    one.prepare([], [SGD(model.head.parameters(), lr=0.1)], [])
    model.head.requires_grad_(True)
    before = model.head.weight.detach().clone()
    for _ in range(STEPS_A_LOOK + 1):
        prepared.backward(model(torch.ones(1, 2)).sum())
        for optimizer in prepared.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert not torch.equal(model.head.weight, before)


def test_an_optimizer_over_a_part_of_what_is_trained_is_the_users_choice() -> None:
    model = Net()
    (prepared,) = backend().prepare([model], [SGD(model.head.parameters(), lr=0.1)], [])
    train(prepared, STEPS_A_LOOK + 1)
    assert model.body[0].weight.grad is not None


@pytest.mark.ranks(2)
def test_shards_unfrozen_later_that_no_optimizer_holds_are_named() -> None:
    model = stack()
    model.head.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    (prepared,) = fsdp().prepare([model], [SGD(trained, lr=0.1)], [])

    def train_shards(num_steps: int) -> None:
        for _ in range(num_steps):
            take_step(prepared, loss_of(prepared.model, 0))

    train_shards(2)
    prepared.unwrap().head.requires_grad_(True)
    said = r"^head\.weight: frozen when FSDPStack was prepared, trained now, and held by no"
    with pytest.raises(PairingError, match=said):
        train_shards(STEPS_A_LOOK)


@pytest.mark.ranks(2)
def test_ddp_refuses_what_it_does_not_average() -> None:
    _, model, prepared = prepare_sgd(ddp(), Net())
    assign_parameter(model)
    name = r"body\.0\.weight"
    said = f"{name} created or assigned; {name} replaced or taken out"
    with pytest.raises(ReplacedParameterError, match=said):
        prepared.optimizers[0].step()


def renormalising() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), nn.Flatten(), nn.Linear(8, 1))


def test_one_process_trains_an_embedding_that_scales_its_rows() -> None:
    def loss(model: nn.Module, rank: int, number: int) -> torch.Tensor:
        return model(torch.tensor([[number, number + 1]])).square().mean()

    assert_equals_plain_loop(Case(build=renormalising, loss=loss), backend())


@pytest.mark.parametrize("mode", ["no", "fp16"])
def test_an_optimizer_that_steps_in_a_hook_is_right_or_refused(mode: str) -> None:
    """On one process without a loss scale, gradients are final as soon as they are there."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    (prepared,) = backend(mode).prepare([model], [SGD([model.weight], lr=0.1)], [])

    def step(_: torch.Tensor) -> None:
        step_and_clear(prepared)

    model.bias.requires_grad_(False)
    model.weight.register_post_accumulate_grad_hook(step)
    x = torch.tensor([[1.0, 2.0]])
    if mode == "no":
        prepared.backward(model(x).sum())
        torch.testing.assert_close(model.weight.detach(), before - 0.1 * x)
    else:
        with pytest.raises(AccumulationError, match="a step or clip of Linear while backward"):
            prepared.backward(model(x).sum())


def test_a_model_that_is_converted_under_a_loss_scale_is_refused() -> None:
    model, prepared = Net(), None
    (prepared,) = backend("fp16").prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    model.half()
    with pytest.raises(ReplacedParameterError, match="converted from float32 to float16 after prepare"):
        train(prepared, 1)
