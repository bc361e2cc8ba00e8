"""Hooks on parameters do under FSDP what they do in a plain loop."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from drivetrain_backends import UnshardedParameterError
from drivetrain_backends.settings import ModelSettings
from plain_loop.backends import fsdp, prepare_sgd
from plain_loop.case import Trained, assert_equal, run_plain, train
from plain_loop.stack import CASE, loss_of, stack


def mask(tensor: Tensor) -> Tensor:
    rows = torch.ones_like(tensor)
    rows[1:3] = 0
    return tensor * rows


def keep_rows(parameter: Tensor) -> None:
    parameter.grad[1:3] = 0  # as a mask on rows is written: by index


class Hooks:
    """Hooks on the embedding and on a block, which are removed before the third step."""

    def __init__(self, kind: str) -> None:
        self.kind, self.handles = kind, []

    def set(self, model: nn.Module) -> None:
        for parameter in (model.embedding.weight, model.blocks[0].linear.weight):
            by_gradient = self.kind == "gradient"
            register = (
                parameter.register_hook if by_gradient else parameter.register_post_accumulate_grad_hook
            )
            self.handles.append(register(mask if by_gradient else keep_rows))

    def before_step(self, model: nn.Module, step: int, *, sets_first: bool) -> None:
        if step == 0 and sets_first:
            self.set(model)
        if step == 2:
            for handle in self.handles:
                handle.remove()


def trained(kind: str, when: str, **options: object) -> Trained:
    hooks, model = Hooks(kind), stack(0)
    if when == "before":
        hooks.set(model)
    backend, _, prepared = prepare_sgd(fsdp(accumulation=2, **options), model)
    before = partial(hooks.before_step, sets_first=when == "after")
    return train(replace(CASE, accumulation=2, before_step=before), backend, [prepared])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "when", "options"),
    [
        *((kind, when, {}) for kind in ("gradient", "parameter") for when in ("before", "after")),
        ("gradient", "before", {"strategy": "no_shard"}),
        (
            "parameter",
            "after",
            {"strategy": "shard_grad_op", "changes": ModelSettings(activation_checkpointing="full")},
        ),
    ],
)
def test_hooks_on_parameters_act_as_in_a_plain_loop(kind: str, when: str, options: dict) -> None:
    # A plain loop adds up all micro-batches: a hook on gradients sees each, and masks it.
    before = partial(Hooks("gradient").before_step, sets_first=True)
    expected = run_plain(replace(CASE, accumulation=2, before_step=before), 2)
    found = trained(kind, when, **options)
    assert_equal(Trained(weights=found.weights), Trained(weights=expected.weights))


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("error")
def test_hooks_that_nothing_would_run_are_refused() -> None:
    model = stack(0)
    listed = list(model.parameters())
    Hooks("gradient").set(model)
    _, _, prepared = prepare_sgd(fsdp(), model)
    with pytest.raises(
        UnshardedParameterError, match=r"a hook on embedding\.weight as it was before prepare"
    ):
        listed[0].register_hook(mask)
    with pytest.raises(
        UnshardedParameterError, match=r"take the parameter anew from model\.named_parameters"
    ):
        listed[1].register_post_accumulate_grad_hook(keep_rows)
    loss_of(prepared.model, 0).backward()
    with pytest.raises(UnshardedParameterError, match=r"has a hook that loss\.backward\(\) does not run"):
        prepared.optimizers[0].step()
