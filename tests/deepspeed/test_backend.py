"""Engines of one process: what is refused, and what only DeepSpeed does."""

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.lr_scheduler import LambdaLR

from deepspeed_engines import Weights, X, backend, engine_of, error_of, moved, take_step, weights
from drivetrain_backends import (
    AccumulationError,
    AccumulationWindow,
    BackendRegistry,
    PairingError,
    ReplacedParameterError,
    full_state_dict,
)
from drivetrain_backends.compat import as_they_are
from drivetrain_deepspeed import DeepSpeedBackend, EngineConfigError
from drivetrain_precision import PrecisionError, choose_policy
from drivetrain_state import ParallelDims, gather_object
from plain_loop.backends import context


@pytest.mark.ranks(1, timeout_seconds=150)
def test_what_an_engine_cannot_do_is_refused_with_what_to_do() -> None:
    with backend(stage=1) as one:
        model, a, b, pair = Weights(), Weights(), Weights(), nn.Linear(1, 1)
        one.prepare([model], [], [])
        two = [SGD([pair.weight], lr=1.0), SGD([pair.bias], lr=1.0)]
        stranger = SGD(Weights().parameters(), lr=1.0)
        schedule = LambdaLR(stranger, lambda _: 1.0)
        used = SGD([a.w], lr=1.0, momentum=0.9)
        a.w.grad = torch.ones(3)
        used.step()
        for error, given, said in (
            (PairingError, ([], [SGD([model.w], lr=1.0)], []), "pass them to one prepare"),
            (PairingError, ([a, b], [SGD([a.w, b.w], lr=1.0)], []), r"put them into one nn\.Module"),
            (PairingError, ([pair], two, []), "use parameter groups"),
            (PairingError, ([a], [stranger], []), "belongs to no prepared model"),
            (PairingError, ([a], [], [schedule]), "its optimizer is not prepared"),
            (EngineConfigError, ([a], [Adagrad([a.w])], []), "choose another optimizer, or stage 0"),
            (EngineConfigError, ([a], [used], []), "load its state with load_state"),
            (ValueError, ([model], [], []), "is prepared already"),
        ):
            with pytest.raises(error, match=said):
                one.prepare(*given)
        with pytest.raises(RuntimeError, match="prepare the loader"):
            one.join([])


@pytest.mark.ranks(2)
def test_a_model_on_meta_is_refused_by_the_name_of_its_first_parameter() -> None:
    good, bad = Weights(), nn.Sequential(nn.Linear(2, 2, device="meta"))
    optimizers = [SGD(good.parameters()), SGD(bad.parameters())]
    with backend(stage=2) as one:
        with pytest.raises(
            ValueError, match=r"Sequential: 0\.weight is on the meta device and has no values"
        ):
            one.prepare([good, bad], optimizers, [])
    assert type(good) is Weights


class Odd(nn.Module):
    """A linear map of (3,), and a parameter of another shape or dtype."""

    def __init__(self, odd: torch.Tensor, *, is_trained: bool = True) -> None:
        super().__init__()
        self.map = nn.Linear(3, 3)
        self.odd = nn.Parameter(odd, requires_grad=is_trained)


ODD = {
    "no dimension": (torch.tensor(2.0), r"odd is a parameter of shape \(\)"),
    "no element": (torch.empty(0, 3), r"odd is a parameter of shape \(0, 3\)"),
    "float64": (torch.ones(3, dtype=torch.float64), r"odd: of torch\.float64"),
    "not held": (torch.ones(3), "odd: to be trained, but not held by SGD"),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.default_cases("0", "3")
def test_a_parameter_that_an_engine_cannot_train_is_refused_by_name(stage: int) -> None:
    with backend(stage=stage) as one:
        for name, (value, said) in ODD.items():
            if stage == 0 and name in ("no element", "not held"):
                continue
            model = Odd(value)
            held = model.map.parameters() if name == "not held" else model.parameters()
            optimizer = SGD(held, lr=0.1)
            with pytest.raises(ValueError, match=f"^{said}"):
                one.prepare([model], [optimizer], [])
        model = Odd(torch.ones(3), is_trained=False)
        groups = [{"params": model.map.parameters()}, {"params": [model.odd]}]
        if stage in (1, 2):
            optimizer = SGD(groups, lr=0.1)
            with pytest.raises(ValueError, match=r"^group 1 of SGD holds no parameter that is to be trained"):
                one.prepare([model], [optimizer], [])
        (prepared,) = one.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
        assert prepared.unwrap() is model


@pytest.mark.ranks(1)
def test_a_loss_that_reaches_another_engine_is_an_error() -> None:
    with backend(stage=2) as one:
        a, b = Weights(), Weights()
        first, second = one.prepare([a, b], [SGD([a.w], lr=1.0), SGD([b.w], lr=1.0)], [])
        one.window.begin()
        both = first.model(X) + second.model(X)
        through = second.model(first.model(X) * X)
        for act, said in (
            (lambda: one.backward(first.model(X)), r"backward\(loss, model=\.\.\.\)"),
            (lambda: one.backward_of([first, second], both), r"one nn\.Module"),
            (lambda: first.model(X).backward(), r"accelerator\.backward\(loss\) in its place"),
            (lambda: first.backward(through), "freeze Weights while it is passed through"),
            (
                lambda: first.backward(through),
                r"a loss of Weights \(number 1 of 2 prepared\) reached Weights \(number 2 of 2 prepared\)",
            ),
        ):
            with pytest.raises(AccumulationError, match=said):
                act()


@pytest.mark.ranks(1)
def test_steps_and_clips_that_cannot_be_are_refused() -> None:
    with engine_of(stage=1, config={"gradient_clipping": 0.5}) as (one, _, prepared):
        one.window.begin()
        prepared.backward(prepared.model(X))
        with pytest.raises(
            AccumulationError, match="steps = 2: a DeepSpeed engine lays out its gradients"
        ) as caught:
            one.window.resize(2)
        assert "set it before prepare(), or call free_memory()" in str(caught.value)
        for clip, said in (
            ({"value": 1.0}, "clip by norm, of type 2"),
            ({"norm": 1.0, "norm_type": 1.0}, r"norm_type=1\.0"),
            ({"parameters": [], "norm": 0.5}, r"pass model\.parameters\(\)"),
            ({"norm": 2.0}, r"clip\(norm=2\.0\) contradicts gradient_clipping=0\.5"),
        ):
            with pytest.raises(ValueError, match=said):
                prepared.clip(**clip)
        prepared.optimizers[0].step()
        with pytest.raises(AccumulationError, match=r"step\(\) twice after one backward\(\)"):
            prepared.optimizers[0].step()
    one.window.resize(2)  # the engines are gone


@pytest.mark.ranks(1)
def test_fp16_trains_where_deepspeed_has_it_and_is_refused_else() -> None:
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().is_fp16_supported():
        said = "DeepSpeed does not compute in it on cpu; it can do 'no', 'bf16'"
        assert said in error_of(PrecisionError, engine_of(mode="fp16", stage=1).__enter__)
        return
    with engine_of(mode="fp16", stage=1, lr=0.25) as (_, _, prepared):
        for _ in range(20):  # the first ones overflow while the loss scale comes down
            take_step(prepared, prepared.model(X))
            if prepared.optimizers[0].num_steps:
                break
        assert moved(prepared)[1] == pytest.approx(0.5)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_configured_norm_is_clipped_to(stage: int) -> None:
    with engine_of(stage=stage, config={"gradient_clipping": 0.5}) as (_, _, prepared):
        take_step(prepared, prepared.model(X))
        assert moved(prepared) == pytest.approx((X * 0.5 / X.norm()).tolist(), rel=1e-5)


@pytest.mark.ranks(1)
def test_an_optimizer_section_builds_deepspeeds_own_and_schedulers_reach_it() -> None:
    section = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}}
    with backend(stage=2, config=section) as one:
        model = Weights()
        optimizer = AdamW([model.w], lr=0.1, weight_decay=0.0)
        (prepared,) = one.prepare([model], [optimizer], [LambdaLR(optimizer, lambda step: 0.5**step)])
        prepared.backward(prepared.model(X))
        prepared.optimizers[0].step()
        prepared.schedulers[0].step()
        own = prepared.model.engine.basic_optimizer
        assert (type(own).__name__, own.param_groups[0]["lr"]) == ("AdamW", 0.05)
        assert weights(prepared) == pytest.approx([0.9] * 3, abs=1e-5)


WHOLE_NOWHERE = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


@pytest.mark.ranks(2)
def test_a_model_built_inside_building_is_never_whole_on_a_rank_until_the_run_is_closed() -> None:
    plain = torch._C._nn.linear
    with backend(stage=3, config=WHOLE_NOWHERE) as one:
        with one.building():
            model = nn.Linear(64, 64)
        with as_they_are():
            assert sum(p.numel() for p in model.parameters()) == 0
            assert model.weight.ds_tensor.numel() == 64 * 64 / 2
        (prepared,) = one.prepare([model], [SGD(model.parameters(), lr=1.0)], [])
        with prepared.gathered():
            assert model.weight.numel() == 64 * 64
        x = torch.ones(2, 64)
        before = prepared.model(x).sum()
        take_step(prepared, before)
        assert before.item() - prepared.model(x).sum().item() == pytest.approx(4 * 64 * 65, rel=1e-4)
    assert torch.nn.functional.linear is plain  # torch's own again


@pytest.mark.ranks(2)
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_a_model_without_an_optimizer_is_partitioned_too(offload: Literal["cpu"] | None) -> None:
    with backend(stage=3, offload_param=offload, config=WHOLE_NOWHERE) as one:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        expected = model(torch.ones(8))
        (prepared,) = one.prepare([model], [], [])
        with torch.no_grad():
            assert torch.equal(prepared.model(torch.ones(8)), expected)
        with as_they_are():
            assert model.weight.numel() == 0
        assert prepared.state_dict()["model"]["weight"].full_tensor().numel() == 64


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_second_loss_that_would_be_dropped_is_refused(stage: int) -> None:
    with engine_of(stage=stage, offload_optimizer="cpu") as (one, _, prepared):
        one.window.begin()
        prepared.backward(prepared.model(X))
        with pytest.raises(AccumulationError, match="add the losses up and call it once"):
            prepared.backward(prepared.model(X))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_losses_of_a_micro_batch_add_up(stage: int, accumulation: int) -> None:
    with engine_of(stage=stage, accumulation=accumulation) as (one, _, prepared):
        for _ in range(accumulation):
            one.window.begin()
            prepared.backward(prepared.model(X))
            prepared.backward(prepared.model(X) * 2)
        prepared.optimizers[0].step()
        assert moved(prepared) == pytest.approx([3.0, 6.0, 9.0])


@pytest.mark.ranks(1)
def test_a_parameter_assigned_after_prepare_is_an_error_at_the_latest_when_it_is_saved_or_loaded() -> None:
    with engine_of(stage=2) as (_, model, prepared):
        state = prepared.state_dict()
        model.w = nn.Parameter(torch.zeros(3))
        said = r"the parameters of Weights are not those of prepare\(\): w created or assigned"
        for act in (prepared.state_dict, partial(prepared.load_state_dict, state)):
            with pytest.raises(ReplacedParameterError, match=said):
                act()


@pytest.mark.ranks(2)
def test_deepspeeds_own_checkpoints_work_beside_ours(tmp_path: Path) -> None:
    with backend(stage=3) as one:
        model = Weights()
        (prepared,) = one.prepare([model], [AdamW([model.w], lr=0.1)], [])
        take_step(prepared, prepared.model(X))
        engine = prepared.model.engine
        engine.save_checkpoint(str(tmp_path), tag="one")
        saved = weights(prepared)
        take_step(prepared, prepared.model(X))
        later = weights(prepared)
        engine.load_checkpoint(str(tmp_path), tag="one")
        assert weights(prepared) == saved != later
        take_step(prepared, prepared.model(X))
        assert weights(prepared) == later


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_an_export_of_fp32_weights_by_deepspeeds_tool_is_what_our_state_holds(
    tmp_path: Path, stage: int
) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as exported

    with backend(stage=stage) as one:
        model = Weights()
        (prepared,) = one.prepare([model], [AdamW([model.w], lr=0.1)], [])
        take_step(prepared, prepared.model(X))
        prepared.model.engine.save_checkpoint(str(tmp_path), tag="one")
        assert exported(str(tmp_path), tag="one")["w"].tolist() == weights(prepared)


@pytest.mark.ranks(1)
def test_a_start_that_fails_leaves_models_and_optimizers_to_be_prepared_again() -> None:
    """An engine that DeepSpeed refuses to start, after one of the same call was started; then both, and a step."""
    with backend(stage=2) as one:
        first, model = nn.Sequential(nn.Linear(3, 1)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizers = [
            SGD(first.parameters(), lr=1.0),
            SGD([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=0.1),
        ]
        own = optimizers[1].param_groups[1]["params"]
        optimizers[1].param_groups[1]["params"] = [*own, *model[0].parameters()]
        with pytest.raises(AssertionError, match=r"0\.weight occurs multiple times"):
            one.prepare([first, model], optimizers, [])
        assert type(first) is nn.Sequential
        assert type(model[0]) is nn.Linear
        optimizers[1].param_groups[1]["params"] = own
        prepared, _ = one.prepare([first, model], optimizers, [])
        before = full_state_dict(prepared.state_dict()["model"])["0.weight"]
        take_step(prepared, prepared.model(X).sum())
        after = full_state_dict(prepared.state_dict()["model"])["0.weight"]
        torch.testing.assert_close((before - after).flatten(), X)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [0, 2])
def test_nothing_is_held_once_a_backend_is_closed(stage: int) -> None:
    with backend(stage=stage) as one:
        models = [Weights(), Weights()]
        (prepared, other) = one.prepare(models, [AdamW(model.parameters()) for model in models], [])
        take_step(prepared, prepared.model(X))
        held = [weakref.ref(each) for each in (models[0], prepared.model.engine, prepared.optimizers[0])]
        one.close()
        del models, prepared, other
        gc.collect()
        assert [reference() for reference in held] == [None] * 3


@pytest.mark.ranks(4)
def test_axes_that_its_engines_do_not_know_are_refused() -> None:
    with context(parallelism=ParallelDims(data=2, tensor=2)) as where:
        policy = choose_policy("no", where.device)
        with pytest.raises(ValueError, match="2 of 4 processes data parallel: DeepSpeed's engines") as caught:
            DeepSpeedBackend(where, policy, window=AccumulationWindow(1))
        assert len(set(gather_object(where, str(caught.value)))) == 1


def test_the_backend_is_found_by_its_name() -> None:
    assert BackendRegistry().get("deepspeed") is DeepSpeedBackend
