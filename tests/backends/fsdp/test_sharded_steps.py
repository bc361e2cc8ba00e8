import copy
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from drivetrain_backends import AccumulationError, Prepared, UnreducedGradientError, UnshardedParameterError
from plain_loop.backends import fsdp, plain_step, prepare_sgd, take_step, weights
from plain_loop.case import assert_equals_plain_loop
from plain_loop.stack import CASE, loss_of, scaled, stack, tokens

pytestmark = pytest.mark.ranks(2)
SGD_OF_ONE = partial(SGD, lr=1.0)


@pytest.mark.parametrize("when", ["before prepare", "gathered"])
def test_parameters_are_clipped_whenever_they_were_listed(when: str) -> None:
    plain = stack(0), stack(1)
    for rank in range(2):
        (sum(loss_of(model, rank) for model in plain) / 2).backward()
    norm = nn.utils.clip_grad_norm_([p for model in plain for p in model.parameters()], 0.01)
    SGD(plain[0].parameters(), lr=1.0).step()

    backend, models = fsdp(strategy="shard_grad_op"), (stack(0), stack(1))
    listed = [p for model in models for p in model.parameters()]
    first, second = backend.prepare(models, [SGD(model.parameters(), lr=1.0) for model in models], [])
    for prepared in (first, second):
        prepared.backward(loss_of(prepared.model, dist.get_rank()))
    if when == "gathered":
        for prepared in (first, second):
            loss_of(prepared.model, 0)  # leaves parameters gathered
        listed = [p for model in models for p in model.parameters()]
    assert first.clip(listed, norm=0.01).item() == pytest.approx(norm.item(), rel=1e-5)
    assert first.clip(listed, norm=1e9).item() == pytest.approx(0.01, rel=1e-3)
    for prepared in (first, second):
        prepared.optimizers[0].step()
    torch.testing.assert_close(weights(first), dict(plain[0].state_dict()))
    with pytest.raises(
        UnshardedParameterError, match=r"clip: a parameter of shape \(3,\) is none of those that prepare"
    ):
        first.clip([*listed, nn.Parameter(torch.ones(3))], norm=1.0)
    backend.close()


@pytest.mark.parametrize(
    "clip",
    [
        {"norm": 0.05},
        {"norm": 0.05, "norm_type": 1.0},
        {"norm": 0.01, "norm_type": float("inf")},
        {"value": 0.01},
    ],
    ids=str,
)
def test_sharded_and_plain_gradients_are_clipped_as_one(clip: dict[str, float]) -> None:
    case = replace(CASE, build=scaled, optimizer=SGD_OF_ONE, steps=2, clip=clip)
    assert_equals_plain_loop(case, fsdp(), rtol=1e-10, atol=1e-10)


def test_all_ranks_skip_the_step_of_an_overflow_in_one_shard() -> None:
    backend, _, prepared = prepare_sgd(fsdp("fp16"), stack())
    before = weights(prepared)
    for overflows in (True, False):
        output = prepared.model(tokens(0))
        # One row of one rank's shard overflows: the other rank has to learn of it.
        take_step(prepared, output.float()[0].sum() * (1e30 if overflows and dist.get_rank() else 1.0))
        assert prepared.optimizers[0].was_skipped is overflows
        assert all(torch.equal(before[n], value) for n, value in weights(prepared).items()) is overflows
    assert backend.scaler.value == 2.0**15


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(tokens(0))  # leaves parameters gathered where the strategy keeps them


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_an_evaluation_between_backward_and_step_changes_nothing(strategy: str) -> None:
    case = replace(CASE, clip={"norm": 0.1}, before_clip=evaluate)
    assert_equals_plain_loop(case, fsdp(strategy=strategy))


@pytest.mark.parametrize("mode", ["no", "bf16"])
def test_gathered_parameters_are_exact_and_rank_0s_writing_reaches_every_shard(mode: str) -> None:
    _, model, prepared = prepare_sgd(fsdp(mode), scaled().float())
    shards = list(model.parameters())
    with prepared.gathered():
        assert all(map(torch.equal, model.parameters(), scaled().float().parameters()))
    with prepared.gathered(write=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(dist.get_rank() + 1 / 3)
    assert all(p is q for p, q in zip(shards, model.parameters(), strict=True))
    for name, value in weights(prepared).items():
        assert name == "shift" or torch.equal(value, torch.full_like(value, 1 / 3))


def change_and_train(kind: str, model: nn.Module, prepared: Prepared) -> None:
    if kind == "re-assigned":
        model.blocks[1].linear.weight = nn.Parameter(torch.zeros(6, 6).double())
    elif kind == "assigned":
        prepared.model(tokens(0))
        model.head.extra = nn.Parameter(torch.zeros(2))
    elif kind == "created":
        model.extra = nn.Linear(2, 2)
        prepared.state_dict()
    elif kind == "in the optimizer":
        model.extra = nn.Linear(2, 2)
        prepared.optimizers[0].optimizer.add_param_group({"params": [model.extra.bias]})
    else:
        loss_of(prepared.model, 0).backward()
        prepared.optimizers[0].step()
    take_step(prepared, loss_of(prepared.model, 0))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("re-assigned", r"blocks\.1\.linear\.weight is assigned after prepare\(\)"),
        ("assigned", r"head\.extra is assigned after prepare\(\)"),
        ("created", r"extra\.weight was created after prepare\(\)"),
        (
            "in the optimizer",
            r"SGD: parameter 0 of group 1, of shape \(2,\), is none of those that prepare\(\)",
        ),
        (
            "loss.backward()",
            r"scale is no tensor that FSDP divides, and has a gradient of loss\.backward\(\)",
        ),
    ],
)
def test_what_would_silently_not_be_trained_is_named(kind: str, said: str) -> None:
    _, model, prepared = prepare_sgd(fsdp(), scaled())
    with pytest.raises((UnshardedParameterError, UnreducedGradientError), match=f"^{said}"):
        change_and_train(kind, model, prepared)


@pytest.mark.parametrize("mode", ["no", "bf16", "fp16"])
@pytest.mark.slow
def test_models_that_are_frozen_in_turns_from_the_first_step_train_in_turns(mode: str) -> None:
    backend, models = fsdp(mode), [stack(0), stack(1).requires_grad_(False)]
    g, d = backend.prepare(models, [SGD(model.parameters(), lr=0.1) for model in models], [])
    for step in range(4):
        trained, frozen = ((g, d), (d, g))[step % 2]
        frozen.unwrap().requires_grad_(False)
        trained.unwrap().requires_grad_(True)
        before = [weights(one)["head.weight"] for one in (trained, frozen)]
        chosen = g.model(tokens(step)).argmax(-1) if trained is d else tokens(step)
        loss = trained.model(chosen).float().square().mean() + 0 * frozen.model(chosen).float().mean()
        take_step(trained, loss)
        after = [weights(one)["head.weight"] for one in (trained, frozen)]
        assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [False, True]


@pytest.mark.parametrize("drop", [False, True])
def test_gradients_that_a_window_held_back_are_neither_lost_nor_taken_into_the_next(drop: bool) -> None:
    backend, _, prepared = prepare_sgd(fsdp(accumulation=2), stack())
    backend.window.begin()
    with prepared.no_sync():
        prepared.backward(prepared.model(tokens(0)).square().sum())
    backend.window.begin()
    if not drop:
        with pytest.raises(AccumulationError, match="the window closed without a backward of"):
            prepared.optimizers[0].step()
    backend.window.begin(is_last=True)
    prepared.optimizers[0].zero_grad()
    prepared.backward(loss_of(prepared.model, dist.get_rank()))
    prepared.optimizers[0].step()
    plain = stack()
    plain_step(SGD(plain.parameters(), lr=0.1), (loss_of(plain, 0) + loss_of(plain, 1)) / 2)
    torch.testing.assert_close(weights(prepared), dict(plain.state_dict()))


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_what_is_frozen_after_an_evaluation_is_frozen(strategy: str) -> None:
    _, model, prepared = prepare_sgd(fsdp(strategy=strategy), stack())
    evaluate(prepared.model)
    model.head.requires_grad_(False)
    before = weights(prepared)["head.weight"]
    take_step(prepared, loss_of(prepared.model, 0))
    assert torch.equal(before, weights(prepared)["head.weight"])


def test_a_model_that_was_evaluated_first_in_inference_mode_trains() -> None:
    def trained(inference: bool) -> dict[str, Tensor]:
        _, _, prepared = prepare_sgd(fsdp(), stack())
        for step in range(2):
            with torch.inference_mode(inference):
                prepared.model(tokens(0))
            take_step(prepared, loss_of(prepared.model, step))
        return weights(prepared)

    torch.testing.assert_close(trained(True), trained(False), rtol=0, atol=0)


def test_a_parameter_is_guarded_after_the_backend_was_closed_and_used_again() -> None:
    backend = fsdp()
    for _ in range(2):
        _, model, prepared = prepare_sgd(backend, stack())
        prepared.model(tokens(0))
        with pytest.raises(UnshardedParameterError, match=r"head\.weight is assigned after prepare\(\)"):
            model.head.weight = nn.Parameter(torch.zeros(5, 6))
        backend.close()


def test_a_sharded_model_is_not_copied_but_loaded_into_another() -> None:
    model = stack()
    (prepared,) = fsdp("bf16").prepare([model], [], [])
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"^Stack is sharded: FSDP casts and gathers") as caught:
            duplicate(model)
        assert "build a second model and, inside accelerator.gathered(model)" in str(caught.value)
    second = stack(1)
    with prepared.gathered():
        second.load_state_dict(model.state_dict())
    assert all(torch.equal(value, stack().state_dict()[n]) for n, value in second.state_dict().items())


def test_gradients_stay_local_until_the_outer_of_two_blocks_ends() -> None:
    backend, model, prepared = prepare_sgd(fsdp(accumulation=2), stack())
    backend.window.begin()
    with prepared.no_sync():
        with prepared.no_sync():
            pass
        prepared.backward(loss_of(prepared.model, 0))
        assert all(parameter.grad is None for parameter in model.parameters() if parameter.dim())


def test_what_rank_0_transposes_while_gathered_reaches_every_shard() -> None:
    _, model, prepared = prepare_sgd(fsdp(), stack())
    before = weights(prepared)["blocks.0.linear.weight"]
    with prepared.gathered(write=True):
        if dist.get_rank() == 0:
            weight = model.blocks[0].linear.weight
            weight.data = weight.data.t()
    assert torch.equal(weights(prepared)["blocks.0.linear.weight"], before.t())


def test_one_optimizer_over_two_models_steps_both_without_gathering() -> None:
    models = [stack(0), stack(1)]
    optimizer = SGD([parameter for model in models for parameter in model.parameters()], lr=0.1)
    backend = fsdp()
    prepared, _ = backend.prepare(models, [optimizer], [])
    held: list[bool] = []
    optimizer.register_step_pre_hook(
        lambda *_: held.extend(
            type(parameter).__torch_function__ is DTensor.__torch_function__
            for model in models
            for parameter in model.parameters()
        )
    )
    backend.backward(sum(loss_of(model, 0) for model in models))
    prepared.optimizers[0].step()
    assert held
    assert all(held)
