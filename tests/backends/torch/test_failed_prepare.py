"""A `prepare` that fails on ranks leaves what it had placed as it was, as far as torch can."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from backends.replicas import ddp_backend
from drivetrain_backends import PairingError
from sharded_stack import fsdp, stack, tokens, weights


def prepare_a_model_that_cannot_be(meta: bool) -> tuple[str, str, str, float]:
    backend = ddp_backend()
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(False))
    optimizer = SGD(model[0].parameters(), lr=1.0)
    bad = nn.Linear(1, 1, device="meta") if meta else torch.jit.script(nn.Identity())
    try:
        backend.prepare([model, bad], [optimizer], [])
    except ValueError as error:
        said = str(error)
    kind = type(model).__name__
    model[1].requires_grad_(True)  # frozen at the prepare that failed, and trained from now on
    (prepared,) = backend.prepare([model], [SGD(model.parameters(), lr=1.0)], [])
    prepared.backward(prepared.model(torch.tensor([[1.0 + dist.get_rank()]])).sum())
    prepared.optimizers[0].step()
    kept = type(prepared.model).__name__
    backend.close()
    return said, kind, kept, model[1].bias.item()


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_a_prepare_that_fails_at_its_second_model_leaves_the_first_as_it_was(run_ranks, meta: bool) -> None:
    ran = run_ranks(prepare_a_model_that_cannot_be, meta)
    for said, kind, kept, _ in ran:
        assert ("weight is on the meta device" if meta else "is a TorchScript module") in said
        assert (kind, kept) == ("Sequential", "Replica")
    assert ran[0][3] == ran[1][3]


def shard_with_a_model_that_nothing_fills() -> tuple[str, str, bool]:
    backend = fsdp()
    good = stack()
    with torch.device("meta"):
        bad = nn.Sequential(nn.Linear(2, 2))
        bad.scale = nn.Parameter(torch.ones(2))
    optimizer = SGD(good.parameters(), lr=0.1)
    try:
        backend.prepare([good, bad], [optimizer], [])
    except ValueError as error:
        said = str(error)
    kind = type(good).__name__
    before = good.head.weight.detach().clone()
    (prepared,) = backend.prepare([good], [optimizer], [])
    prepared.backward(prepared.model(tokens(dist.get_rank())).square().mean())
    prepared.optimizers[0].step()
    moved = not torch.equal(weights(prepared)["head.weight"], before)
    backend.close()
    return said, kind, moved


def test_a_model_that_nothing_fills_is_refused_before_another_is_sharded(run_ranks) -> None:
    for said, kind, moved in run_ranks(shard_with_a_model_that_nothing_fills):
        assert said.startswith("scale is on the meta device, and Sequential has no way to fill it")
        assert (kind, moved) == ("Stack", True)


class Deaf(nn.Linear):
    """Its way to fill itself does nothing, which shows when it was called."""

    def reset_parameters(self) -> None:
        pass


def shard_with_a_model_that_fails_midway() -> tuple[str, str]:
    backend = fsdp()
    with torch.device("meta"):
        bad = Deaf(2, 2)
    try:
        backend.prepare([stack(), bad], [], [])
    except ValueError as error:
        said, notes = str(error), "".join(error.__notes__)
    (prepared,) = backend.prepare([stack()], [], [])
    assert len(weights(prepared)) == len(stack().state_dict())
    backend.close()
    return said, notes


def test_an_error_says_which_models_were_sharded_when_it_came(run_ranks) -> None:
    for said, notes in run_ranks(shard_with_a_model_that_fails_midway):
        assert said.startswith("weight is on the meta device, and Deaf has no way to fill it")
        assert notes.startswith("prepare() failed: Stack and the model at fault may be sharded by now")


def shard_with_an_optimizer_of_another_model() -> tuple[str, str]:
    backend = fsdp()
    model = stack()
    try:
        backend.prepare([model], [SGD(stack().parameters(), lr=0.1)], [])
    except PairingError as error:
        return str(error), type(model).__name__
    finally:
        backend.close()
    return "prepared", ""


def test_an_optimizer_whose_model_was_not_prepared_is_refused_before_a_model_is_sharded(run_ranks) -> None:
    for said, kind in run_ranks(shard_with_an_optimizer_of_another_model):
        assert "belongs to no prepared model; pass the model to the same prepare() call" in said
        assert kind == "Stack"
