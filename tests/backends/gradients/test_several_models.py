"""Several models and optimizers train as in a plain loop: shared trunks, teachers, two optimizers for a model."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from plain_loop.backends import backend_of, ddp
from plain_loop.case import Case, Trained, assert_equal, run_plain, train


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


Parts = tuple[list[nn.Module], list[Optimizer]]


def actor_and_critic() -> Parts:
    """Both train the trunk, at rates of their own."""
    torch.manual_seed(0)
    trunk = nn.Linear(2, 3)
    actor, critic = Head(trunk), Head(trunk)
    return [actor, critic], [sgd(actor.parameters()), sgd(critic.parameters(), lr=0.05)]


def actor_and_critic_heads() -> Parts:
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


def actor_critic() -> Parts:
    """One model of two optimizers, which both train the trunk."""
    model = ActorCritic()
    return [model], [sgd(model.actor.parameters()), sgd(model.critic.parameters(), lr=0.05)]


def student_and_teacher() -> Parts:
    torch.manual_seed(0)
    student, teacher = Head(nn.Linear(2, 3)), Head(nn.Linear(2, 3))
    teacher.requires_grad_(False)
    return [student, teacher], [sgd(student.parameters())]


def one_model_of_two_optimizers() -> Parts:
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


def assert_trains_alike(kind: str, name: str, *, calls: int = 1, clears_in_turn: bool = False) -> None:
    """Compare with a plain loop; all is prepared in one call, or each optimizer in one of its own."""
    build, losses = (CASES | SHARED)[name]
    made: list[Parts] = []

    def models() -> list[nn.Module]:
        made.append(build())
        return made[-1][0]

    case = Case(
        build=models,
        loss=lambda each, rank, number: losses(
            each if isinstance(each, list) else [each], batch(rank, number)
        ),
        optimizer=lambda _: made[-1][1],
        steps=4,
        accumulation=2,
        clears_in_turn=clears_in_turn,
    )
    backend = backend_of(kind, accumulation=2)
    expected = run_plain(case, backend.context.topology.world_size)
    given, optimizers = build()
    prepared = backend.prepare(given, optimizers if calls == 1 else [], [])
    for optimizer in optimizers if calls == 2 else ():
        backend.prepare([], [optimizer], [])
    found = train(case, backend, prepared)
    backend.close()
    assert_equal(Trained(weights=found.weights), Trained(weights=expected.weights))


@pytest.mark.parametrize("name", [*CASES, *SHARED])
@pytest.mark.parametrize("calls", [1, 2])
def test_on_one_device(name: str, calls: int) -> None:
    assert_trains_alike("single", name, calls=calls)


@pytest.mark.parametrize("name", ["two optimizers", "critic without the trunk"])
def test_each_optimizer_may_step_and_clear_in_turn(name: str) -> None:
    assert_trains_alike("single", name, clears_in_turn=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.default_cases(
    "1-two optimizers-fsdp", "2-student and teacher-ddp", "2-actor and critic in one model-fsdp"
)
def test_on_two_ranks(kind: str, name: str, calls: int) -> None:
    assert_trains_alike(kind, name, calls=calls)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_each_optimizer_may_step_and_clear_in_turn_on_two_ranks(kind: str) -> None:
    assert_trains_alike(kind, "two optimizers", clears_in_turn=True)


def prepare_in_calls(
    backend: Any, models: Sequence[nn.Module], optimizers: list[Optimizer], calls: int
) -> None:
    if calls == 1:
        backend.prepare(models, optimizers, [])
    else:
        backend.prepare(models[:1], [], [])
        backend.prepare(models[1:], [], [])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("calls", [1, 2])
def test_models_that_share_a_trunk_are_refused_where_ranks_would_average_it_twice(calls: int) -> None:
    models, optimizers = actor_and_critic()
    with pytest.raises(ValueError, match=r"^Head and Head share trunk\.weight.*put both into one nn\.Module"):
        prepare_in_calls(ddp(), models, optimizers, calls)
    assert type(models[1]) is Head


@pytest.mark.ranks(2)
def test_models_may_share_what_is_frozen() -> None:
    models, _ = actor_and_critic()
    models[0].trunk.requires_grad_(False)
    assert len(ddp().prepare(models, [], [])) == 2
