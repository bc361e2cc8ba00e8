"""A model that was sharded goes on training after `close`, as one that nobody closed."""

import gc
from collections.abc import Callable
from dataclasses import replace
from weakref import ref

import pytest
import torch
from torch import nn
from torch.optim import Adam

from drivetrain_backends import FSDPBackend, Prepared, UnshardedParameterError
from drivetrain_backends.settings import ModelSettings
from plain_loop.backends import fsdp, plain_step, take_step, weights
from plain_loop.case import Trained, train
from plain_loop.stack import CASE, loss_of, stack, tokens

pytestmark = pytest.mark.ranks(2)
Again = Callable[[FSDPBackend, Prepared], Prepared]


def as_it_is(_: FSDPBackend, prepared: Prepared) -> Prepared:
    return prepared


def closed(backend: FSDPBackend, prepared: Prepared) -> Prepared:
    optimizer = prepared.optimizers[0].optimizer
    backend.close()
    (again,) = backend.prepare([prepared.unwrap()], [optimizer], [])
    return again


def closed_in_a_window(backend: FSDPBackend, prepared: Prepared) -> Prepared:
    backend.window.begin()
    with prepared.no_sync():
        prepared.backward(loss_of(prepared.model, 7))
    return closed(backend, prepared)


def evaluated_in_between(backend: FSDPBackend, prepared: Prepared) -> Prepared:
    optimizer, model = prepared.optimizers[0].optimizer, prepared.unwrap()
    backend.close()
    with torch.no_grad():
        assert model(tokens(0)).isfinite().all()
    (again,) = backend.prepare([model], [optimizer], [])
    return again


def trained(again: Again, mode: str, options: dict[str, object]) -> tuple[Trained, Trained]:
    """Train two windows before, and two after."""
    backend, model = fsdp(mode, accumulation=2, **options), stack(0, tied=True)
    model.embedding.weight.register_hook(lambda gradient: gradient * 0.5)
    (prepared,) = backend.prepare([model], [Adam(model.parameters(), lr=0.05)], [])
    case = replace(CASE, accumulation=2, steps=2)
    first = train(case, backend, [prepared])
    second = train(case, backend, [again(backend, prepared)])
    backend.close()
    return first, second


@pytest.mark.parametrize("again", [closed, closed_in_a_window, evaluated_in_between])
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("no", {}),
        pytest.param(
            "bf16", {"changes": ModelSettings(activation_checkpointing="full")}, marks=pytest.mark.slow
        ),
        pytest.param("no", {"strategy": "shard_grad_op", "prefetch": 1}, marks=pytest.mark.slow),
        pytest.param("no", {"offload": True}, marks=pytest.mark.slow),
        pytest.param("fp16", {"wrap": ("Stack",)}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_it_trains_as_if_it_had_not_been_closed(again: Again, mode: str, options: dict) -> None:
    for whole, resumed in zip(trained(as_it_is, mode, options), trained(again, mode, options), strict=True):
        assert resumed.losses == whole.losses
        torch.testing.assert_close(resumed.weights, whole.weights, rtol=0, atol=0)


def test_a_second_stage_trains_what_the_first_had_frozen() -> None:
    """The head alone, then all."""
    backend, sharded, plain = fsdp(), stack(0), stack(0)
    for stage in range(2):
        for model in (sharded, plain):
            model.requires_grad_(stage == 1)
            model.head.requires_grad_(True)
        optimizers = [Adam([p for p in m.parameters() if p.requires_grad], lr=0.05) for m in (sharded, plain)]
        (prepared,) = backend.prepare([sharded], optimizers[:1], [])
        for step in range(2):
            take_step(prepared, loss_of(prepared.model, step))
            plain_step(optimizers[1], loss_of(plain, step))
        torch.testing.assert_close(weights(prepared), dict(plain.state_dict()))
        backend.close()


@pytest.mark.parametrize("name", ["extra", "head"])
def test_a_model_that_was_changed_in_between_is_refused(name: str) -> None:
    backend, model = fsdp(), stack(0)
    backend.prepare([model], [], [])
    backend.close()
    setattr(model, name, nn.Linear(6, 5, bias=False))
    model(tokens(0)).sum()  # leaves the blocks gathered, as no backward follows
    with pytest.raises(UnshardedParameterError, match=rf"{name}\.weight was created after"):
        backend.prepare([model], [], [])


def test_a_closed_model_is_not_kept_and_no_other_backend_takes_it() -> None:
    backend, model = fsdp(), stack(0)
    backend.prepare([model], [], [])
    backend.close()
    other = fsdp()
    try:
        other.prepare([model], [], [])
    except ValueError as error:
        said = str(error)  # and not the error, whose frames hold the model
    assert "Stack is prepared already: it is sharded" in said
    watched: ref[nn.Module] = ref(model)
    del model
    gc.collect()
    assert watched() is None
