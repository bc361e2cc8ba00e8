"""The dtypes in which replicas sum gradients, and parameters that are converted or moved after prepare."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from drivetrain_backends.modules.replicated_weights import check_replicas
from drivetrain_backends.protocol import AutoValue
from drivetrain_precision import PrecisionError, PrecisionSettings
from plain_loop.backends import ddp, held, prepare_sgd, step_and_clear, take_step

Precision = dict[str, str]


@pytest.mark.ranks(2)
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
    settings: dict, dtype: torch.dtype, precision: Precision, mean: float, told: object
) -> None:
    """The mean of gradients 1 and 2**-8 of two ranks."""
    layer = nn.Linear(1, 1, bias=False, dtype=dtype)
    backend, model, prepared = prepare_sgd(ddp(precision=PrecisionSettings(**precision), **settings), layer)
    x = torch.full((1, 1), [1.0, 2.0**-8][dist.get_rank()], dtype=dtype)
    prepared.backward(prepared.model(x).sum())
    assert backend.applied()["reduce_dtype"] == told
    assert model.weight.grad.item() == mean


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("precision", "hook", "reduction"),
    [
        (
            {"param_dtype": "bf16"},
            "none",
            AutoValue(value="fp32", reason="param_dtype='bf16': sums in bf16 would lose small gradients"),
        ),
        ({"reduce_dtype": "bf16"}, "bf16", "bf16"),
        ({"reduce_dtype": "bf16"}, "none", "bf16"),
    ],
)
def test_the_plan_tells_the_reduction_and_a_hook_that_says_the_same(
    precision: Precision, hook: str, reduction: object
) -> None:
    backend, _, _ = prepare_sgd(
        ddp(precision=PrecisionSettings(**precision), communication_hook=hook), nn.Linear(1, 1)
    )
    assert backend.applied()["reduce_dtype"] == reduction
    assert backend.applied()["communication_hook"] == hook


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hook", ["fp16", "power_sgd"])
def test_a_hook_that_contradicts_the_reduction_is_refused(hook: str) -> None:
    with pytest.raises(PrecisionError, match=f"reduce_dtype='bf16' with ddp.communication_hook='{hook}'"):
        ddp(precision=PrecisionSettings(reduce_dtype="bf16"), communication_hook=hook)


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


def converted(name: str, *, inner: bool = False, **settings: object) -> str:
    """Train two windows, convert the model, and train on: what is said, or how far ranks are apart."""
    unused = bool(settings.get("find_unused_parameters"))
    backend, _, prepared = prepare_sgd(ddp(accumulation=2, **settings), Net(unused=unused))
    try:
        for number in range(10):
            if number == 4:
                CONVERSIONS[name](prepared.unwrap() if inner else prepared.model)
            backend.window.begin()
            loss = prepared.model(torch.ones(2, 4) * (1 + number + dist.get_rank())).square().mean()
            with held(backend, [prepared]):
                prepared.backward(loss)
            step_and_clear(prepared)
        check_replicas(backend.context, [prepared.unwrap()])
        return "right"
    except RuntimeError as error:
        return f"window {number // 2}: {type(error).__name__}: {error}"
    finally:
        backend.close()


SLOW: list[dict[str, object]] = [
    {"reduce": "at_close"},
    {"find_unused_parameters": True},
    {"static_graph": True},
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize(
    "settings", [{}, {"inner": True}, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)], ids=str
)
def test_a_replica_that_is_converted_is_refused_at_its_next_backward_or_right(
    name: str, settings: dict
) -> None:
    said = converted(name, **settings)
    may_be_right = "reduce" in settings or "find_unused_parameters" in settings
    assert (said == "right" and may_be_right) or (
        said.startswith("window 2: ReplacedParameterError: ") and "converted" in said
    )


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


WRITTEN = {
    "Embedding": r"rows: Embedding\(max_norm=1\.0\) scales the rows that it looks up in place",
    "EmbeddingBag": r"rows: EmbeddingBag\(max_norm=1\.0\) scales the rows that it looks up in place",
    "alike": None,
    "by batch": "the replicas have drifted apart: layer.weight of Written differs",
    "by batch, through data": "the replicas have drifted apart: layer.weight of Written differs",
    "own hook": r"layer\.weight changed while backward\(\) ran: a hook steps there \(train_written",
    "prepared hook": r"a step or clip of Written while backward\(\) runs",
}


def train_written(way: str) -> None:
    model: nn.Module = Renormalising(way) if way.startswith("Emb") else Written(way)
    backend, inner, prepared = prepare_sgd(ddp(), model)
    if way.endswith("hook"):
        own = way == "own hook"
        stepped = SGD([inner.layer.weight], lr=0.1) if own else prepared.optimizers[0]

        def step(_: Tensor) -> None:
            stepped.step()
            if own:
                stepped.zero_grad()

        inner.layer.weight.register_post_accumulate_grad_hook(step)
    for _step in range(3):
        take_step(prepared, prepared.model(torch.ones(2, 4) + dist.get_rank()).square().mean())
    check_replicas(backend.context, [inner])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WRITTEN)
def test_what_is_written_outside_the_step_is_the_same_on_all_ranks_or_refused(way: str) -> None:
    said = WRITTEN[way]
    with nullcontext() if said is None else pytest.raises((RuntimeError, ValueError), match=said):
        train_written(way)


@pytest.mark.ranks(2)
def test_what_ddp_cannot_wrap_is_refused_by_name_and_a_transform_goes_through() -> None:
    backend = ddp()
    with pytest.raises(ValueError, match=r"Sequential: 0\.weight has no shape yet \(a lazy module\)"):
        prepare_sgd(backend, nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1)))
    with pytest.raises(ValueError, match="Net is wrapped in torch's DistributedDataParallel"):
        prepare_sgd(backend, nn.parallel.DistributedDataParallel(Net()))
    _, model, prepared = prepare_sgd(backend, Net())
    slopes = [
        torch.func.vmap(torch.func.jacrev(lambda row, one=one: one(row[None])[0, 0]))(torch.ones(3, 4))
        for one in (prepared.model, model)
    ]
    assert torch.equal(*slopes)
