from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam

from drivetrain_backends import (
    AccumulationError,
    AccumulationWindow,
    DDPBackend,
    FSDPBackend,
    UnreducedGradientError,
    UnshardedParameterError,
)
from drivetrain_backends.states import whole
from drivetrain_precision import choose_policy
from sharded_stack import Stack, context, fsdp, stack, tokens


def weights(prepared: object) -> dict[str, Tensor]:
    return {name: whole(value).clone() for name, value in prepared.state_dict()["model"].items()}


def loss_of(model: nn.Module, rank: int) -> Tensor:
    return model(tokens(rank)).square().mean()


class Scaled(Stack):
    """A stack with a scalar parameter, which FSDP cannot divide, and one with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.ones(1, 5))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale * self.row


def scaled() -> Scaled:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Scaled().double()


def clipped(options: dict[str, float], mode: str) -> tuple[float | None, dict[str, Tensor]]:
    backend = fsdp(mode)
    model = scaled()
    (prepared,) = backend.prepare([model], [SGD(model.parameters(), lr=1.0)], [])
    for _ in range(2):
        backend.window.begin()
        prepared.backward(loss_of(prepared.model, dist.get_rank()))
        norm = prepared.clip(**options)
        prepared.optimizers[0].step()
        prepared.optimizers[0].zero_grad()
    found = weights(prepared)
    backend.close()
    return None if norm is None else norm.item(), found


def clipped_plainly(options: dict[str, float]) -> tuple[float | None, dict[str, Tensor]]:
    model = scaled()
    optimizer, norm = SGD(model.parameters(), lr=1.0), None
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack([loss_of(model, rank) for rank in range(2)]).mean().backward()
        if "value" in options:
            nn.utils.clip_grad_value_(model.parameters(), options["value"])
        else:
            norm = nn.utils.clip_grad_norm_(
                model.parameters(), options["norm"], norm_type=options.get("norm_type", 2.0)
            ).item()
        optimizer.step()
    return norm, model.state_dict()


@pytest.mark.parametrize(
    "options",
    [
        {"norm": 0.05},
        {"norm": 0.05, "norm_type": 1.0},
        {"norm": 0.01, "norm_type": float("inf")},
        {"value": 0.01},
    ],
    ids=str,
)
def test_sharded_and_plain_gradients_are_clipped_as_one(run_ranks, options: dict[str, float]) -> None:
    norm, expected = clipped_plainly(options)
    for found_norm, found in run_ranks(clipped, options, "no"):
        assert found_norm == (None if norm is None else pytest.approx(norm, rel=1e-10))
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)


def overflow_on_one_rank() -> tuple[list[bool], bool]:
    backend = fsdp("fp16")
    model = stack()
    (prepared,) = backend.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    skipped: list[bool] = []
    before = weights(prepared)
    for step in range(2):
        backend.window.begin()
        output = prepared.model(tokens(0))
        # One row of one rank's shard overflows: the other rank has to learn of it.
        prepared.backward(output.float()[0].sum() * (1e30 if step == 0 and dist.get_rank() == 1 else 1.0))
        prepared.optimizers[0].step()
        prepared.optimizers[0].zero_grad()
        skipped.append(prepared.optimizers[0].was_skipped)
        if step == 0:
            assert all(torch.equal(before[name], value) for name, value in weights(prepared).items())
    scale = backend.scaler.value
    backend.close()
    return skipped, scale == 2.0**15


def test_all_ranks_skip_the_step_of_an_overflow_in_one_shard(run_ranks) -> None:
    for skipped, halved in run_ranks(overflow_on_one_rank):
        assert skipped == [True, False]
        assert halved


def evaluated_before_the_step(strategy: str) -> dict[str, Tensor]:
    backend = fsdp(strategy=strategy)
    model = stack()
    (prepared,) = backend.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    for _ in range(3):
        backend.window.begin()
        prepared.backward(loss_of(prepared.model, dist.get_rank()))
        with torch.no_grad():
            prepared.model(tokens(0))  # leaves parameters gathered where the strategy keeps them
        prepared.clip(list(prepared.model.parameters()), norm=0.1)
        prepared.optimizers[0].step()
        prepared.optimizers[0].zero_grad()
    found = weights(prepared)
    backend.close()
    return found


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_an_evaluation_between_backward_and_step_changes_nothing(run_ranks, strategy: str) -> None:
    model = stack()
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.stack([loss_of(model, rank) for rank in range(2)]).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    for found in run_ranks(evaluated_before_the_step, strategy):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value)


def adam_with_a_past(*, later: bool) -> tuple[dict[str, Tensor], int]:
    backend = fsdp()
    model = scaled()
    optimizer = Adam(model.parameters(), lr=0.1)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
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
        optimizer.zero_grad()
        loss_of(model, 0).backward()
        optimizer.step()
    for found, rows in run_ranks(adam_with_a_past_later if later else adam_with_a_past_now):
        assert rows == 3
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)


def adam_with_a_past_now() -> tuple[dict[str, Tensor], int]:
    return adam_with_a_past(later=False)


def adam_with_a_past_later() -> tuple[dict[str, Tensor], int]:
    return adam_with_a_past(later=True)


def trained(backend: object, state: object = None) -> tuple[dict[str, Tensor], object]:
    model = stack(seed=0 if state is None else 9, tied=True)
    (prepared,) = backend.prepare([model], [Adam(model.parameters(), lr=0.05)], [])
    if state is not None:
        prepared.load_state_dict(state)
    for _ in range(2):
        backend.window.begin()
        prepared.backward(loss_of(prepared.model, 0))
        prepared.optimizers[0].step()
        prepared.optimizers[0].zero_grad()
    assert model.head.weight is model.embedding.weight
    found, kept = weights(prepared), made_whole(deepcopy(prepared.state_dict()))
    backend.close()
    return found, kept


def made_whole(value: object) -> object:
    if isinstance(value, dict):
        return {key: made_whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [made_whole(item) for item in value]
    return whole(value) if isinstance(value, Tensor) else value


def ddp() -> DDPBackend:
    where = context()
    return DDPBackend(where, choose_policy("no", where.device), window=AccumulationWindow())


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
def test_a_state_goes_on_in_another_backend_and_at_another_number_of_ranks(
    run_ranks, saved: str, resumed: str, num_processes: int
) -> None:
    state = run_ranks(save, saved)[0]
    model = stack(tied=True)
    optimizer = Adam(model.parameters(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        loss_of(model, 0).backward()
        optimizer.step()
    for found in run_ranks(resume, resumed, state, num_processes=num_processes):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value)


def gathered(mode: str) -> tuple[bool, bool, dict[str, Tensor]]:
    backend = fsdp(mode)
    model = scaled().float()
    (prepared,) = backend.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    shards = list(model.parameters())
    with prepared.gathered():
        same = all(
            torch.equal(p, q) for p, q in zip(model.parameters(), scaled().float().parameters(), strict=True)
        )
    with prepared.gathered(write=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(dist.get_rank() + 1 / 3)
    kept = all(p is q for p, q in zip(shards, model.parameters(), strict=True))
    found = weights(prepared)
    backend.close()
    return same, kept, found


@pytest.mark.parametrize("mode", ["no", "bf16"])
def test_gathered_parameters_are_exact_and_rank_0s_writing_reaches_every_shard(run_ranks, mode: str) -> None:
    for same, kept, found in run_ranks(gathered, mode):
        assert same
        assert kept
        for name, value in found.items():
            if name != "shift":
                assert torch.equal(value, torch.full_like(value, 1 / 3))


def change_after_prepare(kind: str) -> str:
    backend = fsdp()
    model = scaled()
    optimizer = SGD(model.parameters(), lr=0.1)
    (prepared,) = backend.prepare([model], [optimizer], [])
    try:
        if kind == "re-assigned":
            model.blocks[1].linear.weight = nn.Parameter(torch.zeros(6, 6).double())
            prepared.backward(loss_of(prepared.model, 0))
            prepared.optimizers[0].step()
        elif kind == "assigned":
            prepared.model(tokens(0))
            model.head.extra = nn.Parameter(torch.zeros(2))
        elif kind == "created":
            model.extra = nn.Linear(2, 2)
            prepared.state_dict()
        elif kind == "in the optimizer":
            model.extra = nn.Linear(2, 2)
            optimizer.add_param_group({"params": [model.extra.bias]})
            prepared.backward(loss_of(prepared.model, 0))
            prepared.optimizers[0].step()
        else:
            loss_of(prepared.model, 0).backward()
            prepared.optimizers[0].step()
    except (UnshardedParameterError, UnreducedGradientError) as error:
        return str(error)
    finally:
        backend.close()
    return "trained"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("re-assigned", "blocks.1.linear.weight is assigned after prepare()"),
        ("assigned", "head.extra is assigned after prepare()"),
        ("created", "extra.weight was created after prepare()"),
        (
            "in the optimizer",
            "SGD: parameter 0 of group 1, of shape (2,), is none of those that prepare() sharded",
        ),
        ("loss.backward()", "scale is no tensor that FSDP divides, and has a gradient of loss.backward()"),
    ],
)
def test_what_would_silently_not_be_trained_is_named(run_ranks, kind: str, said: str) -> None:
    for message in run_ranks(change_after_prepare, kind):
        assert message.startswith(said)


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


def gan_that_is_frozen_first(mode: str) -> list[bool]:
    backend: FSDPBackend = fsdp(mode)
    generator, discriminator = stack(0), stack(1)
    optimizers = [SGD(generator.parameters(), lr=0.1), SGD(discriminator.parameters(), lr=0.1)]
    discriminator.requires_grad_(False)
    g, d = backend.prepare([generator, discriminator], optimizers, [])
    moved: list[bool] = []
    for step in range(4):
        trained, frozen = ((g, d), (d, g))[step % 2]
        frozen.unwrap().requires_grad_(False)
        trained.unwrap().requires_grad_(True)
        before = weights(trained), weights(frozen)
        backend.window.begin()
        chosen = g.model(tokens(step)).argmax(-1) if trained is d else tokens(step)
        trained.backward(
            trained.model(chosen).float().square().mean() + 0 * frozen.model(chosen).float().mean()
        )
        trained.optimizers[0].step()
        trained.optimizers[0].zero_grad()
        after = weights(trained), weights(frozen)
        moved += [
            not torch.equal(a["head.weight"], b["head.weight"]) for a, b in zip(before, after, strict=True)
        ]
    backend.close()
    return moved


@pytest.mark.parametrize("mode", ["no", "bf16", "fp16"])
def test_models_that_are_frozen_in_turns_from_the_first_step_train_in_turns(run_ranks, mode: str) -> None:
    for moved in run_ranks(gan_that_is_frozen_first, mode):
        assert moved == [True, False] * 4


def window_that_closes_without_a_backward(drop: bool) -> tuple[str, dict[str, Tensor]]:
    backend = fsdp(accumulation=2)
    model = stack()
    (prepared,) = backend.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    backend.window.begin()
    with prepared.no_sync():
        prepared.backward(prepared.model(tokens(0)).square().sum())
    backend.window.begin()
    said = ""
    if not drop:
        try:
            prepared.optimizers[0].step()
        except AccumulationError as error:
            said = str(error)
    backend.window.begin(is_last=True)
    prepared.optimizers[0].zero_grad()
    prepared.backward(loss_of(prepared.model, dist.get_rank()))
    prepared.optimizers[0].step()
    found = weights(prepared)
    backend.close()
    return said, found


@pytest.mark.parametrize("drop", [False, True])
def test_gradients_that_a_window_held_back_are_neither_lost_nor_taken_into_the_next(
    run_ranks, drop: bool
) -> None:
    model = stack()
    optimizer = SGD(model.parameters(), lr=0.1)
    torch.stack([loss_of(model, rank) for rank in range(2)]).mean().backward()
    optimizer.step()
    for said, found in run_ranks(window_that_closes_without_a_backward, drop):
        assert said.startswith("" if drop else "the window closed without a backward of")
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value)


def frozen_after_an_evaluation(strategy: str) -> bool:
    backend = fsdp(strategy=strategy)
    model = stack()
    (prepared,) = backend.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    with torch.no_grad():
        prepared.model(tokens(0))
    model.head.requires_grad_(False)
    before = weights(prepared)["head.weight"]
    prepared.backward(loss_of(prepared.model, 0))
    prepared.optimizers[0].step()
    after = weights(prepared)
    backend.close()
    return torch.equal(before, after["head.weight"])


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_what_is_frozen_after_an_evaluation_is_frozen(run_ranks, strategy: str) -> None:
    assert run_ranks(frozen_after_an_evaluation, strategy) == [True, True]
