"""Several models and optimizers train as in a plain loop: shared trunks, teachers, two optimizers for a model."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from backends.replicas import ddp_backend
from drivetrain_backends import AccumulationWindow, DDPBackend, FSDPBackend, SingleBackend
from drivetrain_precision import choose_policy
from drivetrain_state import StateSettings, connect
from sharded_stack import weights

NUM_STEPS, ACCUMULATION = 4, 2
Losses = Callable[[Sequence[nn.Module], torch.Tensor], Sequence[torch.Tensor]]


class Head(nn.Module):
    """A trunk, which others may share, and a layer of its own."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.own = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(torch.tanh(self.trunk(x)))


def sgd(parameters, lr: float = 0.1) -> SGD:
    return SGD(parameters, lr=lr, momentum=0.9)


def actor_and_critic() -> tuple[list[nn.Module], list[Optimizer]]:
    """Both train the trunk, at rates of their own."""
    torch.manual_seed(0)
    trunk = nn.Linear(2, 3)
    actor, critic = Head(trunk), Head(trunk)
    return [actor, critic], [sgd(actor.parameters()), sgd(critic.parameters(), lr=0.05)]


def actor_and_critic_heads() -> tuple[list[nn.Module], list[Optimizer]]:
    """The actor's optimizer alone trains the trunk."""
    models, (first, _) = actor_and_critic()
    return models, [first, sgd(models[1].own.parameters(), lr=0.05)]


class ActorCritic(nn.Module):
    """Both in one module, as ranks can average the trunk once."""

    def __init__(self) -> None:
        super().__init__()
        (self.actor, self.critic), _ = actor_and_critic()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(x), self.critic(x)


def actor_critic() -> tuple[list[nn.Module], list[Optimizer]]:
    """One model of two optimizers, which both train the trunk."""
    model = ActorCritic()
    return [model], [sgd(model.actor.parameters()), sgd(model.critic.parameters(), lr=0.05)]


def student_and_teacher() -> tuple[list[nn.Module], list[Optimizer]]:
    torch.manual_seed(0)
    student, teacher = Head(nn.Linear(2, 3)), Head(nn.Linear(2, 3))
    teacher.requires_grad_(False)
    return [student, teacher], [sgd(student.parameters())]


def one_model_of_two_optimizers() -> tuple[list[nn.Module], list[Optimizer]]:
    torch.manual_seed(0)
    model = Head(nn.Linear(2, 3))
    return [model], [sgd(model.trunk.parameters()), sgd(model.own.parameters(), lr=0.05)]


def one_loss(models: Sequence[nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
    return [models[0](x).mean() + (models[-1](x) - 1).square().mean()]


def actor_critic_loss(models: Sequence[nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
    action, value = models[0](x)
    return [action.mean() + (value - 1).square().mean()]


def two_losses(models: Sequence[nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
    return [models[0](x).mean(), (models[-1](x) - 1).square().mean()]


def distillation(models: Sequence[nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
    return [(models[0](x) - models[1](x)).square().mean()]


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 8).reshape(4, 2) * (1 + rank) + 0.1 * number


def train_plainly(build, losses: Losses, num_ranks: int) -> list[dict[str, torch.Tensor]]:
    models, optimizers = build()
    for step in range(NUM_STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for number in range(step * ACCUMULATION, (step + 1) * ACCUMULATION):
            for rank in range(num_ranks):
                (sum(losses(models, batch(rank, number))) / num_ranks / ACCUMULATION).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [dict(model.state_dict()) for model in models]


def train(
    kind: type, build, losses: Losses, calls: int, each_cleared_at_once: bool = False
) -> list[dict[str, torch.Tensor]]:
    """Train through a backend; models are prepared in one call, or optimizers in one of their own."""
    context = connect(StateSettings(device="cpu", watchdog=False))
    window = AccumulationWindow(ACCUMULATION)
    backend = kind(context, choose_policy("no", context.device), window=window)
    models, optimizers = build()
    if calls == 1:
        prepared = backend.prepare(models, optimizers, [])
    else:
        prepared = backend.prepare(models, [], [])
        for optimizer in optimizers:
            backend.prepare([], [optimizer], [])
    for number in range(NUM_STEPS * ACCUMULATION):
        window.begin()
        with ExitStack() as held:
            if not window.closing:
                for one in prepared:
                    held.enter_context(one.no_sync())
            for loss in losses([one.model for one in prepared], batch(context.topology.rank, number)):
                backend.backward(loss)
        for optimizer in [o for one in prepared for o in one.optimizers]:
            optimizer.step()
            if each_cleared_at_once:
                optimizer.zero_grad()
        for optimizer in [o for one in prepared for o in one.optimizers]:
            optimizer.zero_grad()
    trained = [weights(one) for one in prepared]
    backend.close()
    return trained


SHARED = {
    "actor and critic": (actor_and_critic, one_loss),
    "actor and critic, a loss each": (actor_and_critic, two_losses),
    "critic without the trunk": (actor_and_critic_heads, two_losses),
}
CASES = {
    "actor and critic in one model": (actor_critic, actor_critic_loss),
    "student and teacher": (student_and_teacher, distillation),
    "two optimizers": (one_model_of_two_optimizers, one_loss),
}
BY_NAME = pytest.mark.parametrize("name", CASES)
CALLS = pytest.mark.parametrize("calls", [1, 2])


def assert_equal(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> None:
    for own, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(own, dict(plain))


@pytest.mark.parametrize("name", [*CASES, *SHARED])
@CALLS
def test_on_one_device(name: str, calls: int) -> None:
    case = (CASES | SHARED)[name]
    assert_equal(train(SingleBackend, *case, calls), train_plainly(*case, 1))


@pytest.mark.parametrize("name", ["two optimizers", "critic without the trunk"])
def test_each_optimizer_may_step_and_clear_in_turn(name: str) -> None:
    case = (CASES | SHARED)[name]
    assert_equal(train(SingleBackend, *case, 1, True), train_plainly(*case, 1))


def train_on(kind: type, name: str, calls: int, each_cleared_at_once: bool) -> list[dict[str, torch.Tensor]]:
    return train(kind, *CASES[name], calls, each_cleared_at_once)


KINDS = pytest.mark.parametrize("kind", [DDPBackend, FSDPBackend])


@KINDS
@BY_NAME
@CALLS
@pytest.mark.default_cases(
    "1-two optimizers-FSDPBackend",
    "2-student and teacher-DDPBackend",
    "2-actor and critic in one model-FSDPBackend",
)
def test_on_two_ranks(run_ranks, kind: type, name: str, calls: int) -> None:
    for found in run_ranks(train_on, kind, name, calls, False):
        assert_equal(found, train_plainly(*CASES[name], 2))


@KINDS
def test_each_optimizer_may_step_and_clear_in_turn_on_two_ranks(run_ranks, kind: type) -> None:
    for found in run_ranks(train_on, kind, "two optimizers", 1, True):
        assert_equal(found, train_plainly(*CASES["two optimizers"], 2))


def prepare_models_that_share(calls: int) -> str:
    ddp = ddp_backend()
    models, optimizers = actor_and_critic()
    try:
        if calls == 1:
            ddp.prepare(models, optimizers, [])
        else:
            ddp.prepare(models[:1], [], [])
            ddp.prepare(models[1:], [], [])
    except ValueError as error:
        assert type(models[1]) is Head
        return str(error)
    finally:
        ddp.close()
    return "prepared"


@CALLS
def test_models_that_share_a_trunk_are_refused_where_ranks_would_average_it_twice(
    run_ranks, calls: int
) -> None:
    for said in run_ranks(prepare_models_that_share, calls):
        assert said.startswith("Head and Head share trunk.weight")
        assert "put both into one nn.Module" in said


def prepare_models_that_share_what_is_frozen() -> int:
    ddp = ddp_backend()
    models, _ = actor_and_critic()
    models[0].trunk.requires_grad_(False)
    prepared = ddp.prepare(models, [], [])
    ddp.close()
    return len(prepared)


def test_models_may_share_what_is_frozen(run_ranks) -> None:
    assert run_ranks(prepare_models_that_share_what_is_frozen) == [2, 2]
