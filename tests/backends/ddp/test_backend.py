"""What DDP alone brings: hooks that compress gradients, ranks that run out of batches."""

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from drivetrain_backends import DDPSettings, DriftedReplicasError, UnreducedGradientError
from plain_loop.backends import ddp, prepare_sgd, take_step
from plain_loop.case import Case, assert_equals_plain_loop, assert_same_on_all_ranks, run_on_ranks, run_plain

pytestmark = pytest.mark.ranks(2)


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def test_a_model_without_trainable_parameters_is_only_moved() -> None:
    (prepared,) = ddp().prepare([layer().requires_grad_(False)], [], [])
    assert type(prepared.model).__name__ == "Linear"


@pytest.mark.parametrize("frozen", ["weight", "weight and bias"])
def test_a_parameter_unfrozen_after_prepare_is_refused_by_name(frozen: str) -> None:
    model = layer()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    _, _, prepared = prepare_sgd(ddp(), model)
    model.requires_grad_(True)
    before = model.weight.detach().clone()
    prepared.backward(prepared.model(torch.full((2, 8), float(dist.get_rank() + 1))).square().mean())
    said = r"^weight was frozen when prepare\(\) replicated its model, and has a gradient now"
    with pytest.raises(UnreducedGradientError, match=said):
        prepared.optimizers[0].step()
    assert torch.equal(model.weight, before)


def train_between_releases(keep_wrapper: bool) -> Tensor:
    backend, model = ddp(), layer()
    optimizer = SGD(model.parameters(), lr=0.1)
    model.bias.requires_grad_(False)
    given: nn.Module = model
    for place in range(2):
        (prepared,) = backend.prepare([given], [optimizer], [])
        assert not keep_wrapper or place == 0 or prepared.model is given
        take_step(prepared, prepared.model(torch.full((2, 8), 1.0 + dist.get_rank())).square().mean())
        backend.close()
        given = prepared.model if keep_wrapper else model
    (prepared,) = backend.prepare([given], [optimizer], [])
    model.bias.requires_grad_(True)
    prepared.backward(prepared.model(torch.ones(2, 8)).sum())
    with pytest.raises(UnreducedGradientError, match="bias was frozen when"):
        prepared.optimizers[0].step()
    return model.weight.detach()


def test_a_wrapper_that_was_released_is_used_again_by_its_own_backend() -> None:
    again = train_between_releases(True)
    assert torch.equal(again, train_between_releases(False))
    assert_same_on_all_ranks(again)
    first = ddp()
    (prepared,) = first.prepare([layer()], [], [])
    with pytest.raises(ValueError, match="Linear is prepared already"):
        first.prepare([prepared.model], [], [])
    first.close()
    with pytest.raises(ValueError, match="Linear is prepared already"):
        ddp(find_unused_parameters=True).prepare([prepared.model], [], [])


def test_every_setting_reads_back_as_it_was_asked_for() -> None:
    together = {
        "find_unused_parameters": True,
        "gradient_as_bucket_view": False,
        "bucket_size_mb": 3.0,
        "broadcast_buffers": False,
        "sync_batch_norm": True,
        "communication_hook": "power_sgd",
        "power_sgd_rank": 2,
        "power_sgd_start_step": 7,
    }
    asked = (together, {"static_graph": True}, {"reduce": "at_close", "check_drift_every": 5})
    assert {name for each in asked for name in each} == {field.name for field in fields(DDPSettings)}
    for each in asked:
        backend, _, _ = prepare_sgd(ddp(**each), layer())
        assert {name: backend.applied()[name] for name in each} == each
        backend.close()


class Branches(nn.Module):
    """Two layers of which one is taken, and a third that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.unused = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, *, left: bool) -> torch.Tensor:
        return (self.left if left else self.right)(x)


def branches() -> Branches:
    torch.manual_seed(0)
    return Branches()


def loss_of_a_branch(by_rank: bool) -> Callable[[nn.Module, int, int], Tensor]:
    def loss(model: nn.Module, rank: int, number: int) -> Tensor:
        left = (rank + number) % 3 == 0 if by_rank else True
        return model(torch.full((2, 4), 1.0 + rank + number), left=left).sum()

    return loss


@pytest.mark.parametrize(
    ("settings", "by_rank"),
    [
        ({"find_unused_parameters": True}, True),
        ({"find_unused_parameters": True, "gradient_as_bucket_view": False}, True),
        ({"find_unused_parameters": True, "bucket_size_mb": 0.00001}, True),
        ({"static_graph": True}, False),
        ({"reduce": "at_close"}, True),
        ({"reduce": "at_close", "bucket_size_mb": 0.00001}, True),
    ],
)
def test_layers_that_ranks_leave_out_train_as_in_a_plain_loop(settings: dict, by_rank: bool) -> None:
    case = Case(build=branches, loss=loss_of_a_branch(by_rank), steps=4, accumulation=2, count=2)
    (found,) = assert_equals_plain_loop(case, ddp(accumulation=2, **settings)).weights
    assert_same_on_all_ranks(found)
    assert torch.equal(found["unused.weight"], branches().unused.weight)


def loss_of_items(model: nn.Module, rank: int, number: int) -> Tensor:
    return (
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank))).square().sum()
    )


@pytest.mark.parametrize(("hook", "tolerance"), [("fp16", 1e-3), ("bf16", 1e-2), ("power_sgd", 1e-1)])
def test_hooks_compress_counted_and_accumulated_gradients(hook: str, tolerance: float) -> None:
    case = Case(build=layer, loss=loss_of_items, steps=4, accumulation=3, count=4, clip={"norm": 1.0})
    backend = ddp(accumulation=3, communication_hook=hook, power_sgd_start_step=2)
    (found,), (plain,) = run_on_ranks(case, backend).weights, run_plain(case, 2).weights
    assert_same_on_all_ranks(found)
    assert 1e-6 < (found["weight"] - plain["weight"]).abs().max() < tolerance


@pytest.mark.parametrize("kind", ["unused", "frozen_later"])
def test_parameters_without_a_gradient_are_named_with_the_flag_that_allows_them(kind: str) -> None:
    model = nn.ModuleDict({"used": nn.Linear(8, 8), kind: nn.Linear(8, 8)})
    model.forward = lambda x: model["used"](x if kind == "unused" else model[kind](x))
    _, _, prepared = prepare_sgd(ddp(), model)
    model[kind].requires_grad_(kind == "unused")
    prepared.backward(prepared.model(torch.ones(2, 8)).sum())

    def train_on() -> None:  # it is told at the second forward or backward
        prepared.backward(prepared.model(torch.ones(2, 8)).sum())

    with pytest.raises(
        UnreducedGradientError, match=f"no gradient to {kind}.weight, {kind}.bias, and ranks"
    ) as caught:
        train_on()
    assert "--ddp-find-unused-parameters" in str(caught.value)


def test_a_frozen_weight_that_models_share_is_known_after_the_prepare_of_one_of_them_failed() -> None:
    backend, shared = ddp(), nn.Embedding(3, 2).requires_grad_(False)
    first, second = nn.Sequential(shared, nn.Linear(2, 1)), nn.Sequential(shared, nn.Linear(2, 1))
    (prepared,) = backend.prepare([first], [SGD(first.parameters(), lr=0.1)], [])
    with pytest.raises(ValueError, match="is on the meta device"):
        backend.prepare([second, nn.Linear(1, 1, device="meta")], [], [])
    shared.requires_grad_(True)
    with pytest.raises(UnreducedGradientError, match=r"^0\.weight was frozen when prepare\(\) replicated"):
        take_step(prepared, prepared.model(torch.tensor([dist.get_rank()])).sum())


def test_replicas_are_compared_at_their_first_step_together() -> None:
    _, _, prepared = prepare_sgd(ddp(), layer())
    with prepared.trained_alone():
        take_step(prepared, prepared.model(torch.ones(1, 8)).sum() * (1 + dist.get_rank()))
    with pytest.raises(DriftedReplicasError, match="the replicas have drifted apart"):
        take_step(prepared, prepared.model(torch.ones(1, 8)).sum())


def test_replicas_are_alone_until_the_outermost_block_ends() -> None:
    _, model, prepared = prepare_sgd(ddp(), layer())
    with prepared.trained_alone():
        with prepared.trained_alone(), prepared.no_sync():
            pass
        take_step(prepared, prepared.model(torch.ones(1, 8)).sum() * dist.get_rank())
    assert torch.equal(model.weight, layer().weight) == (dist.get_rank() == 0)


def test_a_models_attribute_named_known_is_not_hidden_by_the_wrapper() -> None:
    model = layer()
    model.known = "the user's"
    (prepared,) = ddp().prepare([model], [], [])
    assert prepared.model.known == "the user's"


def test_a_wrapper_that_is_used_again_has_rank_0s_values() -> None:
    backend, model, prepared = prepare_sgd(ddp(), layer())
    wrapper = prepared.model
    backend.close()
    with torch.no_grad():
        model.weight.fill_(dist.get_rank() + 1.0)
    backend.prepare([wrapper], [SGD(model.parameters(), lr=0.1)], [])
    assert_same_on_all_ranks(model.weight.sum().item())
    assert model.weight[0, 0].item() == 1.0
