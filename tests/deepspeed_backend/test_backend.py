"""Engines of one process: what is refused, and what only DeepSpeed does."""

import gc
import weakref
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.lr_scheduler import LambdaLR

from deepspeed_backend.engines import Weights, backend, error_of, weights
from drivetrain_backends import (
    AccumulationError,
    EngineConfigError,
    PairingError,
    ReplacedParameterError,
    full_state_dict,
)
from drivetrain_backends.compat import as_they_are
from drivetrain_precision import PrecisionError

X = torch.tensor([1.0, 2.0, 3.0])


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


class Odd(nn.Module):
    """A linear map of (3,), and a parameter of another shape or dtype."""

    def __init__(self, odd: torch.Tensor, *, is_trained: bool = True) -> None:
        super().__init__()
        self.map = nn.Linear(3, 3)
        self.odd = nn.Parameter(odd, requires_grad=is_trained)


def parameter_refusals(stage: int) -> dict[str, str]:
    """What is said of models with odd parameters; after it, one without is prepared, beside a frozen odd one."""
    found: dict[str, str] = {}
    with backend(stage=stage) as one:
        odd = {
            "no dimension": torch.tensor(2.0),
            "no element": torch.empty(0, 3),
            "float64": torch.ones(3, dtype=torch.float64),
            "not held": torch.ones(3),
        }
        for name, value in odd.items():
            if stage == 0 and name in ("no element", "not held"):
                continue
            model = Odd(value)
            held = model.map.parameters() if name == "not held" else model.parameters()
            optimizer = SGD(held, lr=0.1)
            found[name] = error_of(ValueError, lambda: one.prepare([model], [optimizer], []))  # noqa: B023
        model = Odd(torch.ones(3), is_trained=False)
        groups = [{"params": model.map.parameters()}, {"params": [model.odd]}]
        if stage in (1, 2):
            found["frozen"] = error_of(ValueError, lambda: one.prepare([model], [SGD(groups, lr=0.1)], []))
        (prepared,) = one.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
        assert prepared.unwrap() is model
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.default_cases("0", "3")
def test_a_parameter_that_an_engine_cannot_train_is_refused_by_name(run_ranks, stage: int) -> None:
    (found,) = run_ranks(parameter_refusals, stage, num_processes=1)
    expected = {
        "no dimension": "odd is a parameter of shape ()",
        "no element": "odd is a parameter of shape (0, 3)",
        "float64": "odd: of torch.float64",
        "not held": "odd: to be trained, but not held by SGD",
    }
    if stage in (1, 2):
        assert found.pop("frozen").startswith("group 1 of SGD holds no parameter that is to be trained")
    assert set(found) == set(expected) - ({"no element", "not held"} if stage == 0 else set())
    for name, said in found.items():
        assert said.startswith(expected[name])


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
        found["window"] = error_of(AccumulationError, lambda: one.window.resize(2))
        found["value"] = error_of(ValueError, lambda: prepared.clip(value=1.0))
        found["type"] = error_of(ValueError, lambda: prepared.clip(norm=1.0, norm_type=1.0))
        found["some"] = error_of(ValueError, lambda: prepared.clip([], norm=0.5))
        found["other"] = error_of(ValueError, lambda: prepared.clip(norm=2.0))
        prepared.optimizers[0].step()
        found["twice"] = error_of(AccumulationError, prepared.optimizers[0].step)
    one.window.resize(2)  # the engines are gone
    return found


@pytest.mark.parametrize("num_processes", [1])
def test_steps_and_clips_that_cannot_be_are_refused(run_ranks, num_processes: int) -> None:
    (found,) = run_ranks(step_refusals, num_processes=num_processes)
    assert "steps = 2: a DeepSpeed engine lays out its gradients" in found["window"]
    assert "set it before prepare(), or call free_memory()" in found["window"]
    assert "clip by norm, of type 2" in found["value"]
    assert "norm_type=1.0" in found["type"]
    assert "pass model.parameters()" in found["some"]
    assert "clip(norm=2.0) contradicts gradient_clipping=0.5" in found["other"]
    assert "step() twice after one backward()" in found["twice"]


def half_precision() -> tuple[bool, str | float]:
    """Whether DeepSpeed computes in fp16 here; and how far a step moves, or what is said."""
    from deepspeed.accelerator import get_accelerator

    def train() -> float:
        with backend(mode="fp16", stage=1) as one:
            model = Weights()
            (prepared,) = one.prepare([model], [SGD([model.w], lr=0.25)], [])
            for _ in range(20):  # the first ones overflow while the loss scale comes down
                one.window.begin()
                prepared.backward(prepared.model(X))
                prepared.optimizers[0].step()
                prepared.optimizers[0].zero_grad()
                if prepared.optimizers[0].num_steps:
                    break
            return 1 - weights(prepared)[1]

    has_fp16 = bool(get_accelerator().is_fp16_supported())
    return has_fp16, train() if has_fp16 else error_of(PrecisionError, train)


def test_fp16_trains_where_deepspeed_has_it_and_is_refused_else(run_ranks) -> None:
    ((has_fp16, found),) = run_ranks(half_precision, num_processes=1)
    if has_fp16:
        assert found == pytest.approx(0.5)
    else:
        assert "DeepSpeed does not compute in it on cpu; it can do 'no', 'bf16'" in found


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
        with as_they_are():
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


def linear_after_a_run() -> tuple[bool, bool]:
    plain = torch._C._nn.linear
    constructed_ones = constructed()
    return bool(constructed_ones), torch.nn.functional.linear is plain


@pytest.mark.slow
def test_the_process_has_torchs_own_linear_again_once_a_run_is_closed(run_ranks) -> None:
    assert run_ranks(linear_after_a_run, num_processes=2) == [(True, True)] * 2


def test_a_model_built_inside_building_is_never_whole_on_a_rank(run_ranks) -> None:
    for held, part, whole, moved in run_ranks(constructed, num_processes=2):
        assert held == 0
        assert part == 64 * 64 / 2
        assert whole == 64 * 64
        assert moved == pytest.approx(4 * 64 * 65, rel=1e-4)


def inference(offload: Literal["cpu"] | None) -> list[object]:
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    with backend(stage=3, offload_param=offload, config=config) as one:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        expected = model(torch.ones(8))
        (prepared,) = one.prepare([model], [], [])
        with torch.no_grad():
            same = torch.equal(prepared.model(torch.ones(8)), expected)
        with as_they_are():
            held = model.weight.numel()
        return [same, held, prepared.state_dict()["model"]["weight"].full_tensor().numel()]


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_a_model_without_an_optimizer_is_partitioned_too(run_ranks, offload: str | None) -> None:
    assert run_ranks(inference, offload, num_processes=2) == [[True, 0, 64]] * 2


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


def reassigned() -> list[str]:
    with backend(stage=2) as one:
        model = Weights()
        (prepared,) = one.prepare([model], [SGD([model.w], lr=1.0)], [])
        state = prepared.state_dict()
        model.w = nn.Parameter(torch.zeros(3))
        return [
            error_of(ReplacedParameterError, prepared.state_dict),
            error_of(ReplacedParameterError, lambda: prepared.load_state_dict(state)),
        ]


def test_a_parameter_assigned_after_prepare_is_an_error_at_the_latest_when_it_is_saved_or_loaded(
    run_ranks,
) -> None:
    for said in run_ranks(reassigned, num_processes=1)[0]:
        assert "the parameters of Weights are not those of prepare(): w created or assigned" in said


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


def exported(folder: str, stage: int) -> bool:
    """DeepSpeed's tool reads the weights that our state holds."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with backend(stage=stage) as one:
        model = Weights()
        (prepared,) = one.prepare([model], [AdamW([model.w], lr=0.1)], [])
        one.window.begin()
        prepared.backward(prepared.model(X))
        prepared.optimizers[0].step()
        prepared.model.engine.save_checkpoint(folder, tag="one")
        return get_fp32_state_dict_from_zero_checkpoint(folder, tag="one")["w"].tolist() == weights(prepared)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_export_of_fp32_weights_is_what_our_state_holds(run_ranks, tmp_path: Path, stage: int) -> None:
    assert run_ranks(exported, str(tmp_path), stage, num_processes=2) == [True, True]


def failed_start() -> list[object]:
    """An engine that DeepSpeed refuses to start, after one of the same call was started; then both, and a step."""
    with backend(stage=2, activation_checkpointing="full", blocks=("Linear",)) as one:
        first, model = nn.Sequential(nn.Linear(3, 1)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizers = [
            SGD(first.parameters(), lr=1.0),
            SGD([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=0.1),
        ]
        own = optimizers[1].param_groups[1]["params"]
        optimizers[1].param_groups[1]["params"] = [*own, *model[0].parameters()]
        said = error_of(AssertionError, lambda: one.prepare([first, model], optimizers, []))
        kinds = [type(module) is kind for module, kind in ((first, nn.Sequential), (model[0], nn.Linear))]
        optimizers[1].param_groups[1]["params"] = own
        prepared, _ = one.prepare([first, model], optimizers, [])
        before = full_state_dict(prepared.state_dict()["model"])["0.weight"]
        one.window.begin()
        prepared.backward(prepared.model(X).sum())
        prepared.optimizers[0].step()
        moved = before - full_state_dict(prepared.state_dict()["model"])["0.weight"]
        return [said, *kinds, moved.flatten().tolist()]


def test_a_start_that_fails_leaves_models_and_optimizers_to_be_prepared_again(run_ranks) -> None:
    ((said, *kinds, moved),) = run_ranks(failed_start, num_processes=1)
    assert "0.weight occurs multiple times" in said
    assert kinds == [True, True]
    assert moved == pytest.approx([1.0, 2.0, 3.0], rel=1e-5)


def ended(stage: int) -> list[bool]:
    """Whether what was prepared is freed once the backend is closed."""
    with backend(stage=stage) as one:
        models = [Weights(), Weights()]
        (prepared, other) = one.prepare(models, [AdamW(model.parameters()) for model in models], [])
        one.window.begin()
        prepared.backward(prepared.model(X))
        prepared.optimizers[0].step()
        held = [
            weakref.ref(models[0]),
            weakref.ref(prepared.model.engine),
            weakref.ref(prepared.optimizers[0]),
        ]
        one.close()
        del models, prepared, other
        gc.collect()
        return [reference() is None for reference in held]


@pytest.mark.parametrize("stage", [0, 2])
def test_nothing_is_held_once_a_backend_is_closed(run_ranks, stage: int) -> None:
    assert run_ranks(ended, stage, num_processes=1) == [[True, True, True]]
