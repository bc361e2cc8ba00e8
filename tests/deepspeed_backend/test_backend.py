"""Engines of one process: what is refused, and what only DeepSpeed does."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.lr_scheduler import LambdaLR

from deepspeed_backend.engines import Weights, backend, weights
from drivetrain_backends import (
    AccumulationError,
    EngineConfigError,
    NonFiniteGradientError,
    PairingError,
    ReplacedParameterError,
    UnreducedGradientError,
)
from drivetrain_precision import PrecisionError

X = torch.tensor([1.0, 2.0, 3.0])


def error_of(kind: type[Exception], act: Callable[[], object]) -> str:
    """The message of the error that `act` raises."""
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)


def refusals() -> dict[str, str]:
    found: dict[str, str] = {}
    with backend(stage=1) as one:
        model = Weights()
        one.prepare([model], [], [])
        found["late"] = error_of(PairingError, lambda: one.prepare([], [SGD([model.w], lr=1.0)], []))
        a, b = Weights(), Weights()
        found["two models"] = error_of(
            PairingError, lambda: one.prepare([a, b], [SGD([a.w, b.w], lr=1.0)], [])
        )
        pair = nn.Linear(1, 1)
        two = [SGD([pair.weight], lr=1.0), SGD([pair.bias], lr=1.0)]
        found["two optimizers"] = error_of(PairingError, lambda: one.prepare([pair], two, []))
        found["foreign"] = error_of(
            PairingError, lambda: one.prepare([a], [SGD(Weights().parameters(), lr=1.0)], [])
        )
        stranger = LambdaLR(SGD(Weights().parameters(), lr=1.0), lambda _: 1.0)
        found["scheduler"] = error_of(PairingError, lambda: one.prepare([a], [], [stranger]))
        found["adagrad"] = error_of(EngineConfigError, lambda: one.prepare([a], [Adagrad([a.w])], []))
        used = SGD([a.w], lr=1.0, momentum=0.9)
        a.w.grad = torch.ones(3)
        used.step()
        found["state"] = error_of(EngineConfigError, lambda: one.prepare([a], [used], []))
        found["twice"] = error_of(ValueError, lambda: one.prepare([model], [], []))
        found["join"] = error_of(RuntimeError, lambda: one.join([]))
    return found


def test_what_an_engine_cannot_do_is_refused_with_what_to_do(run_ranks) -> None:
    (found,) = run_ranks(refusals, num_processes=1, timeout_seconds=150)
    for name, said in {
        "late": "pass them to one prepare",
        "two models": "put them into one nn.Module",
        "two optimizers": "use parameter groups",
        "foreign": "belongs to no prepared model",
        "scheduler": "its optimizer is not prepared",
        "adagrad": "choose another optimizer, or stage 0",
        "state": "load its state with load_state",
        "twice": "is prepared already",
        "join": "prepare the loader",
    }.items():
        assert said in found[name], name


def loss_refusals() -> dict[str, str]:
    found: dict[str, str] = {}
    with backend(stage=2) as one:
        a, b = Weights(), Weights()
        first, second = one.prepare([a, b], [SGD([a.w], lr=1.0), SGD([b.w], lr=1.0)], [])
        one.window.begin()
        found["whose"] = error_of(AccumulationError, lambda: one.backward(first.model(X)))
        both = first.model(X) + second.model(X)
        found["both"] = error_of(AccumulationError, lambda: one.backward_of([first, second], both))
        found["plain"] = error_of(AccumulationError, lambda: first.model(X).backward())
        through = second.model(first.model(X) * X)
        found["through"] = error_of(AccumulationError, lambda: first.backward(through))
    return found


def test_a_loss_that_reaches_another_engine_is_an_error(run_ranks) -> None:
    (found,) = run_ranks(loss_refusals, num_processes=1)
    assert "backward(loss, model=...)" in found["whose"]
    assert "one nn.Module" in found["both"]
    assert "accelerator.backward(loss) in its place" in found["plain"]
    assert "freeze Weights while it is passed through" in found["through"]


def step_refusals() -> dict[str, str]:
    found: dict[str, str] = {}
    with backend(stage=1, config={"gradient_clipping": 0.5}) as one:
        model = Weights()
        (prepared,) = one.prepare([model], [SGD([model.w], lr=1.0)], [])
        one.window.begin()
        prepared.backward(prepared.model(X))
        found["value"] = error_of(ValueError, lambda: prepared.clip(value=1.0))
        found["type"] = error_of(ValueError, lambda: prepared.clip(norm=1.0, norm_type=1.0))
        found["some"] = error_of(ValueError, lambda: prepared.clip([], norm=0.5))
        found["other"] = error_of(ValueError, lambda: prepared.clip(norm=2.0))
        prepared.optimizers[0].step()
        found["twice"] = error_of(AccumulationError, prepared.optimizers[0].step)
    return found


@pytest.mark.parametrize("num_processes", [1])
def test_steps_and_clips_that_cannot_be_are_refused(run_ranks, num_processes: int) -> None:
    (found,) = run_ranks(step_refusals, num_processes=num_processes)
    assert "clip by norm, of type 2" in found["value"]
    assert "norm_type=1.0" in found["type"]
    assert "pass model.parameters()" in found["some"]
    assert "clip(norm=2.0) contradicts gradient_clipping=0.5" in found["other"]
    assert "step() twice after one backward()" in found["twice"]


def half_precision() -> str:
    def start() -> None:
        with backend(mode="fp16", stage=1):
            pass

    return error_of(PrecisionError, start)


def test_fp16_where_deepspeed_has_none_is_refused(run_ranks) -> None:
    (said,) = run_ranks(half_precision, num_processes=1)
    assert "DeepSpeed does not compute in it on cpu; it can do 'no', 'bf16'" in said


def scaled(stage: int) -> list[list[float]]:
    """Weights after steps of gradient X, and of one that overflows, with a loss scale of 1024."""
    found: list[list[float]] = []
    with backend(stage=stage, scale=1024.0) as one:
        model = Weights()
        (prepared,) = one.prepare([model], [SGD([model.w], lr=1.0)], [])
        for factor in (1.0, float("inf"), 1.0):
            one.window.begin()
            prepared.backward(prepared.model(X) * factor * 2, count=2)
            norm = prepared.clip(norm=1000.0)
            prepared.optimizers[0].step()
            assert norm is not None
            found.append([*weights(prepared), norm.item(), float(prepared.optimizers[0].was_skipped)])
        found.append([one.state_dict()["scaler"]["scale"]])
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_are_scaled_and_an_overflow_is_skipped(run_ranks, stage: int) -> None:
    ((first, skipped, third, scale),) = run_ranks(scaled, stage, num_processes=1)
    assert first == pytest.approx([0.0, -1.0, -2.0, 14**0.5, 0.0])
    assert skipped[:3] == first[:3]
    assert skipped[4] == 1.0
    assert third[:3] == pytest.approx([-1.0, -3.0, -5.0])
    assert scale == [512.0]


def configured_clipping(stage: int) -> list[float]:
    with backend(stage=stage, config={"gradient_clipping": 0.5}) as one:
        model = Weights()
        (prepared,) = one.prepare([model], [SGD([model.w], lr=1.0)], [])
        one.window.begin()
        prepared.backward(prepared.model(X))
        prepared.optimizers[0].step()
        return [1 - w for w in (weights(prepared) if stage else model.w.tolist())]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_configured_norm_is_clipped_to(run_ranks, stage: int) -> None:
    (moved,) = run_ranks(configured_clipping, stage, num_processes=1)
    assert moved == pytest.approx((X * 0.5 / X.norm()).tolist(), rel=1e-5)


def built_by_deepspeed(rate: object) -> list[object]:
    section = {"optimizer": {"type": "AdamW", "params": {"lr": rate, "torch_adam": True}}}
    with backend(stage=2, config=section) as one:
        model = Weights()
        optimizer = AdamW([model.w], lr=0.1, weight_decay=0.0)
        (prepared,) = one.prepare([model], [optimizer], [LambdaLR(optimizer, lambda step: 0.5**step)])
        one.window.begin()
        prepared.backward(prepared.model(X))
        prepared.optimizers[0].step()
        prepared.schedulers[0].step()
        engine = prepared.model.engine
        return [
            type(engine.basic_optimizer).__name__,
            engine.basic_optimizer.param_groups[0]["lr"],
            *weights(prepared),
        ]


def test_an_optimizer_section_builds_deepspeeds_own_and_schedulers_reach_it(run_ranks) -> None:
    (found,) = run_ranks(built_by_deepspeed, "auto", num_processes=1)
    assert found == ["AdamW", 0.05, *[pytest.approx(0.9, abs=1e-5)] * 3]


def constructed() -> list[object]:
    with backend(stage=3, config={"zero_optimization": {"stage3_param_persistence_threshold": 0}}) as one:
        with one.building():
            model = nn.Linear(64, 64)
        held = sum(p.numel() for p in model.parameters()), model.weight.ds_tensor.numel()
        (prepared,) = one.prepare([model], [SGD(model.parameters(), lr=1.0)], [])
        with prepared.gathered():
            whole = model.weight.numel()
        one.window.begin()
        x = torch.ones(2, 64)
        before = prepared.model(x).sum()
        prepared.backward(before)
        prepared.optimizers[0].step()
        return [*held, whole, before.item() - prepared.model(x).sum().item()]


def test_a_model_built_inside_building_is_never_whole_on_a_rank(run_ranks) -> None:
    for held, part, whole, moved in run_ranks(constructed, num_processes=2):
        assert held == 0
        assert part == 64 * 64 / 2
        assert whole == 64 * 64
        assert moved == pytest.approx(4 * 64 * 65, rel=1e-4)


def inference() -> list[object]:
    with backend(stage=3, config={"zero_optimization": {"stage3_param_persistence_threshold": 0}}) as one:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        expected = model(torch.ones(8))
        (prepared,) = one.prepare([model], [], [])
        with torch.no_grad():
            same = torch.equal(prepared.model(torch.ones(8)), expected)
        return [same, model.weight.numel(), prepared.state_dict()["model"]["weight"].full_tensor().numel()]


def test_a_model_without_an_optimizer_is_partitioned_too(run_ranks) -> None:
    assert run_ranks(inference, num_processes=2) == [[True, 0, 64]] * 2


def second_backward(stage: int) -> str:
    with backend(stage=stage, offload_optimizer="cpu") as one:
        model = Weights()
        (prepared,) = one.prepare([model], [SGD([model.w], lr=1.0)], [])
        one.window.begin()
        prepared.backward(prepared.model(X))
        return error_of(AccumulationError, lambda: prepared.backward(prepared.model(X)))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_second_loss_that_would_be_dropped_is_refused(run_ranks, stage: int) -> None:
    (said,) = run_ranks(second_backward, stage, num_processes=1)
    assert "add the losses up and call it once" in said


def two_losses(stage: int, accumulation: int) -> list[float]:
    with backend(stage=stage, accumulation=accumulation) as one:
        model = Weights()
        (prepared,) = one.prepare([model], [SGD([model.w], lr=1.0)], [])
        for _ in range(accumulation):
            one.window.begin()
            prepared.backward(prepared.model(X))
            prepared.backward(prepared.model(X) * 2)
        prepared.optimizers[0].step()
        return [1 - w for w in (weights(prepared) if stage else model.w.tolist())]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_losses_of_a_micro_batch_add_up(run_ranks, stage: int, accumulation: int) -> None:
    for moved in run_ranks(two_losses, stage, accumulation, num_processes=2):
        assert moved == pytest.approx([3.0, 6.0, 9.0])


def guarded(stage: int, nonfinite: str, mode: str) -> list[object]:
    """A good step, one whose loss is NaN on rank 1, a good step."""
    with backend(stage=stage, nonfinite=nonfinite, mode=mode) as one:
        model = Weights()
        (prepared,) = one.prepare([model], [SGD([model.w], lr=1.0)], [])
        found: list[object] = []
        for factor in (1.0, float("nan") if one.context.topology.rank == 1 else 1.0, 1.0):
            one.window.begin()
            prepared.backward(prepared.model(X) * factor)
            try:
                prepared.optimizers[0].step()
            except NonFiniteGradientError as error:
                return [*found, str(error)]
            found.append(prepared.optimizers[0].was_skipped)
            prepared.optimizers[0].zero_grad()
        return [*found, weights(prepared) if stage else model.w.tolist()]


WAYS = [(0, "no"), (1, "no"), (2, "no"), (3, "no"), (1, "bf16"), (2, "bf16")]


@pytest.mark.parametrize(("stage", "mode"), WAYS)
def test_a_step_that_is_not_finite_is_skipped_on_all_ranks(run_ranks, stage: int, mode: str) -> None:
    for first, second, third, found in run_ranks(guarded, stage, "skip", mode, num_processes=2):
        assert (first, second, third) == (False, True, False)
        assert found == pytest.approx([-1.0, -3.0, -5.0])


@pytest.mark.parametrize(("stage", "mode"), WAYS)
def test_a_step_that_is_not_finite_ends_the_run_with_the_parameters_name(
    run_ranks, stage: int, mode: str
) -> None:
    for first, said in run_ranks(guarded, stage, "raise", mode, num_processes=2):
        assert first is False
        assert "the gradient of w holds an infinity or NaN at optimizer step 2; a loss of rank 1" in str(said)


def reassigned() -> str:
    with backend(stage=2) as one:
        model = Weights()
        (prepared,) = one.prepare([model], [SGD([model.w], lr=1.0)], [])
        model.w = nn.Parameter(torch.zeros(3))
        return error_of(ReplacedParameterError, prepared.state_dict)


def test_a_parameter_assigned_after_prepare_is_an_error_at_the_latest_when_it_is_saved(run_ranks) -> None:
    (said,) = run_ranks(reassigned, num_processes=1)
    assert "w" in said


def own_format(folder: str) -> list[object]:
    """Save in DeepSpeed's own format, train on, load again; then its export of fp32 weights."""
    with backend(stage=3) as one:
        model = Weights()
        (prepared,) = one.prepare([model], [AdamW([model.w], lr=0.1)], [])

        def step() -> None:
            one.window.begin()
            prepared.backward(prepared.model(X))
            prepared.optimizers[0].step()

        step()
        engine = prepared.model.engine
        engine.save_checkpoint(folder, tag="one")
        saved = weights(prepared)
        step()
        moved = weights(prepared)
        engine.load_checkpoint(folder, tag="one")
        loaded = weights(prepared)
        step()
        again = weights(prepared)
    return [saved == loaded, moved == again, saved != moved]


def test_deepspeeds_own_checkpoints_work_beside_ours(run_ranks, tmp_path: Path) -> None:
    assert run_ranks(own_format, str(tmp_path), num_processes=2) == [[True, True, True]] * 2


def exported(folder: str) -> bool:
    """DeepSpeed's tool reads the weights that our state holds."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with backend(stage=2) as one:
        model = Weights()
        (prepared,) = one.prepare([model], [AdamW([model.w], lr=0.1)], [])
        one.window.begin()
        prepared.backward(prepared.model(X))
        prepared.optimizers[0].step()
        prepared.model.engine.save_checkpoint(folder, tag="one")
        return get_fp32_state_dict_from_zero_checkpoint(folder, tag="one")["w"].tolist() == weights(prepared)


def test_an_export_of_fp32_weights_is_what_our_state_holds(run_ranks, tmp_path: Path) -> None:
    assert run_ranks(exported, str(tmp_path), num_processes=2) == [True, True]


def compiled(stage: int) -> list[float]:
    """Losses of a model whose block is compiled in one graph, beside those of the same model as it is."""
    found: list[list[float]] = []
    for compiles in (False, True):
        with backend(stage=stage) as one:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
            if compiles:
                model[0].compile(backend="eager", fullgraph=stage < 3)
            (prepared,) = one.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
            losses: list[float] = []
            for _ in range(3):
                one.window.begin()
                loss = prepared.model(torch.ones(2, 4)).square().mean()
                prepared.backward(loss)
                prepared.optimizers[0].step()
                losses.append(loss.item())
            found.append(losses)
    return [a - b for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_block_that_is_compiled_trains_alike(run_ranks, stage: int) -> None:
    (differences,) = run_ranks(compiled, stage, num_processes=1)
    assert differences == pytest.approx([0.0] * 3, abs=1e-6)


class FrozenHalf(nn.Module):
    """Two weights of (3,), the second frozen; maps x of shape (3,) to ()."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (3,) to ()."""
        return (self.trained * self.frozen * x).sum()


def unfrozen(stage: int) -> str:
    with backend(stage=stage) as one:
        model = FrozenHalf()
        (prepared,) = one.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
        model.frozen.requires_grad_(True)
        one.window.begin()
        prepared.backward(prepared.model(X))
        return error_of(UnreducedGradientError, prepared.optimizers[0].step)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_parameter_unfrozen_after_prepare_is_named(run_ranks, stage: int) -> None:
    for said in run_ranks(unfrozen, stage, num_processes=2):
        assert "frozen was frozen when prepare() built its DeepSpeed engine" in said


def failed_start() -> list[object]:
    with backend(stage=2, activation_checkpointing="full", blocks=("Linear",)) as one:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = SGD([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=0.1)
        optimizer.param_groups[1]["params"] = list(model[0].parameters())  # DeepSpeed refuses duplicates
        said = error_of(Exception, lambda: one.prepare([model], [optimizer], []))
        kinds = [type(model) is nn.Sequential, type(model[0]) is nn.Linear]
        (again,) = one.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
        return [bool(said), *kinds, again.unwrap() is model]


def test_a_start_that_fails_leaves_the_model_as_it_was(run_ranks) -> None:
    assert run_ranks(failed_start, num_processes=1) == [[True, True, True, True]]
