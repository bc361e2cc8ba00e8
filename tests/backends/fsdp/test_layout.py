"""Saved values brought into shards, of a model and of its optimizers."""

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.optim import Adam

from drivetrain_backends.state_dict.full_tensors import full_state_dict
from plain_loop.backends import ddp, fsdp, plain_step, take_step, weights
from plain_loop.case import run_plain, train
from plain_loop.stack import CASE, loss_of, scaled, stack


@pytest.mark.ranks(2)
@pytest.mark.parametrize("later", [False, True])
def test_an_optimizers_state_is_carried_into_the_shards(later: bool) -> None:
    plain, model = scaled(), scaled()
    optimizer, expected = (Adam(one.parameters(), lr=0.1) for one in (model, plain))
    plain_step(optimizer, loss_of(model, 0))
    backend = fsdp()
    if later:
        backend.prepare([model], [], [])
    (prepared,) = backend.prepare([] if later else [model], [optimizer], [])
    take_step(prepared, loss_of(prepared.model, 0))
    assert optimizer.state[model.blocks[0].linear.weight]["exp_avg"].to_local().shape[0] == 3
    for _ in range(2):
        plain_step(expected, loss_of(plain, 0))
    torch.testing.assert_close(weights(prepared), dict(plain.state_dict()), rtol=1e-10, atol=1e-10)


ADAM = replace(
    CASE,
    build=partial(stack, 0, tied=True),
    loss=lambda model, rank, number: loss_of(model, 0),
    optimizer=partial(Adam, lr=0.05),
    steps=2,
)


def trained(kind: str, state: object = None) -> tuple[dict[str, Tensor], object]:
    """Take up a state, if any, and train for two steps; return the weights, and the full state."""
    backend, model = (
        ddp() if kind == "ddp" else fsdp(strategy=kind),
        stack(0 if state is None else 9, tied=True),
    )
    (prepared,) = backend.prepare([model], [ADAM.optimizer(model.parameters())], [])
    if state is not None:
        prepared.load_state_dict(state)
    (found,) = train(ADAM, backend, [prepared]).weights
    assert model.head.weight is model.embedding.weight
    kept = deepcopy(full_state_dict(prepared.state_dict()))
    backend.close()
    return found, kept


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
    _, state = run_ranks(trained, saved)[0]
    (expected,) = run_plain(replace(ADAM, steps=4), 1).weights
    for found, _ in run_ranks(trained, resumed, state, num_processes=num_processes):
        torch.testing.assert_close(found, expected)


@pytest.mark.ranks(2)
def test_a_state_of_another_model_is_refused_by_name() -> None:
    (prepared,) = fsdp().prepare([stack()], [], [])
    state = prepared.state_dict()
    others = {name: value for name, value in state["model"].items() if name != "head.weight"}
    with pytest.raises(ValueError, match=r"missing \['head.weight'\], unexpected \[\]"):
        prepared.load_state_dict({**state, "model": others})
    with pytest.raises(ValueError, match=r"head.weight is of shape \(5, 6\), in the checkpoint \(2, 2\)"):
        prepared.load_state_dict({**state, "model": {**others, "head.weight": torch.zeros(2, 2)}})
