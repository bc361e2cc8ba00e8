"""Tensors of which each rank holds rows are the whole to whatever looks at them; what treats rows leaves them so."""

from collections.abc import Callable
from copy import deepcopy
from threading import Barrier
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from drivetrain_parallel import TensorRanks, divide_model, named_cuts, part_of, plan_model
from drivetrain_parallel.outputs.divided_tensor import DividedTensor, divided
from drivetrain_parallel.outputs.layout import PartLayout
from drivetrain_parallel.sequences.positions import SequenceCut
from parallel.divided import ThreadRanks, assert_near, gradients, on_threads
from parallel.divided_tensors import OneOfTwo, peak_bytes

WIDTH = 6
Function = Callable[[Tensor, "Weights"], Tensor]


class Weights(nn.Module):
    """What functions of rows are given beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm, self.norm = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.head, self.without_bias = nn.Linear(WIDTH, 9), nn.Linear(WIDTH, 9, bias=False)
        self.scale, self.number = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(()))


def weights() -> Weights:
    torch.manual_seed(1)
    made = Weights().double()
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


WEIGHTS = weights()  # threads share the generator


def written_norm(x: Tensor, w: Weights) -> Tensor:
    """The norm as Llama's code computes it."""
    wide = x.to(torch.float32).to(torch.float64)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w.scale * wide.to(x.dtype)


def written_out(x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.add(x, 1, out=torch.empty(x.shape, dtype=x.dtype))


BY_ROW: dict[str, Function] = {
    "nothing": lambda x, w: x,
    "written norm": written_norm,
    "layer norm": lambda x, w: w.layer_norm(x),
    "root mean square": lambda x, w: w.norm(x),
    "head": lambda x, w: w.head(x),
    "head without bias": lambda x, w: w.without_bias(x),
    "soft cap": lambda x, w: torch.tanh(w.head(x) / 3.0) * 3.0,
    "learned": lambda x, w: (w.scale - x * w.number) / 2 + w.scale,
    "with itself": lambda x, w: x * x.sigmoid() + (x - x.mean(dim=-1, keepdim=True)) / x.var(-1, keepdim=True),
    "elements": lambda x, w: F.gelu(-x) * F.silu(x.abs()) + (1 - x.relu()).exp() - 2**x + x.sum(-1, keepdim=True),
    "half": lambda x, w: x.bfloat16().double(),
    "shifted": lambda x, w: w.head(x)[..., :-1, :].contiguous().view(-1, 9),
    "shifted before": lambda x, w: w.head(written_norm(x[:, :-1], w)),
    "shifted in full": lambda x, w: x[:, 1:].reshape(-1, WIDTH),
    "flat": lambda x, w: w.head(x.flatten(0, 1)).view((-1, *x.shape[1:2], 9)),
    "a slice of all": lambda x, w: w.head(x[:, slice(0, None), :]),
    "an item": lambda x, w: x[1],
    "the first position": lambda x, w: w.head(x[:, 0]).tanh(),
    "the last of each": lambda x, w: w.head(x[torch.arange(2), torch.tensor([3, 1])]),
    "chosen twice": lambda x, w: w.head(x)[:, torch.tensor([3, 0, 3])] * 2,
    "a mask": lambda x, w: w.head(x[torch.arange(2 * x.shape[1]).view(x.shape[:2]) % 3 > 0]),
    "none": lambda x, w: x[torch.zeros(x.shape[:2], dtype=torch.bool)] * 2,
}  # fmt: skip
NARROW = {"half": 1e-2, "written norm": 1e-6, "shifted before": 1e-6}  # gradients of narrower numbers
WHOLE_ALONE: dict[str, Function] = {
    "dropout": lambda x, w: F.dropout(x, 0.0),
    "over positions": lambda x, w: x.mean(1, keepdim=True),
    "over all": lambda x, w: x.sum(),
    "flipped": lambda x, w: x.flip(1),
    "of other rows": lambda x, w: x[:, 1:] - x[:, :-1],
    "a matrix": lambda x, w: x * torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[:, None],
    "another width": lambda x, w: x.view(-1, 2),
    "softmax of positions": lambda x, w: x.softmax(1),
    "out": lambda x, w: written_out(x) + x,
}  # fmt: skip
CHANGED: dict[str, Function] = {
    "in place": lambda x, w: (x.view(-1, WIDTH), x.mul_(2))[0] * 1,
    "an item in place": lambda x, w: (x[:, 0], x.__setitem__((0, 0), 1.0))[0] * w.scale,
    "an activation in place": lambda x, w: (F.relu(x, inplace=True), x)[1] * 1,
    "a view in place": lambda x, w: (x[1].mul_(3), x)[1].square(),
}


def of_rows(part: Tensor, cut: SequenceCut, ranks: TensorRanks) -> DividedTensor:
    return divided(part, PartLayout.of_rows(part, cut.rows(len(part)), ranks), "the blocks")


def whole_of(length: int) -> Tensor:
    return torch.randn(2, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(length))


def assert_same(function: Function, length: int, size: int, tolerance: float = 1e-11) -> tuple[bool, str]:
    """Assert that ranks compute a function as of the whole, with the gradient of their rows and of the weights.

    Return whether what it returns is divided, and which function joined before it was looked at.
    """
    x, w, cut = whole_of(length).requires_grad_(), deepcopy(WEIGHTS), SequenceCut(length=length, size=size)
    expected = function(x * 1, w)
    outer = torch.linspace(-1, 2, expected.numel(), dtype=torch.float64).view(expected.shape)
    (expected * outer).sum().backward()

    def work(ranks: ThreadRanks) -> tuple[tuple[bool, str], list[Tensor], Tensor]:
        part = whole_of(length).index_select(1, cut.positions(ranks.rank)).requires_grad_()
        own = deepcopy(WEIGHTS)
        found = function(of_rows(part * 1, cut, ranks), own)
        said = isinstance(found, DividedTensor), ranks.joined_by
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        (found * outer).sum().backward()
        assert_near("the value", found.detach(), expected.detach(), 1e-11)
        assert part.grad is not None
        return said, [torch.zeros_like(p) if p.grad is None else p.grad for p in own.parameters()], part.grad

    found = on_threads(size, work)
    parts = torch.cat([gradient.flatten(0, 1) for _, _, gradient in found]) / size
    assert_near("the gradient", parts[cut.rows(2)], x.grad, tolerance)
    parts[cut.rows(2)] = 0
    assert not parts.any()  # of padding
    for number, p in enumerate(w.parameters()):
        mean = torch.stack([gradients[number] for _, gradients, _ in found]).mean(0)
        assert_near(f"the gradient of weight {number}", mean, p.grad, tolerance)
    first, *others = (said for said, _, _ in found)
    assert all(one == first for one in others)
    return first


@pytest.mark.parametrize("name", BY_ROW)
@pytest.mark.parametrize(("length", "size"), [(7, 2), (9, 3)])
@pytest.mark.default_cases("7-2", "9-3-shifted", "9-3-a mask", "9-3-layer norm")
def test_functions_of_rows_leave_them_divided(name: str, length: int, size: int) -> None:
    assert assert_same(BY_ROW[name], length, size, NARROW.get(name, 1e-11)) == (True, "")


@pytest.mark.parametrize("name", WHOLE_ALONE)
def test_any_other_function_is_given_the_whole(name: str) -> None:
    is_divided, joined_by = assert_same(WHOLE_ALONE[name], 7, 2)
    assert not is_divided
    assert joined_by


@pytest.mark.parametrize("name", CHANGED)
def test_changes_in_place_are_seen_by_views_and_by_the_gradient(name: str) -> None:
    assert_same(CHANGED[name], 7, 2)


# 5 over 4 leaves one rank with nothing but padding.
LENGTHS = [(7, 2), (9, 3), (5, 4)]


@st.composite
def losses(draw: Any) -> tuple[int, int, str, dict[str, Any]]:
    length, size = draw(st.sampled_from(LENGTHS))
    options = {
        "weight": draw(st.sampled_from([None, torch.linspace(0.5, 2, 9, dtype=torch.float64)])),
        "ignore_index": draw(st.sampled_from([-100, 0])),
        "reduction": draw(st.sampled_from(["none", "sum", "mean"])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1])),
    }
    return (
        length,
        size,
        draw(st.sampled_from(["shifted", "flat", "chosen twice", "the first position"])),
        options,
    )


@settings(max_examples=25)
@given(losses())
def test_the_loss_of_rows_joins_nothing(case: tuple[int, int, str, dict[str, Any]]) -> None:
    length, size, first, options = case

    def loss(x: Tensor, w: Weights) -> Tensor:
        logits = BY_ROW[first](x, w)
        logits = (logits if logits.shape[-1] == 9 else w.head(logits)).reshape(-1, 9)
        return F.cross_entropy(logits, torch.arange(len(logits)) * 5 % 9, **options)

    assert assert_same(loss, length, size) == (False, "")


def test_a_mean_over_no_row_is_nan_and_a_target_that_is_no_word_is_refused_on_every_rank() -> None:
    cut = SequenceCut(length=7, size=2)

    def work(ranks: ThreadRanks) -> float:
        part = whole_of(7).index_select(1, cut.positions(ranks.rank)).requires_grad_()
        rows = of_rows(part, cut, ranks).view(-1, WIDTH)
        with pytest.raises(IndexError, match="Target 6 is out of bounds"):
            F.cross_entropy(rows, torch.arange(14) % 7)
        return F.cross_entropy(rows, torch.full((14,), -100)).item()

    assert all(one != one for one in on_threads(2, work))


def test_losses_of_rows_and_of_the_whole_add_up() -> None:
    def loss(x: Tensor, w: Weights) -> Tensor:
        logits = w.head(written_norm(x, w))
        of_rows = F.cross_entropy(logits[:, :-1].flatten(0, 1), torch.arange(12) % 9)
        return of_rows + logits.logsumexp(-1).square().mean() + x.max()

    assert assert_same(loss, 7, 2)[1] == "max"


def test_hooks_see_gradients_of_the_whole() -> None:
    def loss_and_seen(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        seen: list[Tensor] = []
        x.register_hook(lambda gradient: seen.append(gradient * 1))
        x.retain_grad()
        logits = deepcopy(WEIGHTS).head(x)
        logits.register_hook(lambda gradient: gradient * 2)
        F.cross_entropy(logits.view(-1, 9), torch.arange(14) % 9).backward()
        assert x.grad is not None
        return x, [*seen, torch.cat([x.grad])]

    _, expected = loss_and_seen(whole_of(7).requires_grad_() * 1)
    cut = SequenceCut(length=7, size=2)

    def work(ranks: ThreadRanks) -> list[Tensor]:
        part = whole_of(7).index_select(1, cut.positions(ranks.rank)).requires_grad_()
        return loss_and_seen(of_rows(part * 1, cut, ranks))[1]

    for found in on_threads(2, work):
        for one, other in zip(found, expected, strict=True):
            assert_near("the gradient", one, other, 1e-11)


def test_what_is_computed_of_one_tensor_has_names_of_its_own() -> None:
    def work(ranks: ThreadRanks) -> None:
        rows = of_rows(torch.ones(2, 4, WIDTH), SequenceCut(length=8, size=2), ranks)
        found = [rows * 2, rows * 3, rows[:1], rows[1:], (rows * 2) * 2]
        places = [one.place for one in found if isinstance(one, DividedTensor)]
        assert len(set(places)) == len(found)

    on_threads(2, work)


class Unchanged(torch.autograd.Function):
    """A function that returns what it is given, as those that wait for a module's gradients do."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def test_a_function_of_autograd_that_returns_its_argument_leaves_it_divided() -> None:
    def loss(x: Tensor, w: Weights) -> Tensor:
        return F.cross_entropy(w.head(Unchanged.apply(x)).view(-1, 9), torch.arange(14) % 9)

    assert assert_same(loss, 7, 2) == (False, "")


class Grid:
    """The ranks of two axes, on threads."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        def axis(number: int, size: int) -> list[tuple[Barrier, list[Tensor]]]:
            return [(Barrier(size, timeout=60), [torch.empty(0)] * size) for _ in range(number)]

        self._num_columns = num_columns
        self._rows, self._columns = axis(num_columns, num_rows), axis(num_rows, num_columns)

    def of(self, rank: int) -> tuple[ThreadRanks, ThreadRanks]:
        row, column = divmod(rank, self._num_columns)
        return ThreadRanks(row, *self._rows[column]), ThreadRanks(column, *self._columns[row])


@pytest.mark.filterwarnings("ignore")  # the profiler warns of machines without a GPU
def test_a_rank_allocates_the_logits_of_its_own_rows() -> None:
    num_rows, num_words = 128, 32_768
    cut, weight = SequenceCut(length=num_rows, size=2), torch.randn(num_words, 2, requires_grad=True)
    part, target = torch.randn(1, num_rows // 2, 2, requires_grad=True), torch.arange(num_rows)

    def train(states: Tensor) -> None:
        F.cross_entropy(F.linear(states, weight).view(-1, num_words), target).backward()

    of_whole = peak_bytes(lambda: train(of_rows(part, cut, OneOfTwo()) + torch.zeros(1, num_rows, 2)))
    of_parts = peak_bytes(lambda: train(of_rows(part, cut, OneOfTwo())))
    own_bytes = num_rows // 2 * num_words * 4
    assert of_whole > 5.9 * own_bytes  # of twice the rows: the logits, the softmax and a gradient
    assert of_parts < 2.2 * own_bytes  # the logits and their gradient


class Perceptron(nn.Module):
    """A perceptron and a head, which ranks divide, after blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.Linear(WIDTH, 9)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.head(x + self.down(F.gelu(self.up(x)))) / 3.0) * 3.0


@pytest.mark.parametrize("style", ["vocabulary_column", "gathered_column"])
def test_layers_that_other_ranks_divide_compute_own_rows(style: str) -> None:
    torch.manual_seed(2)
    x, whole, cut = whole_of(7).requires_grad_(), Perceptron().double(), SequenceCut(length=7, size=2)
    plan = plan_model(whole, 2, {"up": "column", "down": "row", "head": style})

    def loss_of(model: nn.Module, states: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(states)
        rows = logits[:, :-1].flatten(0, 1)
        return logits, F.cross_entropy(rows, torch.arange(12) % 9, label_smoothing=0.1)

    grid, own_models = Grid(2, 2), [deepcopy(whole) for _ in range(4)]
    logits, loss = loss_of(whole, x)
    (loss + logits.square().mean()).backward()

    def work(ranks: ThreadRanks) -> tuple[dict[str, Tensor | None], Tensor | None]:
        row_ranks, column_ranks = grid.of(ranks.rank)
        model = own_models[ranks.rank]
        divide_model(model, plan, column_ranks)
        part = whole_of(7).index_select(1, cut.positions(row_ranks.rank)).requires_grad_()
        found, own_loss = loss_of(model, of_rows(part * 1, cut, row_ranks))
        assert isinstance(found, DividedTensor)
        assert found.part.shape == (8, 9 if style == "gathered_column" else (4, 5)[column_ranks.rank])
        assert (row_ranks.joined_by, column_ranks.joined_by) == ("", "")
        (own_loss + found.square().mean()).backward()
        assert_near("the logits", torch.cat([found]).detach(), logits.detach(), 1e-11)
        assert_near("the loss", own_loss.detach(), loss.detach(), 1e-11)
        return gradients(model), part.grad

    found = on_threads(4, work)
    states = torch.cat([found[rank][1].flatten(0, 1) for rank in (0, 2)]) / 2  # type: ignore[union-attr]
    assert_near("the gradient", states[cut.rows(2)], x.grad, 1e-11)
    cuts = {name: one for name, _, one in named_cuts(whole, plan)}
    for name, parameter in whole.named_parameters():
        for rank in range(2):
            expected = part_of(parameter.grad, cuts[name], rank, 2) if name in cuts else parameter.grad
            mean = (found[rank][0][name] + found[rank + 2][0][name]) / 2  # type: ignore[operator]
            assert_near(f"the gradient of {name}", mean, expected, 1e-11)
