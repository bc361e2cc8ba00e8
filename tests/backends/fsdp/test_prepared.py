import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from backends.replicas import plain_step, prepare_sgd, step_and_clear
from drivetrain_backends import (
    AccumulationError,
    FSDPBackend,
    UnreducedGradientError,
    UnshardedParameterError,
)
from sharded_stack import fsdp, loss_of, scaled, stack, tokens, weights


def clipped(options: dict[str, float], mode: str) -> tuple[float | None, dict[str, Tensor]]:
    backend, _model, prepared = prepare_sgd(fsdp(mode), scaled(), lr=1.0)
    for _ in range(2):
        backend.window.begin()
        prepared.backward(loss_of(prepared.model, dist.get_rank()))
        norm = prepared.clip(**options)
        step_and_clear(prepared)
    found = weights(prepared)
    backend.close()
    return None if norm is None else norm.item(), found


def clipped_as_listed(when: str) -> tuple[float, float, dict[str, Tensor], str]:
    """Norms, before and after clipping to 0.01, of two models' parameters that were listed at another time."""
    backend = fsdp(strategy="shard_grad_op")
    models = stack(0), stack(1)
    listed = [p for model in models for p in model.parameters()]
    optimizers = [SGD(model.parameters(), lr=1.0) for model in models]
    first, second = backend.prepare(models, optimizers, [])
    backend.window.begin()
    for prepared in (first, second):
        prepared.backward(loss_of(prepared.model, dist.get_rank()))
    if when == "gathered":
        for prepared in (first, second):
            loss_of(prepared.model, 0)  # leaves parameters gathered
        listed = [p for model in models for p in model.parameters()]
    norms = [first.clip(listed, norm=0.01), first.clip(listed, norm=1e9)]
    for prepared in (first, second):
        prepared.optimizers[0].step()
    found = weights(first)
    try:
        said = str(first.clip([*listed, nn.Parameter(torch.ones(3))], norm=1.0))
    except UnshardedParameterError as error:
        said = str(error)
    backend.close()
    return norms[0].item(), norms[1].item(), found, said


@pytest.mark.parametrize("when", ["before prepare", "gathered"])
def test_parameters_are_clipped_whenever_they_were_listed(run_ranks, when: str) -> None:
    models = stack(0), stack(1)
    for rank in range(2):
        (sum(loss_of(model, rank) for model in models) / 2).backward()
    norm = nn.utils.clip_grad_norm_([p for model in models for p in model.parameters()], 0.01)
    SGD(models[0].parameters(), lr=1.0).step()
    for before, after, found, said in run_ranks(clipped_as_listed, when):
        assert before == pytest.approx(norm.item(), rel=1e-5)
        assert after == pytest.approx(0.01, rel=1e-3)
        torch.testing.assert_close(found, dict(models[0].state_dict()))
        assert "clip: a parameter of shape (3,) is none of those that prepare() sharded" in said


def clipped_plainly(options: dict[str, float]) -> tuple[float | None, dict[str, Tensor]]:
    model = scaled()
    optimizer, norm = SGD(model.parameters(), lr=1.0), None
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack([loss_of(model, rank) for rank in range(2)]).mean().backward()
        if "value" in options:
            nn.utils.clip_grad_value_(model.parameters(), options["value"])
        else:
            filled = [p for p in model.parameters() if p.numel()]  # torch's has no largest element of nothing
            norm = nn.utils.clip_grad_norm_(
                filled, options["norm"], norm_type=options.get("norm_type", 2.0)
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
        torch.testing.assert_close(found, dict(expected), rtol=1e-10, atol=1e-10)


def overflow_on_one_rank() -> tuple[list[bool], bool]:
    backend, _model, prepared = prepare_sgd(fsdp("fp16"), stack())
    skipped: list[bool] = []
    before = weights(prepared)
    for step in range(2):
        backend.window.begin()
        output = prepared.model(tokens(0))
        # One row of one rank's shard overflows: the other rank has to learn of it.
        prepared.backward(output.float()[0].sum() * (1e30 if step == 0 and dist.get_rank() == 1 else 1.0))
        step_and_clear(prepared)
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
    backend, _model, prepared = prepare_sgd(fsdp(strategy=strategy), stack())
    for _ in range(3):
        backend.window.begin()
        prepared.backward(loss_of(prepared.model, dist.get_rank()))
        with torch.no_grad():
            prepared.model(tokens(0))  # leaves parameters gathered where the strategy keeps them
        prepared.clip(list(prepared.model.parameters()), norm=0.1)
        step_and_clear(prepared)
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
        torch.testing.assert_close(found, dict(model.state_dict()))


def gathered(mode: str) -> tuple[bool, bool, dict[str, Tensor]]:
    backend, model, prepared = prepare_sgd(fsdp(mode), scaled().float())
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
    backend, model, prepared = prepare_sgd(fsdp(), scaled())
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
            prepared.optimizers[0].optimizer.add_param_group({"params": [model.extra.bias]})
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
        step_and_clear(trained)
        after = weights(trained), weights(frozen)
        moved += [
            not torch.equal(a["head.weight"], b["head.weight"]) for a, b in zip(before, after, strict=True)
        ]
    backend.close()
    return moved


@pytest.mark.parametrize("mode", ["no", "bf16", "fp16"])
@pytest.mark.slow
def test_models_that_are_frozen_in_turns_from_the_first_step_train_in_turns(run_ranks, mode: str) -> None:
    for moved in run_ranks(gan_that_is_frozen_first, mode):
        assert moved == [True, False] * 4


def window_that_closes_without_a_backward(drop: bool) -> dict[str, Tensor]:
    backend, _model, prepared = prepare_sgd(fsdp(accumulation=2), stack())
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
    found = weights(prepared)
    backend.close()
    return found


@pytest.mark.parametrize("drop", [False, True])
def test_gradients_that_a_window_held_back_are_neither_lost_nor_taken_into_the_next(
    run_ranks, drop: bool
) -> None:
    model = stack()
    plain_step(SGD(model.parameters(), lr=0.1), (loss_of(model, 0) + loss_of(model, 1)) / 2)
    for found in run_ranks(window_that_closes_without_a_backward, drop):
        torch.testing.assert_close(found, dict(model.state_dict()))


def frozen_after_an_evaluation(strategy: str) -> bool:
    backend, model, prepared = prepare_sgd(fsdp(strategy=strategy), stack())
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


def trained_after_an_evaluation(inference: bool) -> dict[str, Tensor]:
    backend, _model, prepared = prepare_sgd(fsdp(), stack())
    with torch.inference_mode(inference):
        prepared.model(tokens(0))
    for step in range(2):
        backend.window.begin()
        prepared.backward(loss_of(prepared.model, step))
        step_and_clear(prepared)
        with torch.inference_mode(inference):
            prepared.model(tokens(0))
    found = weights(prepared)
    backend.close()
    return found


def test_a_model_that_was_evaluated_first_in_inference_mode_trains(run_ranks) -> None:
    for found, expected in zip(
        run_ranks(trained_after_an_evaluation, True),
        run_ranks(trained_after_an_evaluation, False),
        strict=True,
    ):
        for name, value in expected.items():
            assert torch.equal(found[name], value)


def assign_in_a_second_run() -> None:
    backend = fsdp()
    for _ in range(2):
        _backend, model, prepared = prepare_sgd(backend, stack())
        prepared.model(tokens(0))
        with pytest.raises(UnshardedParameterError, match=r"head\.weight is assigned after prepare\(\)"):
            model.head.weight = nn.Parameter(torch.zeros(5, 6))
        backend.close()


def test_a_parameter_is_guarded_after_the_backend_was_closed_and_used_again(run_ranks) -> None:
    run_ranks(assign_in_a_second_run)


def copy_a_sharded_model() -> tuple[list[str], bool]:
    backend = fsdp("bf16")
    model = stack()
    (prepared,) = backend.prepare([model], [], [])
    said: list[str] = []
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError) as caught:
            duplicate(model)
        said.append(str(caught.value))
    second = stack(1)
    with prepared.gathered():
        second.load_state_dict(model.state_dict())
    same = all(torch.equal(value, stack().state_dict()[name]) for name, value in second.state_dict().items())
    backend.close()
    return said, same


def test_a_sharded_model_is_not_copied_but_loaded_into_another(run_ranks) -> None:
    for said, same in run_ranks(copy_a_sharded_model):
        assert all(one.startswith("Stack is sharded: FSDP casts and gathers") for one in said)
        assert all("build a second model and, inside accelerator.gathered(model)" in one for one in said)
        assert same
