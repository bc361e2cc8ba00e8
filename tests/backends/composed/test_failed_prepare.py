"""A `prepare` that fails on ranks leaves what it had placed as it was, as far as torch can."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from drivetrain_backends import ModelTransform, PairingError
from plain_loop.backends import ddp, fsdp, prepare_sgd, take_step, weights
from plain_loop.case import assert_same_on_all_ranks
from plain_loop.stack import stack, tokens

pytestmark = pytest.mark.ranks(2)


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_a_prepare_that_fails_at_its_second_model_leaves_the_first_as_it_was(meta: bool) -> None:
    backend, model = ddp(), nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(False))
    optimizer = SGD(model[0].parameters(), lr=1.0)
    bad = nn.Linear(1, 1, device="meta") if meta else torch.jit.script(nn.Identity())
    said = "weight is on the meta device" if meta else "is a TorchScript module"
    with pytest.raises(ValueError, match=said):
        backend.prepare([model, bad], [optimizer], [])
    assert type(model) is nn.Sequential
    model[1].requires_grad_(True)  # frozen at the prepare that failed, and trained from now on
    _, _, prepared = prepare_sgd(backend, model, lr=1.0)
    take_step(prepared, prepared.model(torch.tensor([[1.0 + dist.get_rank()]])).sum())
    assert type(prepared.model).__name__ == "Replica"
    assert_same_on_all_ranks(model[1].bias.item())


def test_the_error_of_a_prepare_is_the_first_one_where_what_undoes_it_fails_too() -> None:
    class Broken(ModelTransform):
        def apply(self, model: nn.Module) -> nn.Module:
            if isinstance(model, nn.Identity):
                raise ValueError("the first error")
            return model

        def release(self, model: nn.Module) -> None:
            raise RuntimeError("cannot be undone")

    failed: list[str] = []

    class Told(ModelTransform):
        def fail(self, error: BaseException) -> None:
            failed.append(str(error))

    backend = ddp()
    backend.strategy = replace(backend.strategy, transforms=(Broken(), Told()))
    with pytest.raises(ValueError, match="the first error") as caught:
        backend.prepare([nn.Linear(1, 1), nn.Identity()], [], [])
    assert failed == ["the first error"]
    assert any("RuntimeError: cannot be undone" in note for note in caught.value.__notes__)


def test_a_model_that_nothing_fills_is_refused_before_another_is_sharded() -> None:
    backend, good = fsdp(), stack()
    with torch.device("meta"):
        bad = nn.Sequential(nn.Linear(2, 2))
        bad.scale = nn.Parameter(torch.ones(2))
    optimizer = SGD(good.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"^scale is on the meta device, and Sequential has no way to fill it"
    ):
        backend.prepare([good, bad], [optimizer], [])
    assert type(good).__name__ == "Stack"
    before = good.head.weight.detach().clone()
    (prepared,) = backend.prepare([good], [optimizer], [])
    take_step(prepared, prepared.model(tokens(dist.get_rank())).square().mean())
    assert not torch.equal(weights(prepared)["head.weight"], before)


class Deaf(nn.Linear):
    """Its way to fill itself does nothing, which shows when it was called."""

    def reset_parameters(self) -> None:
        pass


def test_an_error_says_which_models_were_sharded_when_it_came() -> None:
    backend = fsdp()
    with torch.device("meta"):
        bad = Deaf(2, 2)
    with pytest.raises(ValueError, match=r"^weight is on the meta device, and Deaf has no way to") as caught:
        backend.prepare([stack(), bad], [], [])
    (note,) = caught.value.__notes__
    assert note.startswith("prepare() failed: Stack and the model at fault may be sharded by now")
    (prepared,) = backend.prepare([stack()], [], [])
    assert len(weights(prepared)) == len(stack().state_dict())


def test_an_optimizer_whose_model_was_not_prepared_is_refused_before_a_model_is_sharded() -> None:
    model = stack()
    said = r"belongs to no prepared model; pass the model to the same prepare\(\) call"
    with pytest.raises(PairingError, match=said):
        fsdp().prepare([model], [SGD(stack().parameters(), lr=0.1)], [])
    assert type(model).__name__ == "Stack"


def test_a_model_that_was_sharded_by_a_prepare_that_failed_is_watched_no_more() -> None:
    good = stack()
    with torch.device("meta"):
        bad = Deaf(2, 2)
    backend = fsdp()
    with pytest.raises(ValueError, match="Deaf has no way to"):
        backend.prepare([good, bad], [], [])
    good.head.bias = nn.Parameter(torch.zeros(5))
