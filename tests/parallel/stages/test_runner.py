"""Stages train as the whole model does: any class of a library, any schedule, any route through blocks; or refuse."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain_parallel.errors import ParallelPlanError
from drivetrain_parallel.stages.schedules import SCHEDULES
from parallel.models import ROUTES
from parallel.staged import assert_staged
from parallel.transformers_cases import CASES, inputs_of

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x if scale is None else x * scale


class Model(nn.Module):
    """Blocks between an embedding, with a parameter beside it, and a head."""

    def __init__(
        self, num_blocks: int = 4, *, route: Callable[..., Tensor] | None = None, fault: str = ""
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, WIDTH), nn.Parameter(torch.randn(12, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9)
        self.route, self.fault = route, fault

    def forward(self, tokens: Tensor) -> Tensor:
        x = embedded = self.words(tokens) + self.places[: tokens.shape[1]]
        if self.route is not None:
            return self.head(self.norm(self.route(x, *self.blocks)))
        for block in self.blocks:
            x = block(x, embedded.mean() if self.fault == "scales by what was embedded" else None)
            if self.fault == "reads a value":
                x = x * x.mean().item()
        if self.fault == "adds what was embedded":
            x = x + embedded
        return self.head(self.norm(x))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def batches(*shapes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(9, shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("num_pieces", [1, 3, 8])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.default_cases("2-3")
def test_every_schedule_has_the_gradients_of_the_whole_model(
    schedule: str, num_ranks: int, num_pieces: int
) -> None:
    shapes = [(2, 5), (3, 5), (1, 7), (2, 4), (2, 5), (2, 5), (1, 5), (1, 1)][:num_pieces]  # of any lengths
    assert_staged(Model(8).double(), batches(*shapes), loss_of, num_ranks=num_ranks, schedule=schedule)


_MIDDLE = "follow(s)? from (words.weight|blocks.[012]), which another stage has"
REFUSED_ROUTES: dict[str, dict[str, str]] = {
    "uses a middle state": {"blocks.2": _MIDDLE},  # where blocks.1 begins a stage, it is what was handed on
    "returns all states": {"blocks.1": _MIDDLE, "blocks.2": _MIDDLE},
    "in another order": {"blocks.1": _MIDDLE, "blocks.2": _MIDDLE},
    "goes around": {"blocks.1": _MIDDLE, "blocks.2": _MIDDLE},
    "drops a sequence between": {"blocks.1": _MIDDLE, "blocks.2": _MIDDLE},
    "skips the middle": {"blocks.1": f"did not call blocks.1|{_MIDDLE}"},
    "leaves early": {"blocks.2": "did not call blocks.2"},
}


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("split", ["blocks.1", "blocks.2"])
@pytest.mark.default_cases("blocks.1")
def test_a_model_goes_through_its_blocks_in_any_way_or_is_refused(name: str, split: str) -> None:
    model, shapes = Model(3, route=ROUTES[name]).double(), ((2, 5), (1, 5))
    if (reason := REFUSED_ROUTES.get(name, {}).get(split)) is None:
        assert_staged(model, batches(*shapes), loss_of, splits=[split])
    else:
        with pytest.raises(ParallelPlanError, match=reason):
            assert_staged(model, batches(*shapes), loss_of, splits=[split])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("scales by what was embedded", "blocks.2, of stage 1, takes what follows from words"),
        ("reads a value", "reads values that follow from words"),
    ],
)
def test_what_stages_do_not_hand_on_is_refused(fault: str, said: str) -> None:
    with pytest.raises(ParallelPlanError, match=said):
        assert_staged(Model(fault=fault).double(), batches((2, 5)), loss_of)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_rank_with_the_first_and_the_last_stage_hands_nothing_on_beside_the_others(is_tied: bool) -> None:
    model = Model(fault="scales by what was embedded").double()
    if is_tied:  # which the last rank holds too
        model.head.weight = model.words.weight
    with pytest.raises(ParallelPlanError, match="takes what follows from words"):
        assert_staged(model, batches((2, 5), (2, 5)), loss_of, schedule="1f1b" if is_tied else "zbv")


def test_a_frozen_beginning_and_a_tied_head_train_as_on_one_device() -> None:
    model = Model().double()
    model.head.weight = model.words.weight
    model.blocks[0].requires_grad_(False)
    assert_staged(model, batches((2, 5), (1, 5)), loss_of, schedule="zbv")
    frozen = Model().double().requires_grad_(False)
    frozen.head.requires_grad_(True)
    assert_staged(frozen, batches((2, 5), (1, 5)), loss_of, num_ranks=4)


REFUSED = {"t5": "attend to what", "bart": "attend to what", "whisper": "attend to what"}
LAST: dict[str, tuple[str, ...]] = {"opt": ("*.final_layer_norm",)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.default_cases("gpt2", "vit", "qwen3", "mixtral", "t5")
def test_models_of_a_library_train_in_stages_or_are_refused(name: str) -> None:
    pytest.importorskip("transformers")
    case = CASES[name]
    model = case.build().train()
    model = model.double() if case.in_fp64 else model
    for module in model.modules():
        for name_of_rate in ("p", "dropout"):
            if isinstance(getattr(module, name_of_rate, None), float):
                setattr(module, name_of_rate, 0.0)

    def loss(model: nn.Module, inputs: list[Tensor]) -> Tensor:
        output: Any = model(**dict(zip(case.inputs, inputs, strict=True)))
        logits = output.logits if "logits" in output else output[0]
        generator = torch.Generator().manual_seed(3)
        weights = torch.randn(logits.shape[1:], generator=generator, dtype=torch.float64).to(logits.dtype)
        return (logits * weights).mean()

    whole = inputs_of(case)
    pieces = [[one[:1] for one in whole], whole]
    if (reason := REFUSED.get(name)) is not None:
        with pytest.raises(ParallelPlanError, match=reason):
            assert_staged(model, pieces, loss)
        return
    assert_staged(model, pieces, loss, tolerance=1e-9 if case.in_fp64 else 1e-5, last=LAST.get(name, ()))
