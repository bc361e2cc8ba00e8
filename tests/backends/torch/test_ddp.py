"""What DDP alone brings: hooks that compress gradients, ranks that run out of batches."""

from contextlib import nullcontext
from dataclasses import fields

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from backends.replicas import ddp_backend, plain_step, prepare_sgd, step_and_clear
from drivetrain_backends import DDPBackend, DDPSettings, UnreducedGradientError


def ddp(**settings: object) -> tuple[DDPBackend, nn.Linear, SGD]:
    backend = ddp_backend(**settings)
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    return backend, model, SGD(model.parameters(), lr=0.1)


def test_a_model_without_trainable_parameters_is_only_moved(run_ranks) -> None:
    assert run_ranks(kind_of_a_frozen_model) == ["Linear", "Linear"]


def kind_of_a_frozen_model() -> str:
    backend, model, _ = ddp()
    (prepared,) = backend.prepare([model.requires_grad_(False)], [], [])
    return type(prepared.model).__name__


def step_after_unfreezing(frozen: str) -> str:
    backend, model, _ = ddp()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    optimizer = SGD(model.parameters(), lr=0.1)
    (prepared,) = backend.prepare([model], [optimizer], [])
    model.requires_grad_(True)
    before = model.weight.detach().clone()
    prepared.backward(prepared.model(torch.full((2, 8), float(dist.get_rank() + 1))).square().mean())
    try:
        prepared.optimizers[0].step()
    except UnreducedGradientError as error:
        assert torch.equal(model.weight, before)
        return str(error)
    finally:
        backend.close()
    return "stepped"


@pytest.mark.parametrize("frozen", ["weight", "weight and bias"])
def test_a_parameter_unfrozen_after_prepare_is_refused_by_name(run_ranks, frozen: str) -> None:
    for said in run_ranks(step_after_unfreezing, frozen):
        assert said.startswith(
            "weight was frozen when prepare() replicated its model, and has a gradient now"
        )


def train_between_releases(keep_wrapper: bool) -> torch.Tensor:
    backend, model, optimizer = ddp()
    model.bias.requires_grad_(False)
    given: nn.Module = model
    for place in range(2):
        (prepared,) = backend.prepare([given], [optimizer], [])
        assert not keep_wrapper or place == 0 or prepared.model is given
        prepared.backward(prepared.model(torch.full((2, 8), 1.0 + dist.get_rank())).square().mean())
        prepared.optimizers[0].step()
        optimizer.zero_grad()
        backend.close()
        given = prepared.model if keep_wrapper else model
    (prepared,) = backend.prepare([given], [optimizer], [])
    model.bias.requires_grad_(True)
    prepared.backward(prepared.model(torch.ones(2, 8)).sum())
    with pytest.raises(UnreducedGradientError, match="bias was frozen when"):
        prepared.optimizers[0].step()
    backend.close()
    return model.weight.detach()


def wrapper_of_another_backend() -> None:
    first, model, _ = ddp()
    (prepared,) = first.prepare([model], [], [])
    with pytest.raises(ValueError, match="Linear is prepared already"):
        first.prepare([prepared.model], [], [])
    first.close()
    second, _, _ = ddp(find_unused_parameters=True)
    with pytest.raises(ValueError, match="Linear is prepared already"):
        second.prepare([prepared.model], [], [])
    second.close()


def test_a_wrapper_that_was_released_is_used_again_by_its_own_backend(run_ranks) -> None:
    again = [run_ranks(train_between_releases, keep) for keep in (True, False)]
    assert torch.equal(again[0][0], again[0][1])
    assert torch.equal(again[0][0], again[1][0])
    run_ranks(wrapper_of_another_backend)


def every_setting() -> list[tuple[str, object, object]]:
    asked = {
        "find_unused_parameters": True,
        "gradient_as_bucket_view": False,
        "bucket_size_mb": 3.0,
        "broadcast_buffers": False,
        "sync_batch_norm": True,
        "communication_hook": "power_sgd",
        "power_sgd_rank": 2,
        "power_sgd_start_step": 7,
    }
    backend, model, optimizer = ddp(**asked)
    backend.prepare([model], [optimizer], [])
    found = dict(backend.applied())
    backend.close()
    backend, model, optimizer = ddp(static_graph=True)
    backend.prepare([model], [optimizer], [])
    found["static_graph"] = backend.applied()["static_graph"]
    backend.close()
    backend, model, optimizer = ddp(reduce="at_close", check_drift_every=5)
    backend.prepare([model], [optimizer], [])
    found |= {name: backend.applied()[name] for name in ("reduce", "check_drift_every")}
    backend.close()
    asked |= {"static_graph": True, "reduce": "at_close", "check_drift_every": 5}
    return [(name, value, found.get(name)) for name, value in asked.items()]


def test_every_setting_reads_back_as_it_was_asked_for(run_ranks) -> None:
    for rows in run_ranks(every_setting):
        assert {name for name, *_ in rows} == {field.name for field in fields(DDPSettings)}
        for name, asked, applied in rows:
            assert asked == applied, name


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


def takes_left(rank: int, number: int) -> bool:
    return (rank + number) % 3 == 0


def trained_branches(settings: dict[str, object], by_rank: bool) -> dict[str, torch.Tensor]:
    backend, model, prepared = prepare_sgd(ddp_backend(accumulation=2, **settings), branches())
    for number in range(8):
        backend.window.begin()
        left = takes_left(dist.get_rank(), number) if by_rank else True
        with nullcontext() if backend.window.closing else prepared.no_sync():
            x = torch.full((2, 4), 1.0 + dist.get_rank() + number)
            prepared.backward(prepared.model(x, left=left).sum(), count=2)
        step_and_clear(prepared)
    backend.close()
    return {name: value.clone() for name, value in model.state_dict().items()}


def plainly_trained_branches(by_rank: bool) -> dict[str, torch.Tensor]:
    model = branches()
    optimizer = SGD(model.parameters(), lr=0.1)
    for window in range(4):
        optimizer.zero_grad()
        for number in (2 * window, 2 * window + 1):
            for rank in range(2):
                left = takes_left(rank, number) if by_rank else True
                (model(torch.full((2, 4), 1.0 + rank + number), left=left).sum() / 8).backward()
        optimizer.step()
    return dict(model.state_dict())


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
def test_layers_that_ranks_leave_out_train_as_in_a_plain_loop(run_ranks, settings, by_rank: bool) -> None:
    first, second = run_ranks(trained_branches, settings, by_rank)
    for name, value in plainly_trained_branches(by_rank).items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], value)
    assert torch.equal(first["unused.weight"], branches().unused.weight)


def trained_with_windows(hook: str) -> torch.Tensor:
    backend, model, optimizer = ddp(accumulation=3, communication_hook=hook, power_sgd_start_step=2)
    (prepared,) = backend.prepare([model], [optimizer], [])
    generator = torch.Generator().manual_seed(dist.get_rank())
    for number in range(11):
        backend.window.begin(is_last=number == 10)
        with nullcontext() if backend.window.closing else prepared.no_sync():
            loss = prepared.model(torch.randn(4 + number % 3, 8, generator=generator)).square().sum()
            prepared.backward(loss, count=4 + number % 3)
        prepared.clip(norm=1.0)
        step_and_clear(prepared)
    backend.close()
    return model.weight.detach().clone()


@pytest.mark.parametrize(("hook", "tolerance"), [("fp16", 1e-3), ("bf16", 1e-2), ("power_sgd", 1e-1)])
def test_hooks_compress_counted_and_accumulated_gradients(run_ranks, hook: str, tolerance: float) -> None:
    whole, other = run_ranks(trained_with_windows, "none")
    compressed, on_other_rank = run_ranks(trained_with_windows, hook)
    assert torch.equal(whole, other)
    assert torch.equal(compressed, on_other_rank)
    assert 0 < (compressed - whole).abs().max() < tolerance


def generator_step_through_a_frozen_replica() -> tuple[torch.Tensor, torch.Tensor, bool]:
    backend = ddp_backend()
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    g, c = backend.prepare(
        [generator, critic], [SGD(generator.parameters(), lr=0.1), SGD(critic.parameters(), lr=0.1)], []
    )
    x = torch.full((1, 2), 1.0 + dist.get_rank())
    critic.requires_grad_(False)
    for _ in range(2):  # the second forward comes with no backward of the critic in between
        g.backward(c.model(g.model(x)).sum())
        step_and_clear(g)
    untouched = all(parameter.grad is None for parameter in critic.parameters())
    critic.requires_grad_(True)
    c.backward(c.model(g.model(x).detach()).square().sum())
    c.optimizers[0].step()
    backend.close()
    return generator.weight.detach().clone(), critic.weight.detach().clone(), untouched


def test_a_replica_that_is_frozen_for_a_while_is_passed_through(run_ranks) -> None:
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    inputs = [torch.full((1, 2), 1.0), torch.full((1, 2), 2.0)]
    optimizers = [SGD(generator.parameters(), lr=0.1), SGD(critic.parameters(), lr=0.1)]
    for _ in range(2):
        plain_step(optimizers[0], torch.stack([critic(generator(x)).sum() for x in inputs]).mean())
    optimizers[1].zero_grad()
    torch.stack([critic(generator(x).detach()).square().sum() for x in inputs]).mean().backward()
    optimizers[1].step()
    for generator_weight, critic_weight, untouched in run_ranks(generator_step_through_a_frozen_replica):
        assert untouched
        torch.testing.assert_close(generator_weight, generator.weight)
        torch.testing.assert_close(critic_weight, critic.weight)


def step_without_a_gradient(kind: str) -> str:
    model = nn.ModuleDict({"used": nn.Linear(8, 8), kind: nn.Linear(8, 8)})
    model.forward = lambda x: model["used"](x if kind == "unused" else model[kind](x))
    backend, _model, prepared = prepare_sgd(ddp_backend(), model)
    model[kind].requires_grad_(kind == "unused")
    prepared.backward(prepared.model(torch.ones(2, 8)).sum())
    with pytest.raises(UnreducedGradientError) as caught:  # at the second forward or backward
        prepared.backward(prepared.model(torch.ones(2, 8)).sum())
    backend.close()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["unused", "frozen_later"])
def test_parameters_without_a_gradient_are_named_with_the_flag_that_allows_them(run_ranks, kind: str) -> None:
    for said in run_ranks(step_without_a_gradient, kind):
        assert f"gave no gradient to {kind}.weight, {kind}.bias, and ranks wait" in said
        assert "--ddp-find-unused-parameters" in said
