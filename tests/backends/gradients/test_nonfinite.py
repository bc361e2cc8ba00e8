"""What becomes of a step whose gradients hold an infinity or NaN: taken, skipped on all ranks, or an error."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from drivetrain_backends import AccumulationWindow, NonFiniteGradientError
from drivetrain_backends.gradients.nonfinite import describe_weights, holds_nonfinite, nonfinite_error
from drivetrain_precision import PrecisionSettings, SkippedStepsError
from plain_loop.backends import backend_of, context, held, prepare_sgd, step_and_clear, weights
from plain_loop.backends import single as backend
from plain_loop.case import assert_same_on_all_ranks

NAN, INFINITY = float("nan"), float("inf")


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def poison(model: nn.Sequential, value: float) -> torch.Tensor:
    """A loss that is finite, with a gradient of `value` for the second layer's weight alone."""
    weight = model[1].weight
    weight.register_hook(lambda gradient: torch.full_like(gradient, value))
    return model(torch.ones(1, 2, dtype=weight.dtype)).sum()


@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY])
def test_a_step_on_gradients_that_are_not_finite_is_an_error_that_names_the_parameter(value: float) -> None:
    _single, model, prepared = prepare_sgd(backend(on_nonfinite="raise"), two_layers())
    prepared.backward(model(torch.ones(1, 2)).sum())
    step_and_clear(prepared)
    before = model[1].weight.detach().clone()
    prepared.backward(poison(model, value))
    with pytest.raises(
        NonFiniteGradientError, match=r"of 1\.weight holds an infinity or NaN at optimizer step 2\."
    ):
        prepared.optimizers[0].step()
    assert torch.equal(model[1].weight, before)


def test_what_is_not_asked_for_is_not_looked_for() -> None:
    _single, model, prepared = prepare_sgd(backend(), two_layers())
    prepared.backward(poison(model, NAN))
    prepared.optimizers[0].step()
    assert model[1].weight.isnan().all()
    assert not prepared.optimizers[0].was_skipped


def test_a_skipped_step_moves_neither_weights_nor_schedule_and_the_next_one_does() -> None:
    model, single = two_layers(), backend(on_nonfinite="skip")
    own = SGD(model.parameters(), lr=0.1)
    (prepared,) = single.prepare([model], [own], [StepLR(own, 1, gamma=0.5)])
    (optimizer,), (scheduler,) = prepared.optimizers, prepared.schedulers
    before = model[1].weight.detach().clone()
    for loss in (model(torch.ones(1, 2)).sum() * NAN, model(torch.ones(1, 2)).sum()):
        prepared.backward(loss)
        optimizer.step()
        scheduler.step()
        if loss.isnan():
            assert optimizer.was_skipped
            assert (optimizer.num_steps, own.param_groups[0]["lr"]) == (0, 0.1)
            assert torch.equal(model[1].weight, before)
        optimizer.zero_grad()
    assert (optimizer.was_skipped, optimizer.num_steps, own.param_groups[0]["lr"]) == (False, 1, 0.05)
    assert not torch.equal(model[1].weight, before)
    assert model[1].weight.isfinite().all()


@pytest.mark.parametrize("clipped", [{"norm": 1.0}, {"norm": 1.0, "norm_type": INFINITY}, {"value": 1.0}])
@pytest.mark.parametrize("part", [slice(None), slice(0, 1)])  # of the parameters: all, or one that is finite
def test_clipping_neither_hides_an_infinity_nor_spreads_it(clipped: dict[str, float], part: slice) -> None:
    _single, model, prepared = prepare_sgd(backend(on_nonfinite="skip"), two_layers())
    prepared.backward(poison(model, INFINITY))
    prepared.clip(list(model.parameters())[part], **clipped)
    prepared.optimizers[0].step()
    assert prepared.optimizers[0].was_skipped
    assert model[0].weight.grad.isfinite().all()


@pytest.mark.parametrize("clipped", [{"norm": 1.0}, {"value": 1.0}])
def test_clipping_tells_of_the_first_bad_parameter_before_all_are(clipped: dict[str, float]) -> None:
    _single, model, prepared = prepare_sgd(backend(on_nonfinite="raise"), two_layers())
    prepared.backward(poison(model, NAN))
    with pytest.raises(NonFiniteGradientError, match=r"of 1\.weight .* at optimizer step 1\."):
        prepared.clip(**clipped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_gradients_whose_norm_overflows_are_no_error(dtype: torch.dtype) -> None:
    _single, model, prepared = prepare_sgd(backend(on_nonfinite="raise"), two_layers().to(dtype))
    prepared.backward(poison(model, torch.finfo(dtype).max / 2))
    prepared.clip(norm=1.0)
    prepared.optimizers[0].step()
    assert prepared.optimizers[0].num_steps == 1


@pytest.mark.parametrize("counted", [False, True])
def test_one_bad_micro_batch_leaves_its_window_out_and_no_other(counted: bool) -> None:
    single, model, prepared = prepare_sgd(backend(accumulation=2, on_nonfinite="skip"), two_layers())
    (optimizer,) = prepared.optimizers
    skipped = []
    for factor in (1.0, 1.0, INFINITY, 1.0, 1.0, 1.0):
        single.window.begin()
        prepared.backward(model(torch.ones(3, 2)).sum() * factor, count=3 if counted else None)
        optimizer.step()
        if single.window.closing:
            skipped.append(optimizer.was_skipped)
        optimizer.zero_grad()
    assert skipped == [False, True, False]
    assert optimizer.num_steps == 2
    assert model[0].weight.isfinite().all()


def test_both_optimizers_of_a_model_leave_the_step_out() -> None:
    model, single = two_layers(), backend(on_nonfinite="skip")
    optimizers = [SGD(model[0].parameters(), lr=0.1), SGD(model[1].parameters(), lr=0.1)]
    (prepared,) = single.prepare([model], optimizers, [])
    prepared.backward(poison(model, NAN))
    for optimizer in reversed(prepared.optimizers):
        optimizer.step()
        optimizer.zero_grad()
    assert [optimizer.was_skipped for optimizer in prepared.optimizers] == [True, True]
    assert model[0].weight.grad is None


def test_gradients_of_a_plain_backward_are_looked_at_at_every_step() -> None:
    _single, model, prepared = prepare_sgd(backend(on_nonfinite="skip"), two_layers())
    skipped = []
    for factor in (1.0, NAN, NAN, 1.0):
        model.zero_grad()
        (model(torch.ones(1, 2)).sum() * factor).backward()
        prepared.optimizers[0].step()
        skipped.append(prepared.optimizers[0].was_skipped)
    assert skipped == [False, True, True, False]


@pytest.mark.parametrize("what", ["skip", "raise"])
def test_fp16_lowers_its_scale_before_an_overflow_is_an_error(what: str) -> None:
    single, model, prepared = prepare_sgd(
        backend("fp16", precision=PrecisionSettings(initial_scale=4.0), on_nonfinite=what),
        two_layers(),
    )
    for scale in (4.0, 2.0, 1.0):
        prepared.backward(model(torch.ones(1, 2)).float().sum() * INFINITY)
        assert single.scaler.value == scale
        error = NonFiniteGradientError if what == "raise" else SkippedStepsError
        refused = pytest.raises(
            error, match=r"The first value that (was|is) not finite is .* or from the loss"
        )
        with refused if scale == 1.0 else nullcontext():
            prepared.optimizers[0].step()
            assert prepared.optimizers[0].was_skipped
        prepared.optimizers[0].zero_grad()


def test_models_clipped_by_one_norm_leave_the_step_out_together_in_fp16() -> None:
    models, single = [two_layers(), two_layers()], backend("fp16")
    first, second = single.prepare(models, [SGD(model.parameters(), lr=0.1) for model in models], [])
    first.backward(models[0](torch.ones(1, 2)).float().sum() * INFINITY)
    second.backward(models[1](torch.ones(1, 2)).float().sum())
    first.clip([*models[0].parameters(), *models[1].parameters()], norm=1.0)
    second.optimizers[0].step()
    assert second.optimizers[0].was_skipped
    assert models[1][0].weight.isfinite().all()


def test_another_word_than_the_three_is_refused() -> None:
    with pytest.raises(ValueError, match="on_nonfinite='stop': must be one of warn, skip, raise"):
        AccumulationWindow(on_nonfinite="stop")


def train_with_a_bad_loss_on_rank_1(
    kind: str, what: str, clip: bool, counted: bool
) -> tuple[Any, list[bool]]:
    """Train three windows, in the second of which rank 1 has a loss that is NaN; return what was skipped."""
    backend, _, prepared = prepare_sgd(backend_of(kind, accumulation=2, on_nonfinite=what), two_layers())
    skipped = []
    for micro_batch in range(6):
        backend.window.begin()
        bad = micro_batch == 2 and dist.get_rank() == 1
        x = torch.full((2, 2), NAN if bad else 1.0 + dist.get_rank())
        with held(backend, [prepared]):
            prepared.backward(prepared.model(x).sum(), count=2 if counted else None)
        if clip:
            prepared.clip(norm=1.0)
        prepared.optimizers[0].step()
        if backend.window.closing:
            skipped.append(prepared.optimizers[0].was_skipped)
        prepared.optimizers[0].zero_grad()
    return prepared, skipped


@pytest.mark.ranks(2)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(("kind", "counted"), [("ddp", False), ("ddp", True), ("fsdp", False)])
def test_a_bad_loss_of_one_rank_skips_the_step_on_all(kind: str, clip: bool, counted: bool) -> None:
    prepared, skipped = train_with_a_bad_loss_on_rank_1(kind, "skip", clip, counted)
    assert (skipped, prepared.optimizers[0].num_steps) == ([False, True, False], 2)
    weight = weights(prepared)["0.weight"]
    assert weight.isfinite().all()
    assert_same_on_all_ranks(weight)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_bad_loss_of_one_rank_is_an_error_on_all_that_names_the_rank(kind: str, clip: bool) -> None:
    said = (
        r"^the gradients of 2 of 4 parameters \(from 0\.weight to 1\.weight\) hold an infinity or NaN "
        "at optimizer step 2; a loss of rank 1 was not finite"
    )
    with pytest.raises(NonFiniteGradientError, match=said):
        train_with_a_bad_loss_on_rank_1(kind, "raise", clip, False)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_the_largest_of_sharded_gradients_keeps_a_nan_of_one_rank(bad_rank: int) -> None:
    _, _, prepared = prepare_sgd(backend_of("fsdp"), nn.Linear(2, 2))
    factors = torch.ones(2)  # each rank holds a row of the weight, and with it the gradient of an output
    factors[bad_rank] = NAN
    prepared.backward((prepared.model(torch.ones(1, 2)) * factors).sum())
    assert prepared.clip(norm=1.0, norm_type=INFINITY).isnan()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bad_rank", [None, 1])
def test_ranks_agree_on_gradients_of_which_each_holds_a_part(bad_rank: int | None) -> None:
    """Gradients of which each rank holds a half, as sharded backends have them."""
    where, part = context(), torch.ones(2)
    if dist.get_rank() == bad_rank:
        part[1] = NAN
    half = DTensor.from_local(part, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    gradients = {"whole": torch.ones(3), "none": None, "half": half}
    assert holds_nonfinite(where, [torch.ones(3), half]) is (bad_rank is not None)
    if bad_rank is not None:
        said = str(nonfinite_error(where, gradients, step=7))
        assert said.startswith("the gradient of half holds an infinity or NaN on rank 1 at optimizer step 7")
        gradients["last"] = torch.full((1,), INFINITY)
        said = str(nonfinite_error(where, gradients, step=7))
        assert said.startswith(
            "the gradients of 2 of 4 parameters (from half to last) hold an infinity or NaN at"
        )


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ([], "The weights are finite still"),
        (["0.bias"], "An infinity or NaN is in 1 of 4 parameters (0.bias) already"),
        (
            ["0.bias", "1.weight"],
            "An infinity or NaN is in 2 of 4 parameters (from 0.bias to 1.weight) already",
        ),
    ],
)
def test_the_weights_that_are_not_finite_are_counted(bad: list[str], said: str) -> None:
    model = two_layers()
    for name, parameter in model.named_parameters():
        if name in bad:
            parameter.data[0] = NAN
    assert describe_weights([model]) == said


@pytest.mark.ranks(2)
def test_of_shards_the_weights_of_this_rank_are_counted() -> None:
    _, _, prepared = prepare_sgd(backend_of("fsdp"), nn.Linear(2, 2, bias=False))
    with prepared.gathered(write=True), torch.no_grad():
        prepared.unwrap().weight[1] = NAN
    said = [
        "The weights on this rank are finite still",
        "An infinity or NaN is in all 1 parameters on this rank already",
    ]
    assert describe_weights([prepared.unwrap()]) == said[dist.get_rank()]
