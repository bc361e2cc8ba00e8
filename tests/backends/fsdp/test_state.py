"""Saved values brought into shards, of a model and of its optimizers."""

import pytest
import torch
from torch import Tensor
from torch.optim import Adam

from backends.replicas import ddp_backend, plain_step
from drivetrain_backends import DDPBackend
from sharded_stack import fsdp, loss_of, scaled, stack, trained, weights


def adam_with_a_past(*, later: bool) -> tuple[dict[str, Tensor], int]:
    backend = fsdp()
    model = scaled()
    optimizer = Adam(model.parameters(), lr=0.1)
    plain_step(optimizer, loss_of(model, 0))
    if later:
        backend.prepare([model], [], [])
        (prepared,) = backend.prepare([], [optimizer], [])
    else:
        (prepared,) = backend.prepare([model], [optimizer], [])
    backend.window.begin()
    prepared.backward(loss_of(prepared.model, 0))
    prepared.optimizers[0].step()
    rows = optimizer.state[model.blocks[0].linear.weight]["exp_avg"].to_local().shape[0]
    found = weights(prepared)
    backend.close()
    return found, rows


@pytest.mark.parametrize("later", [False, True])
def test_an_optimizers_state_is_carried_into_the_shards(run_ranks, later: bool) -> None:
    model = scaled()
    optimizer = Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        plain_step(optimizer, loss_of(model, 0))
    for found, rows in run_ranks(adam_with_a_past_later if later else adam_with_a_past_now):
        assert rows == 3
        torch.testing.assert_close(found, dict(model.state_dict()), rtol=1e-10, atol=1e-10)


def adam_with_a_past_now() -> tuple[dict[str, Tensor], int]:
    return adam_with_a_past(later=False)


def adam_with_a_past_later() -> tuple[dict[str, Tensor], int]:
    return adam_with_a_past(later=True)


def ddp() -> DDPBackend:
    return ddp_backend()


def make(kind: str) -> object:
    return ddp() if kind == "ddp" else fsdp(strategy=kind)


def save(kind: str) -> object:
    return trained(make(kind))[1]


def resume(kind: str, state: object) -> dict[str, Tensor]:
    return trained(make(kind), state)[0]


@pytest.mark.parametrize(
    ("saved", "resumed", "num_processes"),
    [
        ("ddp", "full_shard", 2),
        ("full_shard", "ddp", 2),
        ("full_shard", "hybrid_shard", 1),
        ("no_shard", "full_shard", 4),
    ],
)
@pytest.mark.default_cases("ddp-full_shard-2", "full_shard-ddp-2")
def test_a_state_goes_on_in_another_backend_and_at_another_number_of_ranks(
    run_ranks, saved: str, resumed: str, num_processes: int
) -> None:
    state = run_ranks(save, saved)[0]
    model = stack(tied=True)
    optimizer = Adam(model.parameters(), lr=0.05)
    for _ in range(4):
        plain_step(optimizer, loss_of(model, 0))
    for found in run_ranks(resume, resumed, state, num_processes=num_processes):
        torch.testing.assert_close(found, dict(model.state_dict()))


def load_what_does_not_fit() -> list[str]:
    backend = fsdp()
    (prepared,) = backend.prepare([stack()], [], [])
    state = prepared.state_dict()
    said: list[str] = []
    for model in (
        {name: value for name, value in state["model"].items() if name != "head.weight"},
        {**state["model"], "head.weight": torch.zeros(2, 2)},
    ):
        try:
            prepared.load_state_dict({**state, "model": model})
        except ValueError as error:
            said.append(str(error))
    backend.close()
    return said


def test_a_state_of_another_model_is_refused_by_name(run_ranks) -> None:
    for missing, shape in run_ranks(load_what_does_not_fit):
        assert "missing ['head.weight'], unexpected []" in missing
        assert "head.weight is of shape (5, 6), in the checkpoint (2, 2)" in shape
