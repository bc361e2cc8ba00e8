"""The dtypes in which replicas sum gradients, and parameters that are converted or moved after prepare."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from backends.replicas import ddp_backend, prepare_sgd, step_and_clear
from drivetrain_backends import DDPBackend
from drivetrain_backends.modules.replicated_weights import check_replicas
from drivetrain_backends.protocol import AutoValue
from drivetrain_precision import PrecisionError, PrecisionSettings


def ddp(precision: dict[str, str], **settings: object) -> DDPBackend:
    return ddp_backend(precision=PrecisionSettings(**precision), **settings)


def averaged(
    dtype: torch.dtype, precision: dict[str, str], settings: dict[str, object]
) -> tuple[float, object]:
    """The mean of gradients 1 and 2**-8 of two ranks, and the reduction that is told."""
    backend, model, prepared = prepare_sgd(
        ddp(precision, **settings), nn.Linear(1, 1, bias=False, dtype=dtype), lr=1.0
    )
    backend.window.begin()
    x = torch.full((1, 1), [1.0, 2.0**-8][dist.get_rank()], dtype=dtype)
    prepared.backward(prepared.model(x).sum())
    told = backend.applied()["reduce_dtype"]
    mean = model.weight.grad.item()
    backend.close()
    return mean, told


@pytest.mark.parametrize("settings", [{}, {"gradient_as_bucket_view": False}], ids=str)
@pytest.mark.parametrize(
    ("dtype", "precision", "mean", "told"),
    [
        (torch.float32, {}, 0.5 + 2.0**-9, None),
        (torch.float32, {"reduce_dtype": "bf16"}, 0.5, "bf16"),
        (torch.float32, {"reduce_dtype": "fp32"}, 0.5 + 2.0**-9, "fp32"),
        (torch.bfloat16, {"reduce_dtype": "fp32"}, 0.5, "fp32"),  # the sum is in fp32, the gradient in bf16
    ],
)
def test_gradients_are_summed_in_the_dtype_that_is_said(
    run_ranks, settings, dtype: torch.dtype, precision: dict[str, str], mean: float, told: object
) -> None:
    assert run_ranks(averaged, dtype, precision, settings) == [(mean, told)] * 2


def test_weights_held_in_bf16_are_reduced_in_fp32_and_the_plan_says_why(run_ranks) -> None:
    told = run_ranks(averaged, torch.float32, {"param_dtype": "bf16"}, {})[0][1]
    assert told == AutoValue(
        value="fp32", reason="param_dtype='bf16': sums in bf16 would lose small gradients"
    )


def hooked(precision: dict[str, str], hook: str) -> object:
    backend = ddp(precision, communication_hook=hook)
    backend.prepare([nn.Linear(1, 1)], [], [])
    found = backend.applied()["communication_hook"], backend.applied()["reduce_dtype"]
    backend.close()
    return found


def test_a_hook_that_says_the_same_is_used(run_ranks) -> None:
    assert run_ranks(hooked, {"reduce_dtype": "bf16"}, "bf16") == [("bf16", "bf16")] * 2
    assert run_ranks(hooked, {"reduce_dtype": "bf16"}, "none") == [("none", "bf16")] * 2


def refusal(hook: str) -> str:
    with pytest.raises(PrecisionError) as refused:
        ddp({"reduce_dtype": "bf16"}, communication_hook=hook)
    return str(refused.value)


@pytest.mark.parametrize("hook", ["fp16", "power_sgd"])
def test_a_hook_that_contradicts_the_reduction_is_refused(run_ranks, hook: str) -> None:
    for told in run_ranks(refusal, hook):
        assert f"reduce_dtype='bf16' with ddp.communication_hook='{hook}'" in told


class Net(nn.Module):
    """Two parts, which compute in the dtypes of their weights; a third that no loss uses, if it is asked for."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.unused = nn.Linear(2, 2) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.encoder(x.to(self.encoder.weight.dtype)))
        return self.head(x.to(self.head.weight.dtype)).float()


CONVERSIONS: dict[str, Callable[[Any], object]] = {
    "double": lambda model: model.double(),
    "half": lambda model: model.to(torch.bfloat16),
    "there and back": lambda model: model.double().float(),
    "first part": lambda model: model.encoder.double(),
    "second part": lambda model: model.head.double(),
    "second part and back": lambda model: model.head.double().float(),
}


def backend_of(**settings: object) -> DDPBackend:
    return ddp_backend(accumulation=2, **settings)


def converted(name: str, *, inner: bool = False, **settings: object) -> str:
    """Train two windows, convert the model, and train on: what is said, or how far ranks are apart."""
    backend, _model, prepared = prepare_sgd(
        backend_of(**settings), Net(unused=bool(settings.get("find_unused_parameters")))
    )
    try:
        for number in range(10):
            if number == 4:
                CONVERSIONS[name](prepared.unwrap() if inner else prepared.model)
            backend.window.begin()
            loss = prepared.model(torch.ones(2, 4) * (1 + number + dist.get_rank())).square().mean()
            if backend.window.closing:
                prepared.backward(loss)
                step_and_clear(prepared)
            else:
                with prepared.no_sync():
                    prepared.backward(loss)
        check_replicas(backend.context, [prepared.unwrap()])
        return "right"
    except RuntimeError as error:
        return f"window {number // 2}: {type(error).__name__}: {error}"
    finally:
        backend.close()


def each_way(slow: bool) -> dict[str, str]:
    if not slow:
        return {name: converted(name) for name in CONVERSIONS} | {"inner": converted("double", inner=True)}
    found = {f"at_close {name}": converted(name, reduce="at_close") for name in CONVERSIONS}
    for settings in ({"find_unused_parameters": True}, {"static_graph": True}):
        found |= {f"{name} {settings}": converted(name, **settings) for name in CONVERSIONS}
    return found


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_replica_that_is_converted_is_refused_at_its_next_backward_or_right(run_ranks, slow: bool) -> None:
    for found in run_ranks(each_way, slow):
        for name, said in found.items():
            may_be_right = name.startswith("at_close") or "find_unused" in name
            assert (said == "right" and may_be_right) or (
                said.startswith("window 2: ReplacedParameterError: ") and "converted" in said
            ), (name, said)


class Renormalising(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rows = getattr(nn, kind)(40, 8, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x)


class Written(nn.Module):
    """A layer whose forward writes into its weight: the same on all ranks, or what a rank's batch says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.way = nn.Linear(4, 1), way

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        with torch.no_grad():
            if self.way == "alike":
                weight.clamp_(-0.1, 0.1)
            elif self.way == "by batch":
                weight.add_(x.mean(0) * 0.01)
            elif self.way == "by batch, through data":
                weight.data = weight.data + x.mean(0) * 0.01
        return self.layer(x)


def written(way: str) -> str:
    backend = backend_of()
    backend.window.resize(1)
    model: nn.Module = Renormalising(way) if way.startswith("Emb") else Written(way)
    optimizer = SGD(model.parameters(), lr=0.1)
    try:
        (prepared,) = backend.prepare([model], [optimizer], [])
        inner: Any = prepared.unwrap()
        own = SGD([inner.layer.weight], lr=0.1)

        def step_own(_: Tensor) -> None:
            own.step()
            own.zero_grad()

        def step_prepared(_: Tensor) -> None:
            prepared.optimizers[0].step()

        if way.endswith("hook"):
            hook = step_own if way == "own hook" else step_prepared
            inner.layer.weight.register_post_accumulate_grad_hook(hook)
        for _step in range(3):
            backend.window.begin()
            prepared.backward(prepared.model(torch.ones(2, 4) + dist.get_rank()).square().mean())
            step_and_clear(prepared)
        check_replicas(backend.context, [prepared.unwrap()])
        return "right"
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        backend.close()


def written_each_way() -> dict[str, str]:
    ways = (
        "Embedding",
        "EmbeddingBag",
        "alike",
        "by batch",
        "by batch, through data",
        "own hook",
        "prepared hook",
    )
    return {way: written(way) for way in ways}


def test_what_is_written_outside_the_step_is_the_same_on_all_ranks_or_refused(run_ranks) -> None:
    for found in run_ranks(written_each_way):
        assert found["alike"] == "right"
        for kind in ("Embedding", "EmbeddingBag"):
            assert f"rows: {kind}(max_norm=1.0) scales the rows that it looks up in place" in found[kind]
        for way in ("by batch", "by batch, through data"):
            assert "the replicas have drifted apart: layer.weight of Written differs" in found[way]
        assert "layer.weight changed while backward() ran: a hook steps there (written" in found["own hook"]
        assert "a step or clip of Written while backward() runs" in found["prepared hook"]


def before_training() -> bool:
    backend = backend_of()
    with pytest.raises(ValueError, match=r"Sequential: 0\.weight has no shape yet \(a lazy module\)"):
        prepare_sgd(backend, nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1)))
    with pytest.raises(ValueError, match="Net is wrapped in torch's DistributedDataParallel"):
        prepare_sgd(backend, nn.parallel.DistributedDataParallel(Net()))
    _backend, model, prepared = prepare_sgd(backend, Net())
    x = torch.ones(3, 4)
    slopes = [
        torch.func.vmap(torch.func.jacrev(lambda row, one=one: one(row[None])[0, 0]))(x)
        for one in (prepared.model, model)
    ]
    return torch.equal(*slopes)


def test_what_ddp_cannot_wrap_is_refused_by_name_and_a_transform_goes_through(run_ranks) -> None:
    assert run_ranks(before_training) == [True, True]
